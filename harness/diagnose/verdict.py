"""From a stored record to its Verdict. Starts no process, needs no GPU and none of the user's code.

    compare -> check -> explain -> merge

PASS means: every rank ended well, every gradient of every rank was compared in every tier and step,
the comparison would have seen a wrong factor, and no check found anything. Whatever could not be
compared is UNKNOWN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from sumgrad.base.files import finite
from sumgrad.base.outcome import outcome_to_json
from sumgrad.base.verdict import Status, TierVerdict, Verdict, merge
from sumgrad.diagnose.case import holders
from sumgrad.diagnose.diagnose import Found, diagnose
from sumgrad.diagnose.doubts import with_doubts
from sumgrad.faults.plan import breaks_law, find_fault, is_visible, plant
from sumgrad.judge.cells import compare, compare_again
from sumgrad.judge.checks import CHECKS
from sumgrad.judge.checks.bitwise import compared_bits
from sumgrad.judge.checks.ledgers import ledger_mismatches
from sumgrad.judge.comparison import TensorDiff
from sumgrad.judge.finding import Compared, Finding, Level
from sumgrad.judge.knowledge import known_plan
from sumgrad.judge.timeline import timeline
from sumgrad.judge.verdict_json import (
    SCHEMA,
    tensor_json,
    tier_verdict,
    topology_json,
    unknown_tensors,
)
from sumgrad.plan.edges import Plan
from sumgrad.plan.predict import PartialSums, Prediction
from sumgrad.record.bits import BITS
from sumgrad.record.directory import Record


def judge(record: Record, *, clean: Record | None = None) -> Verdict:
    """The verdict of a stored run. Pure: the same record gives the same verdict.

    clean: a run of the same that passed; it helps to explain, never to decide.
    """
    diffs = with_doubts(record, compare(record), clean)
    compared = Compared(
        record=record,
        diffs=diffs,
        again=compare_again(record, diffs),
        mismatches=ledger_mismatches(record),
    )
    findings = [finding for check in CHECKS for finding in check(compared)]
    why = diagnose(compared, clean=clean)
    verdict = _merged(compared, findings, why)
    data = _to_json(record, verdict, diffs)
    if why.where is not None:
        data["where"] = why.where
    if verdict.status != "pass" and (line := timeline(record, compared.mismatches)) is not None:
        data["timeline"] = line.to_json()
    if record.spec.declaration is not None and record.spec.fault:
        data["fault_report"] = fault_report(record)
    return replace(verdict, data=finite(data))


def _merged(compared: Compared, findings: Sequence[Finding], why: Found) -> Verdict:
    """PASS < UNKNOWN < FAIL: the worst of the tiers and of what the checks found."""
    spec = compared.record.spec

    def texts(*levels: Level) -> tuple[str, ...]:
        return tuple(f.text for level in levels for f in findings if f.level == level
                     and not f.aside)  # fmt: skip

    tiers = tuple(_tier(compared, tier, findings) for tier in spec.tiers)
    if spec.bitwise:
        tiers += (_bitwise_tier(compared.record, findings),)
    tiers += tuple(
        TierVerdict(name=tier, dtype="float64", status="unknown", reasons=(why,))
        for tier, why in spec.skipped.items()
    )
    enforced = spec.law == "enforce"
    wrong = texts("fail", "law") if enforced else texts("fail")
    reasons = tuple(dict.fromkeys(texts("unknown")))
    statuses: list[Status] = [tier.status for tier in tiers]
    statuses += ["unknown"] if reasons else []
    statuses += ["fail"] if wrong else []
    return Verdict(
        status=merge(statuses),
        tiers=tiers,
        diagnoses=why.causes,
        coefficients=why.coefficients,
        findings=wrong,
        warnings=texts("warning") if enforced else texts("law", "warning"),
        reasons=reasons,
    )


def _tier(compared: Compared, tier: str, findings: Sequence[Finding]) -> TierVerdict:
    mine = [d for d in compared.diffs if d.tier == tier]
    found = [f for f in findings if f.tier == tier]
    statuses: list[Status] = [d.status for d in mine]
    statuses += ["fail" if f.level == "fail" else "unknown" for f in found]
    reasons = [*unknown_tensors(mine), *(f.text for f in found if f.aside and f.text)]
    return tier_verdict(
        tier,
        compared.record.spec.tiers[tier],
        statuses=statuses,
        diffs=mine,
        reasons=dict.fromkeys(reasons),
    )


def _bitwise_tier(record: Record, findings: Sequence[Finding]) -> TierVerdict:
    mine = [f for f in findings if f.tier == BITS]
    statuses: list[Status] = ["pass"] if compared_bits(record).tensors else ["unknown"]
    statuses += ["fail" if f.level == "fail" else "unknown" for f in mine]
    return TierVerdict(
        name=BITS,
        dtype=record.spec.bitwise,
        status=merge(statuses),
        reasons=tuple(f.text for f in mine if f.level == "unknown"),
    )


def _to_json(record: Record, verdict: Verdict, diffs: Sequence[TensorDiff]) -> dict[str, Any]:
    spec = record.spec
    rows = {"num_rows": spec.facts.num_rows} if spec.facts is not None else {}
    return {
        "schema": SCHEMA,
        "status": verdict.status,
        "topology": topology_json(spec.topology),
        "workload": spec.name,
        "fault": spec.fault,
        "seed": spec.seed,
        "steps": spec.steps,
        **rows,
        "lifted": _lifted(record),
        "tiers": {
            t.name: {k: v for k, v in asdict(t).items() if k != "name"}
            | (compared_bits(record).to_json() if t.name == BITS and spec.bitwise else {})
            for t in verdict.tiers
        },
        "tensors": [tensor_json(d) for d in diffs],
        "coefficients": [asdict(c) for c in verdict.coefficients],
        "diagnoses": [asdict(d) for d in verdict.diagnoses],
        "findings": list(verdict.findings),
        "warnings": list(verdict.warnings),
        "not_compared": list(verdict.reasons),
        "outcomes": [outcome_to_json(o) for o in record.outcomes],
        **({"losses": _losses(record)} if spec.script else {}),
        "reproduce": spec.reproduce,
        "versions": spec.versions,
    }


def _losses(record: Record) -> dict[str, list[float | None]]:
    """What backward was called on in each step, on average, in the single run and over all ranks:
    the curves that people compare."""

    def mean(values: Sequence[float]) -> float | None:
        return sum(values) / len(values) if values else None

    assert record.spec.script is not None
    ranks = []
    for step in range(record.spec.steps):
        told = [i for h in record.ranks.values() for (_, s), i in h.info.items() if s == step]
        ranks.append(mean([float(x) for info in told for x in info.get("losses", ())]))
    return {"single": [mean(own) for own in record.spec.script.losses], "ranks": ranks}


def _lifted(record: Record) -> list[dict[str, Any]]:
    """Casts that a step had lifted to float64: their line, how often on one rank at most."""
    out: dict[str, int] = {}
    for held in record.ranks.values():
        for info in held.info.values():
            for place, times in (info.get("lifted") or {}).items():
                out[place] = max(out.get(place, 0), int(times))
    return [{"place": place, "times": times} for place, times in sorted(out.items())]


def fault_report(record: Record) -> dict[str, Any]:
    """What the planted fault should do here, and whether its own plan predicts the gradients."""
    assert record.spec.fault is not None
    fault = find_fault(record.spec.fault)
    return {
        "story": fault.story,
        "visible": is_visible(fault, known_plan(record), steps=record.spec.steps),
        "min_steps": fault.min_steps,
        "breaks_law": breaks_law(fault, known_plan(record)),
        "prediction": prediction_agrees(record, plant(fault, known_plan(record))),
    }


def prediction_agrees(record: Record, faulty: Plan) -> dict[str, Any]:
    """A planted fault's own plan against the measured gradients: worst error / threshold.

    Compares every holder of the last step whose partials are stored, in the first such tier.
    """
    for tier in record.references:
        by_step = record.partials(tier)
        for step in sorted(by_step)[-1:]:
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
