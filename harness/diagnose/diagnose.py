"""Why a run is wrong: what its record says outright, then what the explainers make of it."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from sumgrad.base.time_limit import time_limit
from sumgrad.base.verdict import Diagnosis, RecoveredCoefficient
from sumgrad.diagnose.case import Case, case_of
from sumgrad.diagnose.explainers import BESIDE_A_CAUSE, EXPLAINERS, LAST_RESORT
from sumgrad.diagnose.explainers.by_modules.tried import with_what_was_tried
from sumgrad.diagnose.explainers.by_modules.where import first_wrong_modules
from sumgrad.diagnose.explainers.left_over.frozen import with_frozen
from sumgrad.diagnose.explanation import BROKEN, PART_S, choose
from sumgrad.diagnose.of_bits import first_other_bits
from sumgrad.diagnose.of_script import other_than_the_single_run
from sumgrad.diagnose.outright import (
    incomparable,
    law_only,
    missing_wait,
    other_weights,
    run_to_run,
    wrong_counts,
)
from sumgrad.diagnose.unlike_hashes import unlike_hashes
from sumgrad.faults.operators import resembles
from sumgrad.judge.finding import Compared
from sumgrad.judge.knowledge import plan_of
from sumgrad.record.directory import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Causes and coefficients, empty for a run that passes. where: the first wrong modules of a
    user's own step, as in verdict.json; None where no modules were recorded."""

    causes: tuple[Diagnosis, ...]
    coefficients: tuple[RecoveredCoefficient, ...] = ()
    where: Mapping[str, Any] | None = None


def diagnose(compared: Compared, *, clean: Record | None = None) -> Found:
    """Why a run fails. clean: a stored run of the same that passed."""
    try:
        case = case_of(compared, clean)
        causes, coefficients = _diagnose(compared, case)
        if plan_of(compared.record) is None:
            causes = [_with_report(cause) for cause in causes]
        where = None if case is None else _where(case)
    except Exception as error:  # an error of ours takes no verdict away
        return Found(causes=(_broken(error),))
    return Found(causes=tuple(causes), coefficients=tuple(coefficients), where=where)


def _where(case: Case) -> Mapping[str, Any] | None:
    """None, too, where it fails itself: no cause is lost by that."""
    try:
        with time_limit(PART_S):
            return first_wrong_modules(case)
    except Exception:
        return None


def _beside_an_error(error: Exception, cause: Diagnosis) -> Diagnosis:
    broken = _broken(error)
    text = f"a part of the diagnosis failed itself: {_error(error)}, {broken.because[0]}"
    return replace(cause, however=(*cause.however, text))


def _with(step: Callable[[Case, Diagnosis], Diagnosis], case: Case, cause: Diagnosis) -> Diagnosis:
    """What a step makes of a cause; the cause as it is where the step fails itself."""
    try:
        with time_limit(PART_S):
            return step(case, cause)
    except Exception as error:  # a hint takes no cause away
        case.known.setdefault(BROKEN, []).append(error)
        return cause


def _error(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _broken(error: Exception) -> Diagnosis:
    place = traceback.extract_tb(error.__traceback__)[-1]
    return Diagnosis(
        cause=f"open: the diagnosis itself failed, the verdict stands: {_error(error)}",
        kind="broken",
        standing="open",
        because=(f"raised at {place.filename}:{place.lineno}; please report it",),
    )


def _with_report(cause: Diagnosis) -> Diagnosis:
    """The cause, and the public report it resembles."""
    known = resembles(cause.kind)
    return replace(cause, because=(*cause.because, known)) if known else cause


def _diagnose(
    compared: Compared, case: Case | None
) -> tuple[list[Diagnosis], list[RecoveredCoefficient]]:
    record = compared.record
    of_script = list(other_than_the_single_run(compared))
    if of_script:
        return of_script, []
    hashes = unlike_hashes(record)
    if hashes is not None:
        return [hashes], []
    outright = [
        *other_weights(record),
        *wrong_counts(record),
        *incomparable(record, compared.diffs),
    ]
    first = outright[0].kind if outright else None
    failed_again = bool(compared.failed_again)
    race = missing_wait(record, failed_again=failed_again) if first != "other_weights" else None
    if race is not None:
        return [race, *outright], []
    if case is None:
        if compared.failed_again:
            outright.append(run_to_run(compared.failed_again))
        if compared.mismatches and not outright and record.spec.tiers:
            outright.append(law_only(record, compared.mismatches))
        return [*outright, *first_other_bits(record)], []
    if first == "other_weights":
        return outright, []
    if case.has_plan and not case.reference.partials:
        cause = (
            f"no partials of tier {case.tier}, step {case.step} were stored, so no cause can be "
            f"named"
        )
        return [*outright, Diagnosis(cause=cause, kind="unexplained", standing="open")], []
    if not case.has_plan and outright and all(cell.got is None for cell in case.failing_cells):
        return [with_frozen(case, one) for one in outright], []
    key = f"causes/{case.tier}/{case.step}"
    found = partial(_causes, case, alone=not outright)
    causes, coefficients, errors = found() if case.clean is not None else record.once(key, found)
    if not causes and not outright and record.trials:
        causes = [Diagnosis(cause="open: no cause was found", kind="open", standing="open")]
    causes = [*(_with(with_what_was_tried, case, cause) for cause in causes[:1]), *causes[1:]]
    for error in [*errors, *case.known.get(BROKEN, ())][:1]:
        causes = [_beside_an_error(error, causes[0]), *causes[1:]] if causes else [_broken(error)]
    said = [*outright, *causes] if case.has_plan else [*causes, *outright]
    return said, coefficients


def _causes(
    case: Case, *, alone: bool
) -> tuple[list[Diagnosis], list[RecoveredCoefficient], Sequence[Exception]]:
    """Without what was tried, and our own errors meanwhile. alone: whether nothing else says why it
    fails."""
    causes, coefficients = choose(case, EXPLAINERS)
    if not causes and alone:
        causes, coefficients = choose(case, LAST_RESORT)
    for step in BESIDE_A_CAUSE:
        causes = [_with(step, case, cause) for cause in causes]
    return causes, coefficients, case.known.get(BROKEN, ())
