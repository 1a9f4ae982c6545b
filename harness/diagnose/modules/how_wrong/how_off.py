"""In which way a gradient is wrong: columns with factors of their own, or in other places.

Both are held against each other vector by vector: what a rank has, and what the single process has
at the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sumgrad.diagnose.modules.values.matching import SAME_FACTOR
from torch import Tensor

SAME = 1e-9  # of the largest number
FEWEST = 3  # vectors: of fewer a factor of a column is told by too little


@dataclass(frozen=True, slots=True, kw_only=True)
class HowOff:
    """columns: (C,) which column of the single process each column is. factors: of each, NaN where
    it has none. Of columns that are zero there, neither tells anything: -1, and NaN. wrong: those
    that are no multiple, where the others have one factor."""

    columns: tuple[int, ...]
    factors: tuple[float, ...]
    wrong: tuple[int, ...] = ()

    @property
    def is_moved(self) -> bool:
        return any(k not in (-1, j) for j, k in enumerate(self.columns))


def how_off(got: Tensor, wanted: Tensor) -> HowOff | None:
    """(n, C) both. None where a column is no multiple of any, or all have one factor in place.

    Columns are looked for elsewhere only if that is so of all with one factor.
    """
    if got.shape != wanted.shape or got.dim() != 2 or got.shape[1] < 2 or len(got) < FEWEST:
        return None
    live = wanted.any(0) | got.any(0)
    own = _factors(got, wanted)
    places = torch.arange(got.shape[1])
    wrong = own.isnan() & live
    if bool(wrong.any()):
        return _moved(got, wanted, live) or _some_wrong(own, live, wrong)
    known = own[live]
    if not len(known) or float(known.max() - known.min()) <= SAME_FACTOR * float(known.abs().max()):
        return None
    return HowOff(
        columns=tuple(places.where(live, -1).tolist()),
        factors=tuple(own.where(live, float("nan")).tolist()),
    )


def _some_wrong(own: Tensor, live: Tensor, wrong: Tensor) -> HowOff | None:
    """Where the other columns have one factor; what is lost is as wrong."""
    wrong = wrong | (live & (own == 0))
    known = own[live & ~wrong]
    if not len(known) or float(known.max() - known.min()) > SAME_FACTOR * float(known.abs().max()):
        return None
    return HowOff(
        columns=tuple(torch.arange(len(own)).where(live & ~wrong, -1).tolist()),
        factors=tuple(own.tolist()),
        wrong=tuple(wrong.nonzero()[:, 0].tolist()),
    )


def _factors(got: Tensor, wanted: Tensor) -> Tensor:
    """(C,) c with got = c wanted in each column; NaN where there is none."""
    square = wanted.square().sum(0)
    c = (got * wanted).sum(0) / square.where(square > 0, 1.0)
    off = (got - c * wanted).abs().amax(0)
    size = torch.maximum(got.abs().amax(0), wanted.abs().amax(0))
    return c.where((off <= SAME * size) & (square > 0), float("nan"))


def _moved(got: Tensor, wanted: Tensor, live: Tensor) -> HowOff | None:
    width = got.shape[1]
    if width * width * len(got) > 1 << 22:
        return None
    a = torch.nn.functional.normalize(got, dim=0)
    b = torch.nn.functional.normalize(wanted, dim=0)
    best = (a.T @ b).abs().argmax(1)  # (C,)
    factors = _factors(got, wanted[:, best])
    told = got.any(0)
    if bool(factors[told].isnan().any()) or len(best[told].unique()) < int(told.sum()):
        return None
    known = factors[told]
    if not len(known) or float(known.max() - known.min()) > SAME_FACTOR * float(known.abs().max()):
        return None
    if int(live.sum()) != int(told.sum()):
        return None
    return HowOff(
        columns=tuple(best.where(told, -1).tolist()),
        factors=tuple(factors.where(told, float("nan")).tolist()),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ZerosOff:
    """How many of `of` numbers are zero and should not be, and should be and are not."""

    lost: int
    surplus: int
    of: int


def zeros_off(got: Tensor, wanted: Tensor) -> ZerosOff | None:
    """(n, C) both. Where all that is zero in neither has one factor, and more is not; None else."""
    if got.shape != wanted.shape:
        return None
    both = (got != 0) & (wanted != 0)
    ratios = got[both] / wanted[both]
    lost, surplus = (wanted != 0) & (got == 0), (wanted == 0) & (got != 0)
    if len(ratios) < FEWEST or not bool((lost | surplus).any()):
        return None
    if float(ratios.max() - ratios.min()) > SAME_FACTOR * float(ratios.abs().max()):
        return None
    return ZerosOff(lost=int(lost.sum()), surplus=int(surplus.sum()), of=got.numel())


@dataclass(frozen=True, slots=True, kw_only=True)
class Stands:
    """What a wrong column has: nothing, where of is None; what belongs to column `of`, in place of
    its own; or that beside its own, too, where it is added."""

    column: int
    of: int | None = None
    added: bool = False


def what_stands(got: Tensor, wanted: Tensor, how: HowOff) -> list[Stands] | None:
    """(n, C) both. Of every column that is wrong; None where that is not so of each of them."""
    right = [j for j, k in enumerate(how.columns) if k == j]
    if not how.wrong or not right or got.shape[1] ** 2 * len(got) > 1 << 22:
        return None
    wanted = wanted * how.factors[right[0]]
    out = []
    for j in how.wrong:
        own, beside = got[:, j], got[:, j] - wanted[:, j]
        others = [k for k in range(got.shape[1]) if k != j]
        asked = ((own, wanted, False), (beside, wanted, True), (beside, got, True))
        found = (Stands(column=j, of=k, added=added) for column, among, added in asked
                 if (k := _column_of(column, among, others)) is not None)  # fmt: skip
        stands = next(found, None) if bool(own.any()) else Stands(column=j)
        if stands is None:
            return None
        out.append(stands)
    return out


def _column_of(own: Tensor, among: Tensor, columns: list[int]) -> int | None:
    """The only one that is the same."""
    size = float(own.abs().max())
    same = [k for k in columns if float((among[:, k] - own).abs().max()) <= SAME * size]
    return same[0] if len(same) == 1 else None
