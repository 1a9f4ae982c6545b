"""One tensor of a rank beside those that the same module gives in one process, vector by vector.

A rank may hold any slice of rows, positions, heads or features, flattened and in any order, so each
vector along the last dimension is looked for by its value. A gradient is compared where its output
was found, and may have a factor: on all of it, or on each vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

SAME_FACTOR = 1e-6

NOTHING = 1e-4  # of the bound of an error: what is smaller is zero
MAX_PAIRS = 1 << 22  # vectors times vectors that are compared
MAX_VECTORS = 512  # of a rank's tensor that are compared; of more, some are drawn
HUGE, GAP, SPREAD = 1e8, 1e4, 16.0  # a mask, times all else: how far above it is, and how wide
KEY = 8  # elements that are compared first


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Match:
    """Where a rank's vectors are among the single process's.

    found: (n, N) bool, which of the N vectors each of the n is; several where they are equal.
    columns: the features it holds of them. picked: (n,) the vectors of the rank that were compared.
    empty: (n,) bool, padding: zeros, or what a module makes of them, one vector again and again.
    """

    found: Tensor
    columns: tuple[int, int]
    picked: Tensor
    empty: Tensor

    @property
    def here(self) -> Tensor:
        """(n,) bool: those that are there, or are padding."""
        return self.found.any(1) | self.empty


def vectors(tensor: Tensor) -> Tensor:
    """(..., C) as (n, C) float64; a scalar as (1, 1)."""
    if tensor.dim() == 0:
        return tensor.double().reshape(1, 1)
    return (
        tensor.double().reshape(-1, tensor.shape[-1]) if tensor.numel() else tensor.new_zeros(0, 1)
    )


def match(got: Tensor, wanted: Tensor, tolerance: float) -> Match | None:
    """Look for the rank's vectors among the single process's. None where they cannot be told.

    got: (n, c), wanted: (N, C), float64. tolerance: a part of the largest element of `wanted`.
    """
    if not got.numel() or not wanted.numel() or got.shape[1] > wanted.shape[1]:
        return None
    picked = torch.arange(len(got))
    most = min(MAX_VECTORS, max(1, MAX_PAIRS // len(wanted)))
    if len(got) > most:
        generator = torch.Generator().manual_seed(len(got))
        picked = torch.randperm(len(got), generator=generator)[:most].sort().values
    chosen, wanted, size = _without_masks(got[picked], wanted)
    bound = tolerance * size
    empty = (chosen == 0).all(1)
    best: Match | None = None
    for start, end in _column_slices(got.shape[1], wanted.shape[1]):
        near = _near(chosen, wanted[:, start:end].contiguous(), bound)
        one = Match(found=near, columns=(start, end), picked=picked, empty=empty)
        if best is None or int(one.here.sum()) > int(best.here.sum()):
            best = one
        if bool(one.here.all()):
            break
    return best and replace(best, empty=empty | _again_and_again(chosen, ~best.here, bound))


def _without_masks(got: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor, float]:
    """Both, and the largest number. Where some stand for nothing, as -1e9 where a mask is, they are
    cut off alike and are not it: what is added to them is lost in their rounding, and beside them
    all else would be near."""
    sizes = wanted.abs()
    huge = sizes >= HUGE
    rest = float(sizes[~huge].max()) if not bool(huge.all()) else 0.0
    low, high = (float(end) for end in sizes[huge].aminmax()) if bool(huge.any()) else (0.0, 0.0)
    if not rest or low < GAP * rest or (low != high and high - low > SPREAD * rest):
        return got, wanted, float(sizes.max())
    limit = GAP**0.5 * rest
    return got.clamp(-limit, limit), wanted.clamp(-limit, limit), rest


def _again_and_again(chosen: Tensor, missing: Tensor, bound: float) -> Tensor:
    """(n,) bool: those that are not there, where they are one vector several times and others are
    there."""
    others = chosen[missing]
    if len(others) < 2 or bool(missing.all()):
        return torch.zeros_like(missing)
    return missing & (float((others - others[0]).abs().max()) <= bound)


def _near(got: Tensor, wanted: Tensor, bound: float) -> Tensor:
    """(n, N) bool: which vectors are the same within a bound; a few of their elements first."""
    key = torch.linspace(0, got.shape[1] - 1, min(KEY, got.shape[1])).long()
    near = torch.cdist(got[:, key], wanted[:, key], p=float("inf")) <= bound
    if len(key) == got.shape[1]:
        return near
    rows, columns = near.nonzero(as_tuple=True)
    for some in torch.arange(len(rows)).split(1 << 16):
        off = (got[rows[some]] - wanted[columns[some]]).abs().amax(1) > bound
        near[rows[some][off], columns[some][off]] = False
    return near


def has_zeros_beyond(got: Tensor, wanted: Tensor, tolerance: float) -> bool:
    """Whether a rank's (n, c) is a stretch of the (N, C) columns that begins where they do, or ends
    there, with zeros before it, or after. Zeros that the single process has there, too, are left
    out."""
    before, after = _zeros_around(got)
    theirs_before, theirs_after = _zeros_around(wanted)
    own = got[:, before : got.shape[1] - after]
    whole = wanted[:, theirs_before : wanted.shape[1] - theirs_after]
    if not (before or after) or not own.shape[1] or own.shape[1] > whole.shape[1]:
        return False
    if before and after and own.shape[1] < whole.shape[1]:
        return False
    if len(own) * len(whole) > MAX_PAIRS:
        return False
    start = 0 if before else whole.shape[1] - own.shape[1]
    there = whole[:, start : start + own.shape[1]].contiguous()
    bound = tolerance * float(wanted.abs().max())
    return bool(_near(own.contiguous(), there, bound).any(1).all())


def _zeros_around(tensor: Tensor) -> tuple[int, int]:
    """How many first, and how many last columns are zero throughout; all of them are first ones."""
    live = tensor.any(0).nonzero()[:, 0].tolist()
    return (live[0], tensor.shape[1] - 1 - live[-1]) if live else (tensor.shape[1], 0)


def _column_slices(width: int, whole: int) -> list[tuple[int, int]]:
    """Features that a rank may hold: shards of equal size first, then any stretch."""
    if width == whole:
        return [(0, whole)]
    shards = [(i, i + width) for i in range(0, whole - width + 1, width)]
    others = [(i, i + width) for i in range(whole - width + 1)]
    return list(dict.fromkeys([*shards, *others]))[:256]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Compared:
    """A gradient beside the single process's. right: (n,) bool, up to a factor; factors: (n,), NaN
    where the single process has zeros and so has the rank, and where terms have factors of their
    own. terms: (n, T) those of each term of a loss of several, NaN where it has no gradient."""

    right: Tensor
    factors: Tensor
    terms: Tensor


def compare_gradient(
    got: Tensor, wanted: Tensor, where: Match, tolerance: float, by_term: Tensor | None = None
) -> Compared:
    """Vector by vector, among those that its output may be.

    got: (n, c); wanted: (N, C); by_term: (T, N, C), which add up to `wanted`.
    """
    start, end = where.columns
    got, wanted = got[where.picked], wanted[:, start:end]
    parts = torch.zeros(0, *wanted.shape) if by_term is None else by_term[..., start:end]
    bound = tolerance * float(wanted.abs().max())
    right = torch.zeros(len(got), dtype=torch.bool)
    factors = torch.full((len(got),), float("nan"), dtype=torch.float64)
    terms = torch.full((len(got), len(parts)), float("nan"), dtype=torch.float64)
    alone = where.found.sum(1) == 1 if not len(parts) else torch.zeros_like(right)
    theirs = wanted[where.found[alone].long().argmax(1)]
    right[alone], factors[alone], _ = _factors_of_pairs(got[alone], theirs, bound)
    for i in (~alone).nonzero()[:, 0].tolist():
        mine, may_be = got[i], where.found[i]
        if bool(where.empty[i]) and not bool(may_be.any()):
            right[i] = True
            continue
        found = _one_factor(mine, wanted[may_be], bound)
        if found is not None:
            factor, chosen = found
            right[i], factors[i] = True, factor
            if len(parts):
                candidate = parts[:, may_be][:, chosen]
                live = candidate.abs().amax(1) > bound
                if abs(factor - 1) <= SAME_FACTOR or _are_apart(candidate[live]):
                    terms[i, live] = factor
            continue
        for candidate in parts[:, may_be].unbind(1) if len(parts) > 1 else ():
            own = _factor_by_term(mine, candidate, bound)
            if own is not None:
                right[i], terms[i] = True, own
                break
    return Compared(right=right, factors=factors, terms=terms)


def _factors_of_pairs(got: Tensor, wanted: Tensor, bound: float) -> tuple[Tensor, Tensor, Tensor]:
    """Row by row: whether it is a multiple of what is wanted, of which factor, NaN where zeros do
    not tell, and the square of what is wanted, zero where it is of rounding alone."""
    squares = (wanted * wanted).sum(1)
    squares = torch.where(squares.sqrt() > NOTHING * bound, squares, 0.0)
    products = (wanted * got).sum(1)
    factor = torch.where(squares > 0, products / squares.clamp(min=1e-300), 0.0)
    errors = (got - factor[:, None] * wanted).abs().amax(1)
    fits = errors <= bound * factor.abs().clamp(min=1.0)
    telling = fits & (squares.sqrt() > 1e3 * bound)
    return fits, torch.where(telling, factor, float("nan")), squares


def _one_factor(mine: Tensor, candidates: Tensor, bound: float) -> tuple[float, int] | None:
    """Which multiple of which of these a vector is; NaN where zeros do not tell."""
    fits, factor, squares = _factors_of_pairs(mine[None], candidates, bound)
    if not bool(fits.any()):
        return None
    telling = ~factor.isnan()
    none = not bool(mine.any()) and not bool(squares[fits].all())
    if not bool(telling.any()) or none:
        return float("nan"), int(fits.nonzero()[0])
    nearest = int(torch.where(telling, (factor - 1).abs(), float("inf")).argmin())
    found = float(factor[nearest])
    others = bool(((factor[telling] - found).abs() > SAME_FACTOR * abs(found)).any())
    # Of several with other factors it is the one that is right, or no one knows which.
    return float("nan") if others and abs(found - 1) > SAME_FACTOR else found, nearest


def _are_apart(parts: Tensor) -> bool:
    """Whether vectors of terms tell their factors apart: not where they have one direction."""
    return len(parts) < 2 or int(torch.linalg.matrix_rank(parts, rtol=1e-9)) == len(parts)


def _factor_by_term(mine: Tensor, parts: Tensor, bound: float) -> Tensor | None:
    """(T,) a factor for each term's vector, if a vector is their sum. parts: (T, c)."""
    live = parts.abs().amax(1) > 1e3 * bound
    num = int(live.sum())
    if num < 2 or parts.shape[1] <= num:
        return None
    columns = parts[live].T
    if int(torch.linalg.matrix_rank(columns, rtol=1e-9)) < num:
        return None
    own = torch.linalg.lstsq(columns, mine[:, None], driver="gelsd").solution[:, 0]
    error = float((mine - columns @ own).abs().max())
    if not error <= bound * max(1.0, float(own.abs().max())):
        return None
    out = torch.full((len(parts),), float("nan"), dtype=torch.float64)
    out[live] = own
    return out


def add_up(parts: Sequence[Tensor], wanted: Tensor, where: Match, tolerance: float) -> bool:
    """Whether ranks that hold parts of the same vectors hold the whole together, up to a factor."""
    if len({part.shape for part in parts}) != 1:
        return False
    start, end = where.columns
    total, wanted = torch.stack(list(parts)).sum(0)[where.picked], wanted[:, start:end]
    bound = tolerance * float(wanted.abs().max())
    return all(
        (bool(where.empty[i]) and not bool(may_be.any()))
        or _one_factor(mine, wanted[may_be], bound) is not None
        for i, (mine, may_be) in enumerate(zip(total, where.found, strict=True))
    )
