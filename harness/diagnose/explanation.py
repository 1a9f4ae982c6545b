"""An explanation, and the one rule that chooses among those that explainers find.

Explainers are asked in the order of how direct their evidence is, each for what is still open. Of
what one of them finds, that which explains most is taken, then the least contradicted, then the
simplest.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from sumgrad.base.outcome import some_of
from sumgrad.base.time_limit import time_limit
from sumgrad.base.verdict import Diagnosis, RecoveredCoefficient
from sumgrad.diagnose.case import Case

NOT_PROVED = " and no cause of it is proved"  # of what is wrong, in the cause that is open
BROKEN = "broken"  # of what is known of a case: errors of explainers
PART_S = 300.0  # for each explainer: most take less than a second
Left = frozenset[int]
Explainer = Callable[[Case, Left], Iterator["Explanation"]]


def _nothing(_: Left) -> Sequence[RecoveredCoefficient]:
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A cause whose predicted gradient is the measured one, or that a record shows by itself.

    explains: numbers of the case's parts. leaves: of a Program, parameters that are wrong by
    something else. contradictions: where the record says otherwise. complexity: simpler causes have
    less. coefficients: those of some parts, measured.
    """

    diagnosis: Diagnosis
    explains: Left
    leaves: tuple[str, ...] = ()
    contradictions: int = 0
    complexity: int = 0
    coefficients: Callable[[Left], Sequence[RecoveredCoefficient]] = _nothing


Chosen = tuple[list[Diagnosis], list[RecoveredCoefficient]]


def choose(case: Case, explainers: Sequence[Explainer]) -> Chosen:
    """As few explanations as explain the case, and the coefficients that they measure."""
    left: Left = frozenset(range(case.parts))
    diagnoses: list[Diagnosis] = []
    coefficients: list[RecoveredCoefficient] = []
    for explainer in explainers:
        if not left:
            break
        found = _asked(explainer, case, left)
        while left:
            best = max(found, key=lambda e: _merit(e, left), default=None)
            if best is None or not best.explains & left:
                break
            diagnoses.append(_with_the_rest(case, best, explainers))
            coefficients += best.coefficients(best.explains & left)
            left -= best.explains
    return diagnoses, coefficients


def _asked(explainer: Explainer, case: Case, left: Left) -> list[Explanation]:
    """What it finds; nothing where it fails itself, which is written down: others go on."""
    try:
        with time_limit(PART_S):
            return list(explainer(case, left))
    except Exception as error:
        case.known.setdefault(BROKEN, []).append(error)
        return []


def _with_the_rest(case: Case, best: Explanation, explainers: Sequence[Explainer]) -> Diagnosis:
    """A cause of some parameters, and why others are wrong."""
    if not best.leaves:
        return best.diagnosis
    rest = case.of(best.leaves)
    others, _ = ([], []) if case.only else choose(rest, explainers)
    case.known.setdefault(BROKEN, []).extend(rest.known.get(BROKEN, ()))
    text = f"{some_of(list(best.leaves))} is wrong too, and "
    if others and _is_said_alike(case, others[0], best.diagnosis):
        text += "the same is seen of it"
    else:
        text += "whether by the same is not known" + (f": {others[0].cause}" if others else "")
    return replace(best.diagnosis, however=(*best.diagnosis.however, text))


def _is_said_alike(case: Case, one: Diagnosis, other: Diagnosis) -> bool:
    """Whether two causes are the same but for the parameters that they name."""
    names = sorted(case.record.spec.params, key=len, reverse=True)

    def without_names(cause: str) -> str:
        for name in names:
            cause = cause.replace(name, "")
        return re.sub(r"(?:and \d+ more|[, ])+", " ", cause)

    return one.kind == other.kind and without_names(one.cause) == without_names(other.cause)


def _merit(explanation: Explanation, left: Left) -> tuple[int, int, int]:
    return (len(explanation.explains & left), -explanation.contradictions, -explanation.complexity)
