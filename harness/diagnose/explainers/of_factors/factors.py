"""What the numbers of a user's own step say: factors on parameters, terms and rows, rank by rank.

Some of them name their cause (a mean of means, a reduction that is missing); others only say how
much, and give way to what a ledger shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from sumgrad.base.outcome import some_of
from sumgrad.base.verdict import Diagnosis, RecoveredCoefficient
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.of_factors.uniform import factors_by_parameter, uniform_cause
from sumgrad.diagnose.explainers.of_ledgers.divergent import divergent_cause
from sumgrad.diagnose.explanation import Explanation, Left
from sumgrad.diagnose.fit import as_fraction
from sumgrad.diagnose.row_fit import Factors, Unit

# Numbers without a reason. The weak ones give way to any difference from a run that passed.
WEAK = ("factor", "row_factors", "local_count")
GENERIC = (
    *WEAK, "param_factors", "term_factor", "open", "skipped_collective", "unused_result",
)  # fmt: skip
Fitted = tuple[Diagnosis, list[tuple[tuple[int, ...], Factors]]]


def fitted(case: Case) -> Fitted | None:
    """The factors that explain a case, and the words for them; None where none do."""
    if "fitted" not in case.known:
        case.known["fitted"] = (
            None
            if case.has_plan
            else uniform_cause(case) or divergent_cause(case) or factors_by_parameter(case)
        )
    found: Fitted | None = case.known["fitted"]
    return found


def one_term_by_rows(case: Case, left: Left) -> Iterator[Explanation]:
    """One term that counts otherwise in some rows: told before anything that only says where."""
    found = fitted(case)
    if found is not None and found[0].kind == "term_by_rows":
        yield explained(case, found[0])


def factors_with_a_cause(case: Case, left: Left) -> Iterator[Explanation]:
    """Factors that say why."""
    found = fitted(case)
    if found is not None and found[0].kind not in GENERIC:
        yield explained(case, found[0])


def telling_factors(case: Case, left: Left) -> Iterator[Explanation]:
    """Factors that say what is wrong and not why."""
    found = fitted(case)
    if found is not None and found[0].kind not in WEAK:
        yield explained(case, found[0])


def any_factors(case: Case, left: Left) -> Iterator[Explanation]:
    """Factors that say how much."""
    found = fitted(case)
    if found is not None:
        yield explained(case, found[0])


def explained(case: Case, diagnosis: Diagnosis, leaves: Sequence[str] = ()) -> Explanation:
    """All of a case by one cause, with the factors that were recovered whatever the cause is.

    leaves: parameters that are wrong by something else.
    """
    return Explanation(
        diagnosis=diagnosis,
        explains=frozenset({0}),
        leaves=tuple(leaves),
        coefficients=partial(_measured, case),
    )


def only_terms_weigh_otherwise(case: Case) -> bool:
    """Whether every gradient is that of the terms, each with one factor: then what the modules give
    is right, and what follows them, or a model that gives its loss, has it as its ranks weigh it.
    """
    found = fitted(case)
    return found is not None and found[0].kind == "term_factor"


def in_the_gradients(case: Case) -> tuple[str, ...]:
    """What the factors say, as evidence beside a cause that something else shows."""
    found = fitted(case)
    return () if found is None else (f"in the gradients: {found[0].cause}",)


def _measured(case: Case, _: Left) -> list[RecoveredCoefficient]:
    found = fitted(case)
    return list(_coefficients(case, found[1])) if found else []


def _coefficients(
    case: Case, found: Sequence[tuple[tuple[int, ...], Factors]]
) -> Iterator[RecoveredCoefficient]:
    failing = case.failing_cells
    for ranks, factors in found:
        names = dict.fromkeys(cell.name for cell in failing if cell.rank in ranks)
        for i, (unit, value, sigma) in enumerate(
            zip(factors.units, factors.values, factors.sigmas, strict=True)
        ):
            fraction = as_fraction(value, sigma)
            expected = "0" if unit.previous else "1"
            params = factors.params[i] if factors.params else some_of(list(names))
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
            )


def _term(unit: Unit) -> str:
    name = unit.term or "all terms"
    return f"{name}, previous step" if unit.previous else name
