"""Did the ranks run what the reference is of: the same model, batch, weights and counts?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from sumgrad.base.outcome import spans
from sumgrad.base.tolerances import BLIND_STRUCTURE, FLOOR_FACTOR
from sumgrad.judge.finding import Compared, Finding
from sumgrad.judge.knowledge import plan_of
from sumgrad.plan.edges import Count, Norm, Plan
from sumgrad.record.directory import Record
from sumgrad.record.reference import Reference


def sound_reference(compared: Compared) -> Iterator[Finding]:
    """Why the reference does not belong to what the ranks ran."""
    for text in _unsound(compared.record):
        yield Finding(level="unknown", text=text)


def same_weights(compared: Compared) -> Iterator[Finding]:
    """Ranks whose step started from other weights than the reference, or another model's."""
    record, facts = compared.record, compared.record.spec.facts
    for rank, held in record.ranks.items():
        if facts is not None and held.built != facts.weights:
            continue
        for (tier, step), info in held.info.items():
            names = info.get("other_weights")
            if names:
                more = f" and {len(names) - 1} more" if len(names) > 1 else ""
                yield Finding(
                    level="fail",
                    text=f"weights, {tier}, step {step}: rank {rank} starts from other values of "
                    f"{names[0]}{more} than the reference",
                )


def counts_and_norms(compared: Compared) -> Iterator[Finding]:
    """Counts, weights, the global norm and the clipped norm of every rank that has a plan."""
    record, plan = compared.record, plan_of(compared.record)
    if plan is None:
        return
    merged: dict[tuple[str, int, str, str], list[int]] = {}
    for tier, dtype in record.spec.tiers.items():
        for reference in record.references.get(tier, []):
            norms = expect_norms(plan, reference, dtype)
            for rank, held in record.ranks.items():
                info = held.info.get((tier, reference.step))
                if info is None:
                    continue
                for what, text in _scalar_problems(plan, rank, info, reference, norms):
                    merged.setdefault((tier, reference.step, what, text), []).append(rank)
    for (tier, step, what, text), ranks in merged.items():
        where = f"{what}, {tier}, step {step}, rank {spans(ranks)}"
        yield Finding(level="fail", text=f"{where}: {text}", tier=tier)


def seen_norms(compared: Compared) -> Iterator[Finding]:
    """Norms so small that a halved or doubled one would have passed."""
    record, plan = compared.record, plan_of(compared.record)
    if plan is None:
        return
    for tier, dtype in record.spec.tiers.items():
        for reference in record.references.get(tier, ()):
            for norm in expect_norms(plan, reference, dtype):
                if not norm.seen:
                    text = f"{norm.field}: a halved or doubled norm would not have been seen"
                    yield Finding(level="unknown", text=text, tier=tier, aside=True)


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


def expect_norms(plan: Plan, reference: Reference, dtype: str) -> tuple[ExpectedNorm, ...]:
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


def _scalar_problems(
    plan: Plan,
    rank: int,
    info: dict[str, Any],
    reference: Reference,
    norms: tuple[ExpectedNorm, ...],
) -> Iterator[tuple[str, str]]:
    counts = info["counts"]
    pool = plan.topology.pool_of(rank).name
    planned = [term for edge in plan.select(Count, pool=pool) for term in edge.terms]
    for term in dict.fromkeys([*planned, *counts]):
        if counts.get(term) != reference.counts[term]:
            yield (
                "count",
                f"divides {term} by {counts.get(term)}; the data say {reference.counts[term]}",
            )
    for norm in norms:
        got = float(info[norm.field])
        if not abs(got - norm.value) <= norm.threshold:
            what = norm.field.replace("_", " ")
            yield what, f"{what} {got:.9g}; the reference has {norm.value:.9g}"
    if info["weights"] != reference.weights:
        yield "weights", "started from other weights than the reference"


def _unsound(record: Record) -> Iterator[str]:
    for tier, references in record.references.items():
        for reference in references:
            yield from (f"{tier}: {problem}" for problem in reference.problems)
    facts = record.spec.facts
    if facts is None:
        return
    other = [r for r, held in record.ranks.items() if held.built != facts.weights]
    if other:
        yield (
            f"build() gives other weights on rank {spans(other)} than in a single process: seed "
            f"what it draws"
        )
    other = [r for r, held in record.ranks.items() if held.batch != facts.batch]
    if other:
        yield (
            f"batch() gives another batch on rank {spans(other)} than in a single process: seed "
            f"what it draws, and return the full batch everywhere"
        )
    hashes = {(tier, r.step): r.batch for tier, rs in record.references.items() for r in rs}
    for rank, held in record.ranks.items():
        for (tier, step), info in held.info.items():
            wanted, got = hashes.get((tier, step)), info.get("batch")
            if wanted and got and wanted != got and held.batch == facts.batch:
                yield (
                    f"batch({step}) gives another batch on rank {rank} than in a single process: "
                    f"seed what it draws, and return the full batch everywhere"
                )
    changed: dict[str, list[int]] = {}
    for rank, held in record.ranks.items():
        for info in held.info.values():
            for name in info["changed_weights"]:
                changed.setdefault(name, []).append(rank)
    for name, ranks in list(changed.items())[:1]:
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        yield (
            f"step() changes the weights of {name}{more} on rank {spans(ranks)}: it must end with "
            f"reduced gradients, before the optimizer"
        )
