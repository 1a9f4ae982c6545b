"""One tensor against what it must be: numbers, a status, and what would have been seen.

It explains nothing and merges nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sumgrad.base.tolerances import BLIND_PRECISION, BLIND_STRUCTURE, zero_factor
from sumgrad.base.verdict import Status
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDiff:
    """One parameter's gradient on one rank against the reference. Absolute unless it says rel.

    comparable: the gradient is there, of the right shape, and finite. ratio: <dist, ref> /
    <ref, ref>. power: term -> smallest relative scale error of that term alone that would have
    failed; inf where none would. power_whole: the same of all terms together; every_term: whether
    this tier must see each alone. lost_share_caught: smallest part of the absolute partials whose
    loss would have failed. of_threshold: max_abs / threshold.
    """

    name: str
    unit: str
    pool: str
    rank: int
    tier: str
    step: int
    status: Status
    reason: str | None
    comparable: bool
    max_abs: float
    max_rel: float
    l2_rel: float
    ratio: float | None
    noise_floor: float
    threshold: float
    power: dict[str, float]
    power_whole: float
    every_term: bool
    lost_share_caught: float
    index: tuple[int, ...]
    max_rel_same_dtype: float | None
    l2_rel_same_dtype: float | None

    @property
    def smallest_scale_error_caught(self) -> float:
        """Any term scaled by more than this would have failed; inf if one could hide.

        Of the whole gradient where another tier judges the terms one by one.
        """
        if not self.every_term:
            return self.power_whole
        return max(self.power.values(), default=float("inf"))

    @property
    def is_within(self) -> bool:
        """Whether it is right as far as it can be seen, even if that is not far enough."""
        return self.comparable and self.of_threshold <= 1

    @property
    def of_threshold(self) -> float:
        if not self.threshold:
            return float("inf") if self.max_abs else 0.0
        return self.max_abs / self.threshold


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What a gradient of one parameter must be, and how far off it may be.

    value: all of it, or a rank's shard; scale and size (max|value|) are always of the whole.
    measured_in: the dtype of the runs that its terms and their resolution are from.
    """

    value: Tensor
    same_dtype: Tensor | None
    floor: float
    threshold: float
    scale: float
    terms: dict[str, Tensor]
    resolution: dict[str, float]
    every_term: bool
    size: float
    measured_in: str = "float64"


def tensor_diff(
    got: Tensor | None,
    wanted: Expected,
    *,
    name: str,
    unit: str,
    pool: str,
    rank: int,
    tier: str,
    step: int,
) -> TensorDiff:
    """One tensor of one rank. got: None where the rank holds the parameter but no gradient."""
    reason, index = _why_not(got, wanted)
    comparable = reason is None
    error = _Error() if got is None or got.shape != wanted.value.shape else _error(got, wanted)
    if comparable and not error.max_abs <= wanted.threshold:
        reason = "the error is above the threshold"
    power = _power(wanted)
    status: Status = "fail"
    if reason is None:
        status, reason = _seen_enough(wanted, power)
    need = wanted.threshold + wanted.floor
    return TensorDiff(
        name=name,
        unit=unit,
        pool=pool,
        rank=rank,
        tier=tier,
        step=step,
        status=status,
        reason=reason,
        comparable=comparable,
        max_abs=error.max_abs,
        max_rel=error.max_rel,
        l2_rel=error.l2_rel,
        ratio=error.ratio,
        noise_floor=wanted.floor,
        threshold=wanted.threshold,
        power=power,
        power_whole=need / wanted.size if wanted.size else float("inf"),
        every_term=wanted.every_term,
        lost_share_caught=need / wanted.scale if wanted.scale else float("inf"),
        index=index or error.index,
        max_rel_same_dtype=error.same,
        l2_rel_same_dtype=error.same_l2,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Error:
    """How far off a gradient is; NaN where it cannot be compared. same: from the same dtype's."""

    index: tuple[int, ...] = ()
    max_abs: float = float("nan")
    max_rel: float = float("nan")
    l2_rel: float = float("nan")
    ratio: float | None = None
    same: float | None = None
    same_l2: float | None = None


def _error(got: Tensor, wanted: Expected) -> _Error:
    ref, size = wanted.value, wanted.size
    error = (got.double() - ref).abs()
    max_abs = float(error.max()) if error.numel() else 0.0
    norm = float(ref.norm())
    same = same_l2 = None
    if wanted.same_dtype is not None and size:
        distance = got.double() - wanted.same_dtype.double()
        same = float(distance.abs().max()) / size if distance.numel() else 0.0
        same_l2 = float(distance.norm()) / norm if norm else None
    return _Error(
        index=_worst_index(error),
        max_abs=max_abs,
        max_rel=max_abs / size if size else max_abs,
        l2_rel=float(error.norm()) / norm if norm else float(error.norm()),
        ratio=float((got.double() / norm * (ref / norm)).sum()) if norm else None,
        same=same,
        same_l2=same_l2,
    )


def _why_not(got: Tensor | None, wanted: Expected) -> tuple[str | None, tuple[int, ...]]:
    """Why two tensors cannot be compared, and where; None where they can."""
    ref = wanted.value
    if got is None:
        return "this rank holds the parameter but wrote no gradient", ()
    if got.shape != ref.shape:
        return f"got shape {tuple(got.shape)}, expected {tuple(ref.shape)}", ()
    if not bool(torch.isfinite(ref).all()):
        return "the reference itself is not finite", ()
    if not bool(torch.isfinite(got).all()):
        index = tuple(torch.nonzero(~torch.isfinite(got))[0].tolist())
        return f"{float(got[index])} at {list(index)}", index
    return None, ()


def _power(wanted: Expected) -> dict[str, float]:
    """Smallest |c - 1| on a term alone that lifts the error over the threshold for certain.

    A term that is zero by mathematics, all noise, is left out: no factor changes it.
    """
    need = wanted.threshold + wanted.floor
    sizes = {t: float(v.abs().max()) for t, v in wanted.terms.items() if v.numel()}
    return {
        term: need / size
        for term, size in sizes.items()
        if size > zero_factor(wanted.measured_in) * wanted.resolution[term]
    }


def _seen_enough(wanted: Expected, power: dict[str, float]) -> tuple[Status, str | None]:
    """UNKNOWN where a wrong gradient would have passed."""
    if wanted.scale == 0:
        return (
            "unknown",
            "no term reaches this tensor: its gradient is zero, so nothing was checked",
        )
    if wanted.every_term:
        blind = [term for term, value in power.items() if value > BLIND_STRUCTURE]
        if blind:
            return "unknown", f"a wrong factor on {', '.join(blind)} would not have been seen"
    elif power and wanted.threshold + wanted.floor > BLIND_PRECISION * float(
        wanted.value.abs().max()
    ):
        return "unknown", "the noise of this dtype would have hidden a wrong factor"
    return "pass", None


def _worst_index(error: Tensor) -> tuple[int, ...]:
    if not error.numel():
        return ()
    flat = int(torch.nan_to_num(error, nan=float("inf")).argmax())
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), error.shape))
