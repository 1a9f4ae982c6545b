"""Why a Program's gradient is wrong: recovered coefficients and the ledger, put into words.

Detecting is done; this only explains. First what a record says outright, then one explanation for
all ranks, then one for each rank, then what the ledger shows, then, if a clean run is at hand, the
first operation that differs from it. What none of them explains is said to be open.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from sumgrad.clean_trace import first_difference
from sumgrad.compare import TensorDiff
from sumgrad.divergent_causes import divergent_cause
from sumgrad.fault_operators import resembles
from sumgrad.fit import as_fraction
from sumgrad.ledger_causes import cause_in_ledger
from sumgrad.outcome import some_of, spans
from sumgrad.program_compare import Cell, cells
from sumgrad.program_fit import Explanation, FailedStep, Unit
from sumgrad.program_record import ProgramRecord
from sumgrad.uniform_causes import factors_by_parameter, uniform_cause
from sumgrad.verdict import Diagnosis, RecoveredCoefficient

# Numbers without a reason: what the ledger or a clean run shows goes first.
GENERIC = (
    "factor", "row_factors", "param_factors", "term_factor", "local_count", "open",
    "skipped_collective", "unused_result",
)  # fmt: skip
Found = tuple[tuple[Diagnosis, ...], tuple[RecoveredCoefficient, ...]]


def diagnose_program(
    record: ProgramRecord,
    diffs: Sequence[TensorDiff],
    again: Sequence[TensorDiff],
    *,
    clean: ProgramRecord | None = None,
) -> Found:
    """Causes and coefficients; empty for a run that passes. clean: a stored run that passed."""
    causes, coefficients = _diagnose(record, diffs, again, clean)
    return tuple(_with_report(cause) for cause in causes), coefficients


def _with_report(cause: Diagnosis) -> Diagnosis:
    """The cause, and the public report it resembles."""
    known = resembles(cause.kind)
    return replace(cause, because=(*cause.because, known)) if known else cause


def _diagnose(
    record: ProgramRecord,
    diffs: Sequence[TensorDiff],
    again: Sequence[TensorDiff],
    clean: ProgramRecord | None,
) -> Found:
    outright = [*_other_weights(record), *_incomparable(diffs)]
    failed = [d for d in diffs if d.status == "fail"]
    if not failed:
        if any(d.status == "fail" for d in again):
            outright.append(_run_to_run(again))
        return tuple(outright), ()
    case = failed_step(record, failed)
    if outright and outright[0].kind == "other_weights":
        return tuple(outright), ()
    races = _race(record)
    if races is not None:
        return (races, *outright), ()
    if outright and all(cell.got is None for cell in case.failing()):
        return tuple(outright), ()
    found = uniform_cause(case) or divergent_cause(case) or factors_by_parameter(case)
    coefficients = tuple(_coefficients(case, found[1])) if found else ()
    reason = _reason(case, found[0] if found else None, diffs, again, clean)
    if reason is None and outright:
        return tuple(outright), ()
    return (reason or _unexplained(case), *outright), coefficients


def _reason(
    case: FailedStep,
    found: Diagnosis | None,
    diffs: Sequence[TensorDiff],
    again: Sequence[TensorDiff],
    clean: ProgramRecord | None,
) -> Diagnosis | None:
    """The cause: what the numbers say, unless they only say how much and a ledger says why."""
    if found is not None and found.kind not in GENERIC:
        return found
    parted = first_difference(case.record, clean, case.tier, case.step) if clean else None
    why = parted.diagnosis if parted is not None and parted.structural else None
    why = why or cause_in_ledger(case)
    if why is None and found is None and _differs(diffs, again):
        why = _run_to_run(again)
    if why is None and found is None and parted is not None:
        why = parted.diagnosis
    if why is None and found is not None and found.kind in ("local_count", "row_factors", "factor"):
        why = parted.diagnosis if parted is not None else None
    if why is not None and found is not None:
        return replace(why, because=(*why.because, f"in the gradients: {found.cause}"))
    return why or found


def failed_step(record: ProgramRecord, failed: Sequence[TensorDiff]) -> FailedStep:
    """The first failing step of the first failing tier."""
    tier = next(t for t in record.spec.tiers if any(d.tier == t for d in failed))
    step = min(d.step for d in failed if d.tier == tier)
    references = record.references[tier]
    return FailedStep(
        record=record,
        tier=tier,
        step=step,
        reference=references[step],
        previous=references[step - 1] if step else None,
        cells=tuple(
            cell
            for cell in cells(record, tier, references[step])
            if cell.measured.shape == cell.wanted.value.shape
        ),
    )


def _other_weights(record: ProgramRecord) -> Iterator[Diagnosis]:
    for (tier, step), names in _by_step(record, "other_weights").items():
        ranks = [r for r, n in names.items() if n]
        if ranks and all(record.ranks[r].built == record.spec.facts.weights for r in ranks):
            yield Diagnosis(
                cause=f"rank {spans(ranks)} starts from other weights than build() gives: the "
                f"replicas are not one model",
                kind="other_weights",
                ranks=tuple(ranks),
                because=(
                    f"before step {step} of tier {tier} its values of {names[ranks[0]][0]} are "
                    f"not the reference's, bit by bit",
                ),
            )
            return


def _by_step(record: ProgramRecord, key: str) -> dict[tuple[str, int], dict[int, list[str]]]:
    out: dict[tuple[str, int], dict[int, list[str]]] = {}
    for rank, held in record.ranks.items():
        for where, info in held.info.items():
            out.setdefault(where, {})[rank] = info[key]
    return out


def _incomparable(diffs: Sequence[TensorDiff]) -> Iterator[Diagnosis]:
    """Gradients that are missing or not finite."""
    for kind, bad in (
        ("missing", [d for d in diffs if d.status == "fail" and not d.comparable and not d.index]),
        ("not_finite", [d for d in diffs if d.status == "fail" and not d.comparable and d.index]),
    ):
        if bad:
            names = list(dict.fromkeys(d.name for d in bad))
            ranks = tuple(sorted({d.rank for d in bad}))
            yield Diagnosis(
                cause=f"{some_of(names)} on rank {spans(ranks)}: {bad[0].reason}",
                kind=kind,
                ranks=ranks,
                because=(f"{len(bad)} tensors of {len(diffs)} could not be compared",),
            )


def _race(record: ProgramRecord) -> Diagnosis | None:
    for rank, held in record.ranks.items():
        for info in held.info.values():
            for text in info["races"][:1]:
                return Diagnosis(
                    cause=f"nobody waits for {text}: the gradient is read before it is done",
                    kind="missing_wait",
                    ranks=(rank,),
                    because=("the step ended while this operation was neither waited for nor a "
                             "future of anybody",),
                )  # fmt: skip
    return None


def _differs(diffs: Sequence[TensorDiff], again: Sequence[TensorDiff]) -> bool:
    """Whether the repeated step missed the reference by something else than the first."""
    if not again:
        return False
    last = max(d.step for d in again)
    first = {(d.tier, d.rank, d.name): d for d in diffs if d.step == last}
    for d in again:
        other = first.get((d.tier, d.rank, d.name))
        if other is None or not d.comparable or not other.comparable:
            continue
        if abs(d.l2_rel - other.l2_rel) > 1e-6 * max(d.l2_rel, other.l2_rel, 1e-6):
            return True
    return False


def _run_to_run(again: Sequence[TensorDiff]) -> Diagnosis:
    ranks = tuple(sorted({d.rank for d in again if d.status == "fail"}))
    return Diagnosis(
        cause="the same step on the same weights and batch gives another gradient each time",
        kind="run_to_run",
        ranks=ranks,
        because=(
            "the last step was run twice in the same processes, and the two differ by more than "
            "the threshold",
        ),
        however=("random numbers drawn unseeded, a race, and state carried over look the same",),
    )


def _unexplained(case: FailedStep) -> Diagnosis:
    failing = case.failing()
    names = list(dict.fromkeys(cell.name for cell in failing))
    right = [n for n in case.record.spec.facts.params if n not in names]
    worst = max(failing, key=lambda c: float((c.measured - c.wanted.value).abs().max()) / _of(c))
    however = [f"{some_of(right)} is right on every rank"] if right else []
    if all(_is_narrow(cell) for cell in failing):
        return Diagnosis(
            cause=f"{some_of(names)} has only bfloat16 digits",
            kind="low_precision",
            because=("every element of it is a bfloat16 number",),
            however=tuple(however),
        )
    return Diagnosis(
        cause=f"open: {some_of(names)} is wrong and no cause of it is proved; the largest error is "
        f"in {worst.name} on rank {worst.rank}",
        kind="open",
        ranks=tuple(sorted({c.rank for c in failing})),
        because=(
            "one factor on everything, on a parameter, on a term or on stretches of rows does "
            "not leave a residual under the threshold",
        ),
        however=tuple(however),
    )


def _of(cell: Cell) -> float:
    return cell.wanted.size or 1.0


def _is_narrow(cell: Cell) -> bool:
    value = cell.measured
    return bool(torch.equal(value.to(torch.bfloat16).double(), value)) and bool(value.any())


def _coefficients(
    case: FailedStep, found: Sequence[tuple[tuple[int, ...], Explanation]]
) -> Iterator[RecoveredCoefficient]:
    failing = case.failing()
    for ranks, explanation in found:
        names = dict.fromkeys(cell.name for cell in failing if cell.rank in ranks)
        for i, (unit, value, sigma) in enumerate(
            zip(explanation.units, explanation.values, explanation.sigmas, strict=True)
        ):
            fraction = as_fraction(value, sigma)
            expected = "0" if unit.previous else "1"
            params = explanation.params[i] if explanation.params else some_of(list(names))
            yield RecoveredCoefficient(
                params=params,
                ranks=ranks,
                term=_term(unit),
                producer="program",
                rows=unit.rows,
                expected=expected,
                recovered=value,
                sigma=sigma,
                fraction=str(fraction) if fraction is not None else None,
                identifiable=value is not None,
            )


def _term(unit: Unit) -> str:
    name = unit.term or "all terms"
    return f"{name}, previous step" if unit.previous else name
