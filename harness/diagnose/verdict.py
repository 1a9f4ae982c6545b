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

import torch
from sumgrad.base.files import finite
from sumgrad.base.outcome import outcome_to_json, some_of
from sumgrad.base.verdict import Status, TierVerdict, Verdict, merge
from sumgrad.diagnose.case import holders
from sumgrad.diagnose.diagnose import Found, diagnose
from sumgrad.faults.plan import breaks_law, find_fault, is_visible, plant
from sumgrad.judge.cells import compare, compare_again
from sumgrad.judge.checks import CHECKS
from sumgrad.judge.checks.bitwise import compared_bits
from sumgrad.judge.checks.ledgers import ledger_mismatches
from sumgrad.judge.checks.script import update_error
from sumgrad.judge.comparison import TensorDiff
from sumgrad.judge.finding import Compared, Finding, Level
from sumgrad.judge.knowledge import known_plan
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

SHARED = 0.05  # of a common error: by how much that of one tensor may be another
FEW, TURNED = 4, 1e-3  # elements of a direction; how far from it is another one
NARROW_ROUNDINGS = 16  # of the scale: what casts to fewer digits may leave


def judge(record: Record, *, clean: Record | None = None) -> Verdict:
    """The verdict of a stored run. Pure: the same record gives the same verdict.

    clean: a run of the same that passed; it helps to explain, never to decide.
    """
    diffs = _like_fewer_digits(record, _like_float32(record, compare(record), clean))
    diffs = _reduced_in_the_step(record, diffs)
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


def _like_float32(
    record: Record, diffs: list[TensorDiff], clean: Record | None
) -> list[TensorDiff]:
    """Failing float64 tensors whose errors may be float32 roundings, and no cause: UNKNOWN.

    A user's step or model that computes in float32 whatever it is given is not wrong, but what a
    float64 run would have shown was not seen either. Never a PASS; and a FAIL where the step was
    looked at and nothing of it computes in less than float64.
    """
    if not record.spec.opaque:
        return diffs
    looked = [info["narrow"] for h in record.ranks.values() for info in h.info.values()
              if "narrow" in info]  # fmt: skip
    places = list(dict.fromkeys(place for seen in looked for place in seen))
    if looked and not places:
        return diffs
    failed = [d for d in diffs if d.status == "fail" and record.spec.tiers[d.tier] == "float64"]
    if not failed or any(not d.comparable for d in failed):
        return diffs
    for d in failed:
        scale = record.references[d.tier][d.step].scale[d.name]
        if d.max_abs > NARROW_ROUNDINGS * torch.finfo(torch.float32).eps * scale:
            return diffs
    compared = Compared(record=record, diffs=diffs, again=(), mismatches=())
    causes = diagnose(compared, clean=clean).causes
    if any(cause.kind != "open" for cause in causes):
        return diffs
    seen = f"the step makes {some_of(places)}" if places else "what it computes in was not seen"
    why = (
        f"its error is no larger than float32 roundings, and {seen}: a wrong term of that size "
        f"would look the same"
    )
    unsure = {id(d) for d in failed}
    return [replace(d, status="unknown", reason=why) if id(d) in unsure else d for d in diffs]


def _reduced_in_the_step(record: Record, diffs: list[TensorDiff]) -> list[TensorDiff]:
    """A script's failing gradients where the weights after the step are right: UNKNOWN.

    Gradients are read before an optimizer's step, and some optimizers reduce inside it. Only where
    every failing gradient is no multiple of the right one (Adam hides a factor), and the step moves
    the weight at all.
    """
    failed = [d for d in diffs if d.status == "fail"]
    if record.spec.script is None or not failed or any(not d.comparable for d in failed):
        return diffs
    if not any(d.step for d in failed) or any(not _is_right_after(record, d) for d in failed):
        return diffs
    why = (
        "it is not the single run's before the optimizer's step, and its weight is after it: the "
        "step reduces it itself, which is not looked into"
    )
    unsure = {id(d) for d in failed}
    return [replace(d, status="unknown", reason=why) if id(d) in unsure else d for d in diffs]


