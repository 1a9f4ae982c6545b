"""Judging a Program's stored run. Starts no process and needs none of the user's code.

PASS means: the reference is sound, every element of every parameter was compared on every rank
that holds it, in every step, within the threshold, and a wrong factor would have been seen. What
the law finds in the ledger is a warning for a Program, unless it is to be enforced.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from sumgrad.compare import TensorDiff
from sumgrad.files import finite
from sumgrad.ledger_checks import disagreements, law_findings
from sumgrad.outcome import outcome_to_json, some_of, spans
from sumgrad.program_compare import (
    compare_again,
    compare_program,
    differing_replicas,
    uncovered,
)
from sumgrad.program_diagnose import diagnose_program
from sumgrad.program_record import ProgramRecord
from sumgrad.unseen_checks import buffer_warnings, unseen
from sumgrad.verdict import Status, TierVerdict, Verdict, merge
from sumgrad.verdict_json import (
    SCHEMA,
    tensor_json,
    tier_verdict,
    topology_json,
    unknown_tensors,
)

FLOAT32_ROUNDINGS = 16


def judge_program(record: ProgramRecord, *, clean: ProgramRecord | None = None) -> Verdict:
    """The verdict of a stored run. Pure: the same record gives the same verdict.

    clean: a run of the same that passed; it helps to explain, never to decide.
    """
    spec = record.spec
    diffs = _like_float32(record, compare_program(record), clean)
    again = compare_again(record)
    reasons = tuple(dict.fromkeys(_not_compared(record)))
    broken = tuple(dict.fromkeys([*disagreements(record), *_weights(record), *_races(record)]))
    law = tuple(dict.fromkeys([*law_findings(record), *differing_replicas(record)]))
    enforced = spec.law == "enforce"
    tiers = tuple(_tier(record, tier, diffs) for tier in spec.tiers)
    tiers += tuple(_skipped(tier, why) for tier, why in spec.skipped.items())
    findings = broken + _again(diffs, again) + (law if enforced else ())
    statuses: list[Status] = [tier.status for tier in tiers]
    statuses += ["unknown"] if reasons else []
    statuses += ["fail"] if findings else []
    diagnoses, coefficients = diagnose_program(record, diffs, again, clean=clean)
    verdict = Verdict(
        status=merge(statuses),
        tiers=tiers,
        diagnoses=diagnoses,
        coefficients=coefficients,
        findings=findings,
        warnings=(() if enforced else law) + tuple(_warnings(record)),
        reasons=reasons,
    )
    return replace(verdict, data=finite(_to_json(record, verdict, diffs)))


def _like_float32(
    record: ProgramRecord, diffs: list[TensorDiff], clean: ProgramRecord | None
) -> list[TensorDiff]:
    """Failing float64 tensors whose errors may be float32 roundings, and no cause: UNKNOWN.

    A step or a model that computes in float32 whatever it is given is not wrong, but what a
    float64 run would have shown was not seen either. Never a PASS; and a FAIL where the step was
    looked at and nothing of it computes in less than float64.
    """
    looked = [info["narrow"] for h in record.ranks.values() for info in h.info.values()
              if "narrow" in info]  # fmt: skip
    places = list(dict.fromkeys(place for seen in looked for place in seen))
    if looked and not places:
        return diffs
    failed = [d for d in diffs if d.status == "fail" and record.spec.tiers[d.tier] == "float64"]
    if not failed or any(not d.comparable for d in failed):
        return diffs
    references = record.references
    for d in failed:
        scale = references[d.tier][d.step].step.scale[d.name]
        if d.max_abs > FLOAT32_ROUNDINGS * torch.finfo(torch.float32).eps * float(scale.max()):
            return diffs
    causes, _ = diagnose_program(record, diffs, [], clean=clean)
    if any(cause.kind != "open" for cause in causes):
        return diffs
    seen = f"the step makes {some_of(places)}" if places else "what it computes in was not seen"
    why = (
        f"its error is no larger than float32 roundings, and {seen}: a wrong term of that size "
        f"would look the same"
    )
    unsure = {id(d) for d in failed}
    return [replace(d, status="unknown", reason=why) if id(d) in unsure else d for d in diffs]


def _not_compared(record: ProgramRecord) -> Iterator[str]:
    spec, place = record.spec, record.spec.topology.place
    yield from spec.facts.problems
    if spec.facts.problems:
        return
    yield from (f"the {tier} tier was not run: {why}" for tier, why in spec.skipped.items())
    for o in record.outcomes:
        if not o.ok:
            yield f"{place(o.rank)}: {o.status}" + (f", {o.detail}" if o.detail else "")
        elif o.rank not in record.ranks:
            yield f"{place(o.rank)}: ended well, but its record is missing or incomplete"
    for rank, held in record.ranks.items():
        yield from (f"{place(rank)}: {text}" for text in held.unknown)
        if not held.ledger_whole:
            yield f"{place(rank)}: its ledger is missing or cut short"
    yield from record.damage
    if record.ranks:
        yield from uncovered(record)
    yield from _unsound(record)
    yield from unseen(record)


def _unsound(record: ProgramRecord) -> Iterator[str]:
    """Why the reference does not belong to what the ranks ran."""
    facts = record.spec.facts
    for tier, references in record.references.items():
        for reference in references:
            yield from (f"{tier}: {problem}" for problem in reference.problems)
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


def _weights(record: ProgramRecord) -> Iterator[str]:
    """Ranks whose step started from other weights than the reference."""
    for rank, held in record.ranks.items():
        if held.built != record.spec.facts.weights:
            continue
        for (tier, step), info in held.info.items():
            if info["other_weights"]:
                names = info["other_weights"]
                more = f" and {len(names) - 1} more" if len(names) > 1 else ""
                yield (
                    f"weights, {tier}, step {step}: rank {rank} starts from other values of "
                    f"{names[0]}{more} than the reference"
                )


def _races(record: ProgramRecord) -> Iterator[str]:
    """Operations that a step started and left: what it reads may be half done."""
    found: dict[str, list[int]] = {}
    for rank, held in record.ranks.items():
        for info in held.info.values():
            for text in info["races"]:
                found.setdefault(text, []).append(rank)
    for text, ranks in list(found.items())[:3]:
        yield f"nobody waits for {text}, on rank {spans(ranks)}: what it gives may not be there yet"


def _again(diffs: Sequence[TensorDiff], again: Sequence[TensorDiff]) -> tuple[str, ...]:
    """The repeated step failed where the first one passed."""
    failed = {(d.tier, d.rank, d.name) for d in diffs if d.status != "pass"}
    new = [d for d in again if d.status == "fail" and (d.tier, d.rank, d.name) not in failed]
    if not new:
        return ()
    ranks = spans([d.rank for d in new])
    return (
        f"the same step on the same weights gave another gradient of {new[0].name} the second "
        f"time, on rank {ranks}: something is drawn unseeded or carried over",
    )


def _warnings(record: ProgramRecord) -> Iterator[str]:
    partial: dict[str, list[int]] = {}
    for rank, held in record.ranks.items():
        for info in held.info.values():
            for name in info["partial"]:
                partial.setdefault(name, []).append(rank)
    if partial:
        name, ranks = next(iter(partial.items()))
        more = f" and {len(partial) - 1} more" if len(partial) > 1 else ""
        yield (
            f"the gradient of {name}{more} on rank {spans(ranks)} is still a Partial DTensor; it "
            f"was reduced for the comparison"
        )
    yield from buffer_warnings(record)
    seen = set()
    for tier, references in record.references.items():
        for reference in references:
            for warning in reference.warnings:
                if warning not in seen:
                    seen.add(warning)
                    yield f"{tier}: {warning}"


def _tier(record: ProgramRecord, tier: str, diffs: Sequence[TensorDiff]) -> TierVerdict:
    mine = [d for d in diffs if d.tier == tier]
    statuses: list[Status] = [d.status for d in mine]
    references = record.references.get(tier, [])
    sound = [r.step.step for r in references if not r.problems]
    wanted = list(range(record.spec.steps))
    complete = [r for r, h in record.ranks.items() if all((tier, s) in h.grads for s in wanted)]
    if sound != wanted or len(complete) < record.spec.topology.world_size:
        statuses.append("unknown")
    return tier_verdict(
        tier,
        record.spec.tiers[tier],
        statuses=statuses,
        diffs=mine,
        reasons=unknown_tensors(mine),
    )


def _skipped(tier: str, why: str) -> TierVerdict:
    return TierVerdict(name=tier, dtype="float64", status="unknown", reasons=(why,))


def _to_json(
    record: ProgramRecord, verdict: Verdict, diffs: Sequence[TensorDiff]
) -> dict[str, Any]:
    spec = record.spec
    return {
        "schema": SCHEMA,
        "status": verdict.status,
        "topology": topology_json(spec.topology),
        "workload": spec.workload,
        "fault": spec.fault,
        "seed": spec.seed,
        "steps": spec.steps,
        "num_rows": spec.facts.num_rows,
        "tiers": {
            t.name: {k: v for k, v in asdict(t).items() if k != "name"} for t in verdict.tiers
        },
        "tensors": [tensor_json(d) for d in diffs],
        "coefficients": [asdict(c) for c in verdict.coefficients],
        "diagnoses": [asdict(d) for d in verdict.diagnoses],
        "findings": list(verdict.findings),
        "warnings": list(verdict.warnings),
        "not_compared": list(verdict.reasons),
        "outcomes": [outcome_to_json(o) for o in record.outcomes],
        "reproduce": spec.reproduce,
        "versions": spec.versions,
    }
