"""Measured against reference, tensor by tensor, on every rank that holds it.

What it is: numbers and a status for each tensor, with what the comparison would have seen. What it
is not: it explains nothing (diagnose.py) and merges nothing (judge.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from sumgrad.plan import Count, Norm, Plan
from sumgrad.proof import expected_terms
from sumgrad.record import RankRecord, RunRecord
from sumgrad.reference import StepReference
from sumgrad.tolerances import (
    BLIND_PRECISION,
    BLIND_STRUCTURE,
    FLOOR_FACTOR,
    ZERO_FACTOR,
    noise_floor,
    threshold,
)
from sumgrad.verdict import Status
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
    def of_threshold(self) -> float:
        if not self.threshold:
            return float("inf") if self.max_abs else 0.0
        return self.max_abs / self.threshold


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What a gradient of one parameter must be, and how far off it may be.

    value: all of it, or a rank's shard; scale and size (max|value|) are always of the whole.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalarDiff:
    """A count, a norm, or a hash of one rank that is not the reference's."""

    rank: int
    tier: str
    step: int
    what: str
    text: str


def expect(
    plan: Plan,
    reference: StepReference,
    pool: str,
    name: str,
    *,
    tier: str,
    dtype: str,
    every_term: bool,
) -> Expected:
    """The reference's value for a holder: all terms on a home, the pool's own on a replica.

    every_term: a wrong factor on any one term must be seen, else the tensor is UNKNOWN.
    """
    unit = next(p.unit for p in plan.declaration.params if p.name == name)
    terms = list(dict.fromkeys(term for term, _ in expected_terms(plan, pool, unit)))
    by_term = {term: reference.by_term[term][name] for term in terms}
    scale = float(reference.scale[name].max()) if reference.scale[name].numel() else 0.0
    if plan.role(pool).home:
        value, measured = reference.grads[name], reference.floor[name]
        same: Tensor | None = reference.same_dtype[name]
    else:
        value = torch.stack(list(by_term.values())).sum(0)
        measured = sum(reference.floor_by_term[term][name] for term in terms)
        same = None
    floor = noise_floor(measured, scale, dtype)
    return Expected(
        value=value,
        same_dtype=same,
        floor=floor,
        threshold=threshold(floor, scale, tier=tier),
        scale=scale,
        terms=by_term,
        resolution={term: reference.resolution[term][name] for term in terms},
        every_term=every_term,
        size=float(value.abs().max()) if value.numel() else 0.0,
    )


def compare_tensors(record: RunRecord) -> Iterator[TensorDiff]:
    """Every tensor of every rank that wrote its gradients, in every tier and step."""
    plan = record.plan
    for tier, dtype in record.spec.tiers.items():
        for reference in record.references.get(tier, []):
            for pool in plan.topology.pools:
                names = [
                    p.name for u in plan.units[pool.name] for p in plan.declaration.params_of(u)
                ]
                for name in names:
                    wanted = expect(
                        plan,
                        reference,
                        pool.name,
                        name,
                        tier=tier,
                        dtype=dtype,
                        every_term=tier == "structure" or "structure" not in record.spec.tiers,
                    )
                    yield from _compare_pool(record, pool.name, name, tier, reference.step, wanted)


