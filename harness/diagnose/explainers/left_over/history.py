"""What became of a wrong gradient line by line, in words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from sumgrad.base.outcome import some_of
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.in_code.computed import A_LINE
from sumgrad.diagnose.explainers.by_modules.in_code.lines import expression
from sumgrad.diagnose.explainers.by_modules.looked import line_and_code
from sumgrad.diagnose.explainers.of_factors.by_rank import in_weights
from sumgrad.diagnose.modules.autograd.history import Held, History, history_of, multiplied_in
from sumgrad.diagnose.own_gradients import SAME_FACTOR, Columns, columns_of, given_by_ranks, near
from sumgrad.record.computed import Computation
from sumgrad.record.line import Line
from torch import Tensor

# Wrong before it is put together, or another when the step is run again, as it is to be looked at.
ELSEWHERE = ("forward", "backward", "recomputed", "own_backward", "run_to_run", "loss_weights",
             "loss_at_tokens")  # fmt: skip
MOST_PARAMETERS = 6  # of a rank, that are looked at
MOST_SHOWN, MOST_LAST = 6, 2  # lines of a history; of these, the last
MOST_LINES = 2  # that set it


def with_history(case: Case, diagnosis: Diagnosis) -> Diagnosis:
    """With the lines that took and gave the gradient of one wrong parameter of one rank."""
    if diagnosis.kind in ELSEWHERE:
        return diagnosis
    try:
        found = _longest(case)
    except (RuntimeError, ValueError, LookupError):
        return diagnosis  # as in looked(): a cause is not lost by a hint
    told = [] if found is None else [*_again(case, found), _in_words(found)]
    said = [*told, *_where_it_is_set(case)]
    if not said:
        return diagnosis
    first = sum(text.startswith(A_LINE) for text in diagnosis.because[:1])
    because = (*diagnosis.because[:first], *said, *diagnosis.because[first:])
    return replace(diagnosis, because=because)


def _where_it_is_set(case: Case) -> list[str]:
    """The lines that put something in place of what the backward gave wrong parameters, and those
    that look for it and find nothing. Not those that put zeros where a rank has none, and that are
    no zeros at the end."""
    names = {cell.name for cell in case.failing_cells}
    live = {cell.name for cell in case.failing_cells if bool(cell.measured.any())}
    ranks = {} if case.traces is None else case.traces.ranks
    found: dict[Line, dict[str, None]] = {}
    for trace in ranks.values():
        for one in trace.computed.set_grads:
            if one.name in names and not ("zeros_like" in one.line[1] and one.name in live):
                found.setdefault(one.line, {})[one.name] = None
    none = dict.fromkeys(line for trace in ranks.values() for line in trace.computed.found_none)
    told = [
        f"{line_and_code(*line)} reads the .grad of parameters, and finds none each time"
        for line in list(none)[:MOST_LINES]
    ]
    return told + [
        f"the .grad of {some_of([*held])} is set at {line_and_code(*line)}"
        for line, held in list(found.items())[:MOST_LINES]
    ]


def _longest(case: Case) -> History | None:
    """Of the wrong parameters of the first rank that tells something."""
    if "history" not in case.known:
        case.known["history"] = max(_told(case), key=lambda h: len(h.held), default=None)
    found: History | None = case.known["history"]
    return found


def _told(case: Case) -> Iterator[History]:
    traces = case.traces
    if traces is None:
        return
    asked: list[Columns] = _columns(case)
    for rank in sorted({c.cell.rank for c in asked}):
        mine = [c for c in asked if c.cell.rank == rank][:MOST_PARAMETERS]
        found = [history_of(c, traces.ranks[rank].computed) for c in mine]
        told = [h for h in found if h.changes]
        if told:
            yield from told
            return


def _columns(case: Case) -> list[Columns]:
    """Of wrong parameters, those of which most elements are known first."""
    given = None if case.has_plan or not case.exact else given_by_ranks(case)
    if given is None:
        return []
    found = [columns_of(cell, given, uneven=True) for cell in case.failing_cells]
    return sorted((c for c in found if c is not None), key=lambda c: -c.own.shape[1])


def _again(case: Case, history: History) -> Iterator[str]:
    """That a line multiplies it several times by the same, and how often it does so with others of
    the rank, which are right."""
    for c, (factor, *rest) in multiplied_in(history).items():
        if not rest or any(abs(f - factor) > SAME_FACTOR * abs(factor) for f in rest):
            continue
        often = {h.name: _often(h, c) for h in _of_right_ones(case, history.rank)}
        once = [name for name, times in often.items() if times == 1]
        are = "are" if len(once) > 1 else "is"
        others = f", and {some_of(once)}, which {are} right, once" if once else ""
        times = "twice" if len(rest) == 1 else f"{len(rest) + 1} times"
        yield (f"{expression(c)} multiplies {history.name} {times} by {factor:.6g} on rank "
               f"{history.rank}{others}")  # fmt: skip
        return


def _often(history: History, asked: Computation) -> int:
    """How many of its changes are that line's."""
    return sum(
        len(factors)
        for c, factors in multiplied_in(history).items()
        if (c.line, c.function, c.part) == (asked.line, asked.function, asked.part)
    )


def _of_right_ones(case: Case, rank: int) -> Iterator[History]:
    given = given_by_ranks(case)
    if case.traces is None or given is None:
        return
    wrong = {cell.name for cell in case.failing_cells}
    right = [cell for cell in case.cells if cell.rank == rank and cell.name not in wrong]
    for cell in right[:MOST_PARAMETERS]:
        columns = columns_of(cell, given, uneven=True)
        if columns is not None:
            yield history_of(columns, case.traces.ranks[rank].computed)


def _in_words(history: History) -> str:
    said: list[str] = []
    line = ""
    shown = history.held
    more = len(shown) - MOST_SHOWN
    if more > 0:
        shown = (*shown[: MOST_SHOWN - MOST_LAST], *shown[-MOST_LAST:])
    for n, held in enumerate(shown):
        if more > 0 and n == MOST_SHOWN - MOST_LAST:
            said.append(f"{more} more")
        here = expression(held.computation)
        where = "" if here == line else f"{here} "
        said.append(f"{where}{_weights(history, held)}")
        line = here
    end, last = history.end, history.held[-1].weights
    if end is not None and not near(end, last):
        said.append(
            f"at the end of the step it is {in_weights(history.sources, end, history.runs)}"
        )
    elif end is None:
        said.append(
            "at the end of the step it is not seen to be a sum of that: look at the last of these "
            "lines and at what follows it"
        )
    return (
        f"what became of {history.name} on rank {history.rank}, in what the ranks' own backwards "
        f"gave it: {'; '.join(said)}"
    )


def _weights(history: History, held: Held) -> str:
    what = "gives" if held.gives else "takes"
    part = ""
    if held.elements is not None:
        start, end = held.elements
        part = f"in elements {start} to {end - 1} of a larger tensor "
    return f"{what} {part}{_of_ranks(history, held.weights)}"


def _of_ranks(history: History, weights: Tensor) -> str:
    """The weights of those of which something is in it."""
    at = [i for i, row in enumerate(weights) if bool(row.any())]
    sources = [history.sources[i] for i in at]
    runs = [history.runs[i] for i in at] if history.runs else []
    return in_weights(sources, weights[at], runs)
