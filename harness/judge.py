"""Judging: from a stored record to a Verdict. Starts no process, needs no GPU and no workload.

PASS means: every rank ended well, every tensor of every rank was compared in every tier and step,
the comparison would have seen a wrong factor, the counts, weights and norms are the reference's,
and every ledger equals the plan. Whatever could not be compared is UNKNOWN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from sumgrad.case import holders
from sumgrad.compare import (
    ScalarDiff,
    TensorDiff,
    compare_replicas,
    compare_scalars,
    compare_tensors,
    complete_ranks,
    expect_norms,
)
from sumgrad.diagnose import diagnose
from sumgrad.faults import breaks_law, find_fault, is_visible, plant
from sumgrad.files import finite
from sumgrad.outcome import outcome_to_json, spans
from sumgrad.predict import PartialSums, Prediction
from sumgrad.record import RunRecord
from sumgrad.schedule import Mismatch, compare_ledger, outside_steps
from sumgrad.verdict import Diagnosis, Status, TierVerdict, Verdict, merge
from sumgrad.verdict_json import (
    SCHEMA,
    tensor_json,
    tier_verdict,
    topology_json,
    unknown_tensors,
)


def judge(record: RunRecord) -> Verdict:
    """The verdict of a stored run. Pure: the same record gives the same verdict."""
    diffs = list(compare_tensors(record))
    scalars = [*compare_replicas(record), *compare_scalars(record)]
    mismatches = ledger_mismatches(record)
    reasons = _not_compared(record)
    tiers = tuple(_tier(record, tier, diffs, scalars) for tier in record.spec.tiers)
    diagnoses, coefficients = diagnose(record, diffs, mismatches)
    findings = _merge_scalars(scalars)
    law = _merge_mismatches(mismatches)
    enforced = record.spec.law == "enforce"
    statuses: list[Status] = [tier.status for tier in tiers]
    if reasons:
        statuses.append("unknown")
    if law and enforced:
        statuses.append("fail")
    verdict = Verdict(
        status=merge(statuses),
        tiers=tiers,
        diagnoses=diagnoses,
        coefficients=coefficients,
        findings=findings + (law if enforced else ()),
        warnings=() if enforced else law,
        reasons=reasons,
    )
    data = _to_json(record, verdict, diffs)
    if record.spec.fault:
        data["fault_report"] = fault_report(record)
    return replace(verdict, data=finite(data))


def fault_report(record: RunRecord) -> dict[str, Any]:
    """What the planted fault should do here, and whether its own plan predicts the gradients."""
    assert record.spec.fault is not None
    fault = find_fault(record.spec.fault)
    return {
        "story": fault.story,
        "visible": is_visible(fault, record.plan, steps=record.spec.steps),
        "min_steps": fault.min_steps,
        "breaks_law": breaks_law(fault, record.plan),
        "prediction": prediction_agrees(record, plant(fault, record.plan)),
    }


def ledger_mismatches(record: RunRecord) -> list[Mismatch]:
    """Every difference between what ranks that finished issued and what the plan says."""
    out = []
    planned = [(tier, step) for tier in record.spec.tiers for step in range(record.spec.steps)]
    if not planned:
        return []
    for rank, held in complete_ranks(record).items():
        if not held.ledger_whole:
            continue  # not compared: UNKNOWN, see _not_compared
        for tier, step in planned:
            dtype, label = record.spec.tiers[tier], f"{tier}, step {step}"
            out += compare_ledger(
                record.plan, rank, dtype, label, held.events.get((tier, step), [])
            )
        foreign = [e for key, events in held.events.items() if key not in planned for e in events]
        out += [outside_steps(rank, event) for event in [*held.stray, *foreign]]
    return out


def prediction_agrees(record: RunRecord, faulty: Any) -> dict[str, Any]:
    """A planted fault's own plan against the measured gradients: worst error / threshold.

    Compares every holder of the last step whose partials are stored, in the first such tier.
    """
    for tier, by_step in record.partials.items():
        if tier not in record.references:
            continue
        for step in sorted(by_step):
            if by_step and step != max(by_step):
                continue
            previous = PartialSums(by_step[step - 1]) if step - 1 in by_step else None
            prediction = Prediction(faulty, PartialSums(by_step[step]), previous)
            worst, unpredicted = 0.0, 0
            for holder in holders(record, tier, step):
                where = (holder.pool, holder.unit, holder.rank)
                gradient = prediction.gradient(*where)
                if gradient is None:
                    unpredicted += 1
                    continue
                weights = [c.weight for c in prediction.coefficients(*where) if c.weight]
                factor = max([1.0, *(abs(float(w)) for w in weights)])
                for name, value in gradient.items():
                    error = float((holder.measured[name] - value).abs().max())
                    worst = max(worst, error / (holder.expected[name].threshold * factor))
            return {
                "tier": tier,
                "step": step,
                "worst_of_threshold": worst,
                "unpredicted": unpredicted,
                "agrees": worst <= 1 and not unpredicted,
            }
    return {"agrees": None}


def _not_compared(record: RunRecord) -> tuple[str, ...]:
    place = record.plan.topology.place
    reasons = [
        f"{place(o.rank)}: {o.status}" + (f", {o.detail}" if o.detail else "")
        for o in record.outcomes
        if not o.ok
    ]
    complete = complete_ranks(record)
    reasons += [
        f"{place(o.rank)}: ended well, but its record is incomplete"
        for o in record.outcomes
        if o.ok and o.rank not in complete
    ]
    reasons += [
        f"{place(rank)}: its ledger is missing, cut short, or has operations nobody waited for"
        for rank, held in complete.items()
        if not held.ledger_whole
    ]
    reasons += list(record.damage)
    if not record.spec.tiers:
        reasons.append("no tier was asked for, so nothing was compared")
    return tuple(dict.fromkeys(reasons))


def _merge_scalars(scalars: Sequence[ScalarDiff]) -> tuple[str, ...]:
    """One line for equal findings of several ranks."""
    merged: dict[tuple[str, int, str, str], list[int]] = {}
    for s in scalars:
        merged.setdefault((s.tier, s.step, s.what, s.text), []).append(s.rank)
    return tuple(
        f"{what}, {tier}, step {step}, rank {spans(ranks)}: {text}"
        for (tier, step, what, text), ranks in merged.items()
    )


def _merge_mismatches(mismatches: Sequence[Mismatch]) -> tuple[str, ...]:
    """One line for equal differences between ledger and plan."""
    merged: dict[str, list[int]] = {}
    for m in mismatches:
        merged.setdefault(m.text, []).append(m.rank)
    return tuple(f"ledger, rank {spans(ranks)}: {text}" for text, ranks in merged.items())


def _tier(
    record: RunRecord, tier: str, diffs: Sequence[TensorDiff], scalars: Sequence[ScalarDiff]
) -> TierVerdict:
    mine = [d for d in diffs if d.tier == tier]
    statuses: list[Status] = [d.status for d in mine]
    statuses += ["fail" for s in scalars if s.tier == tier]
    if len(complete_ranks(record)) < record.spec.topology.world_size:
        statuses.append("unknown")
    references = record.references.get(tier, [])
    if [r.step for r in references] != list(range(record.spec.steps)):
        statuses.append("unknown")
    reasons = unknown_tensors(mine)
    dtype = record.spec.tiers[tier]
    norms = [n for r in references for n in expect_norms(record.plan, r, dtype) if not n.seen]
    if norms:
        statuses.append("unknown")
        reasons |= {
            f"{n.field}: a halved or doubled norm would not have been seen": None for n in norms
        }
    return tier_verdict(tier, dtype, statuses=statuses, diffs=mine, reasons=reasons)


def _to_json(record: RunRecord, verdict: Verdict, diffs: Sequence[TensorDiff]) -> dict[str, Any]:
    spec = record.spec
    topology = spec.topology
    return {
        "schema": SCHEMA,
        "status": verdict.status,
        "topology": topology_json(topology),
        "workload": spec.declaration.workload,
        "fault": spec.fault,
        "seed": spec.seed,
        "steps": spec.steps,
        "tiers": {
            t.name: {k: v for k, v in asdict(t).items() if k != "name"} for t in verdict.tiers
        },
        "tensors": [tensor_json(d) for d in diffs],
        "coefficients": [asdict(c) for c in verdict.coefficients],
        "diagnoses": [_diagnosis_json(d) for d in verdict.diagnoses],
        "findings": list(verdict.findings),
        "warnings": list(verdict.warnings),
        "not_compared": list(verdict.reasons),
        "outcomes": [outcome_to_json(o) for o in record.outcomes],
        "reproduce": spec.reproduce,
        "versions": spec.versions,
    }


def _diagnosis_json(d: Diagnosis) -> dict[str, Any]:
    return asdict(d)
