"""Why a run is wrong: what its record says outright, then what the explainers make of it."""

from __future__ import annotations

from dataclasses import replace

from sumgrad.base.verdict import Diagnosis, RecoveredCoefficient
from sumgrad.diagnose.case import case_of
from sumgrad.diagnose.explainers import EXPLAINERS, LAST_RESORT
from sumgrad.diagnose.explainers.by_modules.beside import beside
from sumgrad.diagnose.explanation import choose
from sumgrad.diagnose.outright import (
    incomparable,
    law_only,
    missing_wait,
    other_weights,
    run_to_run,
    wrong_counts,
)
from sumgrad.faults.operators import resembles
from sumgrad.judge.finding import Compared
from sumgrad.judge.knowledge import plan_of
from sumgrad.record.directory import Record

Found = tuple[tuple[Diagnosis, ...], tuple[RecoveredCoefficient, ...]]


def diagnose(compared: Compared, *, clean: Record | None = None) -> Found:
    """Causes and coefficients; empty for a run that passes.

    clean: a stored run of the same that passed.
    """
    causes, coefficients = _diagnose(compared, clean)
    if plan_of(compared.record) is None:
        causes = [_with_report(cause) for cause in causes]
    return tuple(causes), tuple(coefficients)


def _with_report(cause: Diagnosis) -> Diagnosis:
    """The cause, and the public report it resembles."""
    known = resembles(cause.kind)
    return replace(cause, because=(*cause.because, known)) if known else cause


def _diagnose(
    compared: Compared, clean: Record | None
) -> tuple[list[Diagnosis], list[RecoveredCoefficient]]:
    record = compared.record
    outright = [
        *other_weights(record),
        *wrong_counts(record),
        *incomparable(record, compared.diffs),
    ]
    case = case_of(compared, clean)
    if case is None:
        if compared.failed_again:
            outright.append(run_to_run(compared.failed_again))
        if compared.mismatches and not outright:
            outright.append(law_only(record, compared.mismatches))
        return outright, []
    if outright and outright[0].kind == "other_weights":
        return outright, []
    race = missing_wait(record)
    if race is not None:
        return [race, *outright], []
    if case.has_plan and not case.reference.partials:
        cause = (
            f"no partials of tier {case.tier}, step {case.step} were stored, so no cause can be "
            f"named"
        )
        return [*outright, Diagnosis(cause=cause, kind="unexplained")], []
    if not case.has_plan and outright and all(cell.got is None for cell in case.failing_cells):
        return outright, []
    causes, coefficients = choose(case, EXPLAINERS)
    if not causes and not outright:
        causes, coefficients = choose(case, LAST_RESORT)
    causes = [beside(case, cause) for cause in causes]
    said = [*outright, *causes] if case.has_plan else [*causes, *outright]
    return said, coefficients