def _is_right_after(record: Record, d: TensorDiff) -> bool:
    """Whether a gradient that is no multiple of the right one moves its weight as the right one."""
    references = record.references[d.tier]
    reference, held = references[d.step], record.ranks[d.rank]
    found = update_error(record, d.tier, reference, d.rank, d.name)
    got = held.grads[d.tier, d.step].get(d.name)
    if found is None or got is None or not found[0] <= found[1]:
        return False
    if d.step:
        moved = reference.after[d.name] - references[d.step - 1].after[d.name]
        if not float(moved.abs().max()) > found[1]:
            return False
    index, whole = held.index_of(d.tier, d.name), reference.grads[d.name]
    wanted = (whole if index is None else whole.reshape(-1)[index]).reshape(-1)
    mine, square = got.double().reshape(-1), float(wanted.square().sum())
    if wanted.numel() < FEW or not square:
        return True  # of a few numbers a multiple is nothing that tells
    rest = mine - float(mine @ wanted) / square * wanted
    return float(rest.norm()) > TURNED * float(mine.norm())


def _like_fewer_digits(record: Record, diffs: list[TensorDiff]) -> list[TensorDiff]:
    """Failing tensors of the precision tier that a cast of the step's own explains: UNKNOWN.

    Only where the whole structure tier passed, with those casts lifted, and the step was seen to
    compute or communicate in fewer digits than the tier has: a choice of the user's, whose cost the
    tier cannot judge. Its error may be no larger than roundings of that dtype.
    """
    spec = record.spec
    algebra = [d for d in diffs if spec.tiers[d.tier] == "float64"]
    if not (spec.opaque and spec.lift and algebra) or any(d.status != "pass" for d in algebra):
        return diffs
    out = []
    for d in diffs:
        shared = _shared_factor([o for o in diffs if (o.tier, o.step) == (d.tier, d.step)])
        why = _fewer_digits(record, d, shared) if d.status == "fail" and d.comparable else None
        out.append(d if why is None else replace(d, status="unknown", reason=why))
    return out


def _shared_factor(diffs: Sequence[TensorDiff]) -> float | None:
    """The one factor that all failing tensors of a step have, if it is more of their errors than
    anything else: roundings of single elements have none."""
    wrong = [d for d in diffs if d.status == "fail" and d.comparable and d.ratio is not None]
    off = [d.ratio - 1 for d in wrong if d.ratio is not None]
    if not off or not all(off) or max(off) - min(off) > SHARED * abs(sum(off) / len(off)):
        return None
    if any(d.l2_rel > (1 + SHARED) * abs(own) for d, own in zip(wrong, off, strict=True)):
        return None
    return 1 + sum(off) / len(off)


def _fewer_digits(record: Record, diff: TensorDiff, shared: float | None) -> str | None:
    """What of its step was seen in fewer digits, if that may explain a difference.

    shared: the factor that all gradients of its step have.
    """
    at = (diff.tier, record.spec.steps - 1)  # the step that is looked at
    seen = dict.fromkeys(
        place for held in record.ranks.values() for place in held.info.get(at, {}).get("narrow", ())
    )
    dtypes = {place.split(" ")[0] for place in seen if " at " in place}
    if not dtypes:
        return None
    coarsest = max(dtypes, key=lambda dtype: torch.finfo(getattr(torch, dtype)).eps)
    eps = torch.finfo(getattr(torch, coarsest)).eps
    scale = record.references[diff.tier][diff.step].scale[diff.name]
    if diff.max_abs > NARROW_ROUNDINGS * eps * scale:
        return None
    if shared is not None:
        return (
            f"every gradient is multiplied by {shared:.6g}, and the step makes "
            f"{some_of(list(seen))}: a count or a coefficient held in it has this error; lifted to "
            f"float64 it is right"
        )
    return (
        f"the step makes {some_of(list(seen))}, fewer digits than {record.spec.tiers[diff.tier]}, "
        f"and its error is no larger than their roundings; lifted to float64 it is right; "
        f"--dtype {coarsest} holds it to the noise of {coarsest}"
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
