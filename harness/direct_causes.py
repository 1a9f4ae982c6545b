"""Causes that a record names by itself: counts, values that are not finite, a ledger alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from sumgrad.case import ledger_against
from sumgrad.compare import TensorDiff
from sumgrad.hypotheses import hypotheses
from sumgrad.plan import Count
from sumgrad.record import RunRecord
from sumgrad.schedule import Mismatch
from sumgrad.verdict import Diagnosis


def law_only(record: RunRecord, mismatches: Sequence[Mismatch]) -> Diagnosis:
    """The values are right but the ledger is not the plan's: find the plan that it is."""
    first = mismatches[0]
    tier = next(iter(record.spec.tiers))
    known = hypotheses(record.plan, with_stale=False)
    for hypothesis in sorted(known, key=lambda h: (h.kind != "compensated", h.rank)):
        if not any(
            ledger_against(record, hypothesis.plan, tier, step) for step in range(record.spec.steps)
        ):
            because = [f"the ledger shows {first}", "it is the ledger that this plan would leave"]
            if hypothesis.kind == "compensated":
                because[1] = "every gradient is right, so something multiplies by the size first"
            return Diagnosis(
                cause=hypothesis.cause,
                kind=hypothesis.kind,
                term=hypothesis.term,
                ranks=hypothesis.ranks,
                factor=str(hypothesis.factor) if hypothesis.factor is not None else None,
                symbol=hypothesis.symbol,
                because=tuple(because),
                however=("the comparison with the reference passes on this topology",),
            )
    return Diagnosis(
        cause=f"the step does not execute its plan: {first}",
        kind="ledger",
        ranks=tuple(sorted({m.rank for m in mismatches})),
        because=tuple(str(m) for m in mismatches[:3]),
        however=("every gradient that was compared is right",),
    )


def wrong_counts(record: RunRecord) -> Iterator[Diagnosis]:
    """Ranks that divide by another number than the data's; their own record says so."""
    for tier, references in record.references.items():
        for edge in record.plan.select(Count):
            pool = record.plan.topology.pool(edge.pool)
            for term in edge.terms:
                wanted = references[0].counts[term] if references else None
                used = {
                    rank: record.ranks[rank].steps[tier, 0]["counts"].get(term)
                    for rank in pool.ranks
                    if rank in record.ranks and (tier, 0) in record.ranks[rank].steps
                }
                wrong = {rank: count for rank, count in used.items() if count != wanted}
                if wanted is not None and wrong:
                    numbers = ", ".join(str(count) for count in list(wrong.values())[:8])
                    yield Diagnosis(
                        cause=f"{pool.name} divides {term} by {numbers}; the global count is "
                        f"{wanted}",
                        kind="count",
                        term=term,
                        ranks=tuple(wrong),
                        because=(f"the ranks' own records of tier {tier} name these counts",),
                    )
        return


def not_finite(record: RunRecord, diffs: Sequence[TensorDiff]) -> tuple[Diagnosis, ...]:
    bad = [d for d in diffs if d.status == "fail" and not d.comparable]
    if not bad:
        return ()
    first = bad[0]
    sources = []
    for rank, held in sorted(record.ranks.items()):
        for digest in held.steps.get((first.tier, first.step), {}).get("digests", []):
            if not math.isfinite(digest["norm"]):
                sources.append(f"{digest['edge']} on rank {rank} (unit {digest['unit']})")
    cause = f"{first.name} on rank {first.rank} is not comparable: {first.reason}"
    because = tuple(f"the contribution {s} is not finite before its reduction" for s in sources[:3])
    return (
        Diagnosis(
            cause=cause,
            kind="missing" if not first.index else "not_finite",
            ranks=tuple(sorted({d.rank for d in bad})),
            because=because,
        ),
    )