def _compare_pool(
    record: RunRecord, pool: str, name: str, tier: str, step: int, wanted: Expected
) -> Iterator[TensorDiff]:
    """All ranks of a pool; equal bits are compared once."""
    unit = next(p.unit for p in record.plan.declaration.params if p.name == name)
    seen: list[tuple[Tensor, TensorDiff]] = []
    for rank in record.plan.topology.pool(pool).ranks:
        held = record.ranks.get(rank)
        if held is None or (tier, step) not in held.grads:
            continue
        got = held.grads[tier, step].get(name)
        if got is not None:
            known = next((diff for other, diff in seen if same_bits(other, got)), None)
            if known is not None:
                yield replace(known, rank=rank)
                continue
        diff = tensor_diff(
            got, wanted, name=name, unit=unit, pool=pool, rank=rank, tier=tier, step=step
        )
        if got is not None:
            seen.append((got, diff))
        yield diff


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
    ref = wanted.value
    status: Status = "pass"
    reason: str | None = None
    comparable = False
    index: tuple[int, ...] = ()
    max_abs = max_rel = l2_rel = float("nan")
    ratio = same = same_l2 = None
    if got is None:
        status, reason = "fail", "this rank holds the parameter but wrote no gradient"
    elif got.shape != ref.shape:
        status, reason = "fail", f"got shape {tuple(got.shape)}, expected {tuple(ref.shape)}"
    else:
        error = (got.double() - ref).abs()
        index = _worst_index(error)
        size = wanted.size
        max_abs = float(error.max()) if error.numel() else 0.0
        max_rel = max_abs / size if size else max_abs
        norm = float(ref.norm())
        l2_rel = float(error.norm()) / norm if norm else float(error.norm())
        ratio = float((got.double() * ref).sum()) / norm**2 if norm else None
        if wanted.same_dtype is not None and size:
            distance = got.double() - wanted.same_dtype.double()
            same = float(distance.abs().max()) / size if distance.numel() else 0.0
            same_l2 = float(distance.norm()) / norm if norm else None
        if not bool(torch.isfinite(ref).all()):
            status, reason = "fail", "the reference itself is not finite"
        elif not bool(torch.isfinite(got).all()):
            bad = ~torch.isfinite(got)
            index = tuple(torch.nonzero(bad)[0].tolist())
            status, reason = "fail", f"{float(got[index])} at {list(index)}"
        else:
            comparable = True
            if not max_abs <= wanted.threshold:
                status, reason = "fail", "the error is above the threshold"
    power = _power(wanted)
    if status == "pass":
        status, reason = _seen_enough(wanted, power, every_term=wanted.every_term)
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
        max_abs=max_abs,
        max_rel=max_rel,
        l2_rel=l2_rel,
        ratio=ratio,
        noise_floor=wanted.floor,
        threshold=wanted.threshold,
        power=power,
        power_whole=(wanted.threshold + wanted.floor) / wanted.size
        if wanted.size
        else float("inf"),
        every_term=wanted.every_term,
        lost_share_caught=(wanted.threshold + wanted.floor) / wanted.scale
        if wanted.scale
        else float("inf"),
        index=index,
        max_rel_same_dtype=same,
        l2_rel_same_dtype=same_l2,
    )


def _power(wanted: Expected) -> dict[str, float]:
    """Smallest |c - 1| on a term alone that lifts the error over the threshold for certain.

    A term that is zero by mathematics, float64 noise, is left out: no factor changes it.
    """
    need = wanted.threshold + wanted.floor
    sizes = {t: float(v.abs().max()) for t, v in wanted.terms.items() if v.numel()}
    return {
        term: need / size
        for term, size in sizes.items()
        if size > ZERO_FACTOR * wanted.resolution[term]
    }


def _seen_enough(
    wanted: Expected, power: dict[str, float], *, every_term: bool
) -> tuple[Status, str | None]:
    """UNKNOWN where a wrong gradient would have passed."""
    if wanted.scale == 0:
        return "unknown", "no term reaches this tensor, so nothing was checked"
    if every_term:
        blind = [term for term, value in power.items() if value > BLIND_STRUCTURE]
        if blind:
            return "unknown", f"a wrong factor on {', '.join(blind)} would not have been seen"
    elif power and wanted.threshold + wanted.floor > BLIND_PRECISION * float(
        wanted.value.abs().max()
    ):
        return "unknown", "the noise of this dtype would have hidden a wrong factor"
    return "pass", None


