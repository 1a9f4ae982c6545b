"""A module of the user's own whose backward gives its own parameters something else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sumgrad.base.outcome import some_of, spans
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.backwards.how_it_is_off import off_at_a_line
from sumgrad.diagnose.explainers.by_modules.backwards.passed import (
    made_by,
    own_makers,
    wrong_makers,
)
from sumgrad.diagnose.explainers.by_modules.in_code.lines import in_words, known_lines, lines_inside
from sumgrad.diagnose.explainers.by_modules.looked import gone_into, looked_by_rows, named, owners
from sumgrad.diagnose.explainers.of_factors.by_rank import wrong_before_it_is_reduced
from sumgrad.diagnose.explainers.of_factors.factors import explained
from sumgrad.diagnose.explanation import Explanation, Left
from sumgrad.diagnose.modules.autograd.saved_inputs import SavedOtherwise, saved_otherwise
from sumgrad.diagnose.modules.where.first_wrong import first_wrong_backward, first_wrong_forward
from sumgrad.diagnose.modules.where.look import Look
from sumgrad.record.trace import INTO

MOST_SHOWN = 4
PENALTY = "a penalty on these parameters, or a second backward, would look the same"


def another_input_was_saved(case: Case, left: Left) -> Iterator[Explanation]:
    """A linear layer that is right in all that goes in and out, and whose weight's gradient is the
    product with another input."""
    look = looked_by_rows(case)
    if look is None or not wrong_before_it_is_reduced(case):
        return
    names = list(dict.fromkeys(cell.name for cell in case.failing_cells))
    found = _saved(case, names)
    if {one.name for one in found} != {*names}:
        return
    modules = [named(look, name.rpartition(".")[0]) for name in names]
    yield explained(
        case,
        Diagnosis(
            cause=f"the backward of {some_of(modules)} uses another input than its forward had: "
            f"what it saved was overwritten, or something else put back, in between",
            kind="saved_input",
            ranks=tuple(sorted({one.rank for one in found})),
            because=tuple(saved_in_words(case, names)),
            standing="proved",
        ),
    )


def saved_in_words(case: Case, names: Sequence[str]) -> Iterator[str]:
    """Of these weights which gradients are multiplied with which inputs."""
    calls: dict[tuple[int, str, str], list[int]] = {}
    for one in _saved(case, names):
        calls.setdefault((one.rank, one.name, _what(one)), []).append(one.call.number)
    for (rank, name, what), numbers in list(calls.items())[:MOST_SHOWN]:
        yield (f"on rank {rank} the gradient of call {spans(sorted(numbers))} of {name} is "
               f"multiplied with {what}: that product is what the backward gave")  # fmt: skip
    if len(calls) > MOST_SHOWN:
        yield f"and {len(calls) - MOST_SHOWN} more"


def _saved(case: Case, names: Sequence[str]) -> list[SavedOtherwise]:
    traces = case.traces
    ranks = {} if traces is None else traces.ranks
    return [
        one
        for rank, trace in ranks.items()
        for name in names
        for one in saved_otherwise(rank, trace, name)
    ]


def _what(one: SavedOtherwise) -> str:
    what = one.saved.module
    if what.removeprefix(INTO) == one.call.module:
        return f"the input of call {one.saved.number}"
    what = what if what.startswith(INTO) else f"what {what} gives"
    return f"{what} in call {one.saved.number}"


def own_backward_goes_wrong(case: Case, left: Left) -> Iterator[Explanation]:
    """All that goes through the modules is right, forward and backward; what a backward gives some
    parameters is not: of modules that are not torch's own, or that the ranks do not call."""
    look = looked_by_rows(case)
    modules = list(dict.fromkeys(owners(case)))
    if look is None or first_wrong_forward(look) or first_wrong_backward(look, modules):
        return
    ranks = tuple(sorted({cell.rank for cell in case.failing_cells}))
    inside = [m for m in modules if any(s.rank in ranks for s in look.seen.get(m, ()))]
    names = list(dict.fromkeys(cell.name for cell in case.failing_cells))
    functions = own_makers(case, names)
    as_it_comes = wrong_before_it_is_reduced(case)
    if not as_it_comes and not (functions and _are_right_beside(case, names)):
        return
    if any(not _is_right_through(case, look, m) for m in inside) and not functions:
        return
    told = sum(look.forward(m) == "right" for m in look.modules)
    if not told:
        return  # what nothing could be compared with is not known to be right
    elsewhere = [m or "the model" for m in modules if m not in inside]
    where = [f"the backward of {some_of([named(look, m) for m in inside])}"] if inside else []
    wrong = wrong_makers(case, names)
    if functions:
        where = [f"the backward of {functions}"]
    elif elsewhere:
        where.append(f"the backward of what these ranks run in place of {some_of(elsewhere)}")
    what = f"what the backward gives {some_of(names)} is wrong already as it comes"
    if not as_it_comes:
        what = f"of the parameters {some_of(names)} alone is wrong"
    why = wrong.said if wrong and wrong.said else f"look at {', and at '.join(where)}"
    yield explained(
        case,
        Diagnosis(
            cause=f"what all {told} modules that could be compared give is right, and so is the "
            f"gradient that reaches it; {what}: {why}",
            kind="own_backward",
            ranks=ranks,
            because=(
                *(wrong.because if wrong else ()),
                *in_words(lines_inside(case, inside)),
                *(() if functions else made_by(case, names)),
                *(() if wrong and wrong.said else (PENALTY,)),
            ),
        ),
    )


def _are_right_beside(case: Case, names: Sequence[str]) -> bool:
    """Whether all other parameters are right on every rank, and there are more than one."""
    return len({*case.record.spec.params} - {*names}) > 1


def a_line_goes_wrong(case: Case, left: Left) -> Iterator[Explanation]:
    """No module's gradient tells anything, and a line's does: right at its result, and wrong at
    what it is made from; or a line cuts the graph."""
    look = looked_by_rows(case)
    if look is None or first_wrong_forward(look) or first_wrong_backward(look, owners(case)):
        return
    found = [one for one in lines_inside(case, ()) if one.at or one.cut]
    if found:
        said, *more = in_words(found)
        told = sum(look.forward(m) == "right" for m in look.modules)
        yield explained(
            case,
            Diagnosis(
                cause=f"the forward is right in all {told} modules that could be compared; {said}",
                kind="backward",
                ranks=tuple(sorted({one.rank for one in found})),
                because=(
                    *off_at_a_line(known_lines(case), [one for one in found if one.at]),
                    *more,
                ),
            ),
        )


def _is_right_through(case: Case, look: Look, module: str) -> bool:
    """A module that is not torch's own, and right in all that goes in and out."""
    into = gone_into(case, module)
    return (
        " at " in look.sources.get(module, "")
        and (look.forward(module), look.backward(module)) == ("right", "right")
        and bool(into)
        and all(s.forward != "wrong" for s in into)
    )