def compare_replicas(record: RunRecord) -> Iterator[ScalarDiff]:
    """Replicas of one pool must hold the same bits: an all-reduce gives every rank the same."""
    for pool in record.plan.topology.pools:
        held = [record.ranks[r] for r in pool.ranks if r in record.ranks]
        for first in held[:1]:
            for other in held[1:]:
                for (tier, step), grads in first.grads.items():
                    theirs = other.grads.get((tier, step), {})
                    names = [
                        n for n, g in grads.items() if n in theirs and not same_bits(g, theirs[n])
                    ]
                    if names:
                        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
                        text = (
                            f"rank {first.rank} and rank {other.rank} hold other bits of "
                            f"{names[0]}{more} after the reduction"
                        )
                        yield ScalarDiff(
                            rank=other.rank, tier=tier, step=step, what="replicas", text=text
                        )


def compare_scalars(record: RunRecord) -> Iterator[ScalarDiff]:
    """Counts, weights, the global norm and the clipped norm of every rank."""
    for tier, dtype in record.spec.tiers.items():
        for reference in record.references.get(tier, []):
            norms = expect_norms(record.plan, reference, dtype)
            for rank, held in record.ranks.items():
                info = held.steps.get((tier, reference.step))
                if info is None:
                    continue
                problems = [
                    *_count_problems(record.plan, rank, info["counts"], reference),
                    *_norm_problems(info, norms),
                ]
                if info["weights"] != reference.weights:
                    problems.append(("weights", "started from other weights than the reference"))
                for what, text in problems:
                    yield ScalarDiff(
                        rank=rank, tier=tier, step=reference.step, what=what, text=text
                    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedNorm:
    """A norm that the ranks measured, what it must be, and how far off it may be."""

    field: str
    value: float
    threshold: float

    @property
    def seen(self) -> bool:
        """Whether a halved or doubled norm would have been noticed."""
        return self.threshold <= BLIND_STRUCTURE * self.value


def expect_norms(plan: Plan, reference: StepReference, dtype: str) -> tuple[ExpectedNorm, ...]:
    """The global norm and the norm after clipping, which rounds every element once more."""
    (edge,) = plan.select(Norm)
    eps = float(torch.finfo(getattr(torch, dtype)).eps)
    bound = FLOOR_FACTOR * max(reference.norm_floor, eps * reference.norm)
    factor = min(1.0, edge.max_norm / (reference.norm + 1e-6))
    clipped = factor * reference.norm
    return (
        ExpectedNorm(field="norm", value=reference.norm, threshold=bound),
        ExpectedNorm(
            field="clipped_norm", value=clipped, threshold=factor * bound + 2 * eps * clipped
        ),
    )


def _norm_problems(
    info: dict[str, Any], norms: tuple[ExpectedNorm, ...]
) -> Iterator[tuple[str, str]]:
    for norm in norms:
        got = float(info[norm.field])
        if not abs(got - norm.value) <= norm.threshold:
            what = norm.field.replace("_", " ")
            yield what, f"{what} {got:.9g}; the reference has {norm.value:.9g}"


def _count_problems(
    plan: Plan, rank: int, counts: dict[str, int], reference: StepReference
) -> Iterator[tuple[str, str]]:
    pool = plan.topology.pool_of(rank).name
    planned = [term for edge in plan.select(Count, pool=pool) for term in edge.terms]
    for term in dict.fromkeys([*planned, *counts]):
        if counts.get(term) != reference.counts[term]:
            yield (
                "count",
                f"divides {term} by {counts.get(term)}; the data say "
                + str(reference.counts[term]),
            )


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal shape, dtype and raw bits; NaNs of equal bits are equal."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    flat_a, flat_b = a.contiguous().reshape(-1), b.contiguous().reshape(-1)
    return bool(torch.equal(flat_a.view(torch.uint8), flat_b.view(torch.uint8)))


def complete_ranks(record: RunRecord) -> dict[int, RankRecord]:
    """Ranks whose gradients, counts, norms and ledger of every tier and step are there."""
    wanted = {(tier, step) for tier in record.spec.tiers for step in range(record.spec.steps)}
    return {
        rank: held
        for rank, held in record.ranks.items()
        if wanted <= set(held.grads) and wanted <= set(held.steps)
    }


def _worst_index(error: Tensor) -> tuple[int, ...]:
    if not error.numel():
        return ()
    flat = int(torch.nan_to_num(error, nan=float("inf")).argmax())
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), error.shape))
