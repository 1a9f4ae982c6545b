"""Where the ranks go another way than the single process inside of a function that both run.

A fault is in what the ranks run and the single process does not, in what they are handed, or in
what they have set: of code that both run the same way none is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import torch
from sumgrad.base.outcome import some_of, spans
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.in_code.lines import asked_between, first_lines
from sumgrad.diagnose.explainers.by_modules.leading import led_by
from sumgrad.diagnose.explainers.by_modules.looked import line_and_code, looked, owners
from sumgrad.diagnose.modules.where.first_wrong import (
    FirstWrong,
    first_wrong_backward,
    first_wrong_forward,
)
from sumgrad.record.computed import Computation, Computed
from sumgrad.record.line import Line

MOST_FUNCTIONS = 2
MOST_LINES = 3
KINDS = ("forward", "backward", "open", "loss_weights", "loss_at_tokens", "row_factors", "factor",
         "term_factor", "param_factors", "weights_of_ranks", "own_backward")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """In a function `within` that these ranks run the lines that the single process does not, and
    those that it runs there, and no rank does. Of the two one may be empty. of_functions: the
    ranks' lines apply Functions alone, which bring what is cut together, and replace nothing.
    replaced: the ranks run methods of that class that the single process does not, or call other
    functions of theirs there."""

    within: str
    ranks: tuple[int, ...]
    here: tuple[Line, ...]
    there: tuple[Line, ...]
    of_functions: bool = False
    replaced: bool = False

    @property
    def is_left_out(self) -> bool:
        """Whether the ranks run no line in place of those of the single process."""
        return bool(self.there) and not self.here and not self.replaced

    def in_words(self) -> str:
        start = f"in {self.within.partition(' ')[2]}"
        calls = "calls" if len(self.ranks) == 1 else "call"
        own = f"{start} rank {spans(self.ranks)} {calls} torch functions at {_shown(self.here)}"
        its = f"the single process calls torch functions at {_shown(self.there)}"
        if not self.here:  # a line with two branches may run all the same
            return f"{start} {its}, where no rank calls one"
        if not self.there:
            return f"{own}, where the single process calls none"
        return f"{own}, where the single process calls none, and {its}, where no rank does"


def with_branches(case: Case, diagnosis: Diagnosis) -> Diagnosis:
    """A cause that says where, and the branches there. Lines that are left out on the ranks come
    first."""
    look = looked(case)
    if look is None or case.traces is None or diagnosis.kind not in KINDS:
        return diagnosis
    forward = first_wrong_forward(look)
    told = _told(case, forward, forward or first_wrong_backward(look, owners(case)))
    if told and told[0].is_left_out:
        return led_by(_beside(case, forward, told[1:], diagnosis), told[0].in_words())
    return _beside(case, forward, told, diagnosis)


def lines_are_left_out(case: Case, found: FirstWrong) -> bool:
    """Whether, before what is wrong first in the forward, ranks run nothing in place of what the
    single process does in the same function: what leads a report of where it goes wrong."""
    told = _told(case, found, found)
    return bool(told) and told[0].is_left_out


def _told(case: Case, forward: FirstWrong | None, found: FirstWrong | None) -> list[Branch]:
    """Those that tell the most."""
    assert case.traces is not None
    asked = {
        rank: _asked(case, found, rank, back=forward is None)
        for rank in (case.traces.ranks if found is None else found.ranks)
    }
    every = {rank: trace.computed for rank, trace in case.traces.ranks.items()}
    told = branches(every, asked, case.traces.single.computed, back=forward is None)
    return sorted(told, key=lambda one: not (one.here and one.there))[:MOST_FUNCTIONS]


def _beside(
    case: Case, forward: FirstWrong | None, told: Sequence[Branch], diagnosis: Diagnosis
) -> Diagnosis:
    said, last = ([b.in_words() for b in told if b.of_functions == of] for of in (False, True))
    at = 0 if forward is None else _after_another_line(case, forward, told, diagnosis.because)
    because = (*diagnosis.because[:at], *said, *diagnosis.because[at:], *last)
    return replace(diagnosis, because=because)


def _after_another_line(
    case: Case, found: FirstWrong, told: Sequence[Branch], because: Sequence[str]
) -> int:
    """The place after the reason that names the first line that gives what the single process has
    nowhere, where that is in no branch: then it tells more than these do."""
    lines = first_lines(case, found, back=False)
    here = {line for one in told for line in one.here}
    if not lines or (lines[0].mine.line, lines[0].mine.code) in here:
        return 0
    text = line_and_code(lines[0].mine.line, lines[0].mine.code)
    return next((i + 1 for i, reason in enumerate(because) if text in reason), 0)


def _asked(
    case: Case, found: FirstWrong | None, rank: int, *, back: bool
) -> Callable[[Computation], bool]:
    """Which computations may be at fault: what lies between what is right and what is wrong; at
    the loss all that is in no module."""
    if found is None:
        return lambda c: not c.inside
    between = asked_between(case, found, rank, back=back)
    return lambda c: between(c) or (back and not found.modules and not c.inside)


def branches(
    every: Mapping[int, Computed],
    asked: Mapping[int, Callable[[Computation], bool]],
    single: Computed,
    *,
    back: bool = True,
) -> list[Branch]:
    """In the order of the ranks. every: what each rank computed; asked: of some of them, which of
    it is looked at. back: whether a backward is looked at, too."""
    in_one = {within: dict.fromkeys(lines) for within, lines in single.ran.items()}
    on_ranks = {line for own in every.values() for lines in own.ran.values() for line in lines}
    functions = {function for own in every.values() for function in own.ran}
    on_ranks_alone = functions - in_one.keys()
    found: dict[str, dict[int, dict[Line, bool]]] = {}
    for rank, is_asked in asked.items():
        for c in filter(is_asked, every[rank].computations):
            if c.line and c.within in in_one:
                lines = found.setdefault(c.within, {}).setdefault(rank, {})
                same = not back and _hands_on(c, every[rank])
                if (c.line, c.code) not in in_one[c.within] and not same:
                    applied = bool(c.written) and lines.get((c.line, c.code), True)
                    lines[c.line, c.code] = applied
    told = []
    for within, by_rank in found.items():
        lacking = [line for line in in_one[within] if line not in on_ranks]
        own = {line: of for lines in by_rank.values() for line, of in lines.items()}
        here = _of_other_words(own, lacking)
        lacking = _of_other_words(lacking, own)
        ran = {rank: {*one.ran.get(within, ())} for rank, one in every.items()}
        groups: dict[tuple[int, ...], list[Line]] = {}  # ranks need not run the same of them
        for line in here:
            on = tuple(sorted(rank for rank, every_line in ran.items() if line in every_line))
            groups.setdefault(on, []).append(line)
        if lacking and not groups:
            groups[tuple(sorted(by_rank))] = []
        for i, (ranks, group) in enumerate(groups.items()):
            there = () if i else tuple(lacking)
            told.append(
                Branch(
                    within=within,
                    ranks=ranks,
                    here=tuple(group),
                    there=there,
                    of_functions=bool(group) and not there and all(own[line] for line in group),
                    replaced=_class_of(within) in {_class_of(f) for f in on_ranks_alone} - {None}
                    or any(_calls(every[rank], within, on_ranks_alone) for rank in ranks),
                )
            )
    return told


def _calls(computed: Computed, within: str, others: Set[str]) -> bool:
    """Whether one of the others computes something between two lines of a function, or in the
    forward of the same module, as what that calls does."""
    sites: set[str] = set()  # of its lines, in the call of it that runs
    since: list[Computation] = []  # of the others, since its last line
    last: Computation | None = None
    for c in (c for c in computed.computations if not c.function_of):
        if c.within == within:
            again = c.site in sites  # it is called once more
            if (since and sites and not again) or any(_in_one_forward(one, c) for one in since):
                return True
            sites, since, last = ({c.site} if again else sites | {c.site}), [], c
        elif c.within in others:
            if last is not None and _in_one_forward(c, last):
                return True
            since.append(c)
    return False


def _in_one_forward(a: Computation, b: Computation) -> bool:
    """Of the same module."""
    return a.inside == b.inside != ()


def _class_of(within: str) -> tuple[str, str] | None:
    """Of `PATH:10 NAME` the file and the class; None of a function that is no method."""
    line, _, name = within.partition(" ")
    cls = name.rpartition(".")[0]
    return (line.rpartition(":")[0], cls) if cls else None


def _of_other_words(lines: Iterable[Line], others: Iterable[Line]) -> list[Line]:
    """Those that compute something else than all of the others, by their words: not the same
    twice, in two branches."""
    known = {_computes(code) for _, code in others}
    return [(line, code) for line, code in lines if _computes(code) not in known]


def _computes(code: str) -> str:
    """What a line computes, wherever it puts that."""
    target, is_put, value = code.removeprefix("return ").partition(" = ")
    return value if is_put and "(" not in target else code.removeprefix("return ")


def _hands_on(c: Computation, computed: Computed) -> bool:
    """Whether it gives what it takes, as a Function does whose backward reduces: in the forward
    nothing goes wrong there."""
    if len(c.gives) != 1 or not c.uses:
        return False
    given, taken = computed.values[c.gives[0]], computed.values[c.uses[0]]
    return given.shape == taken.shape and torch.equal(given, taken)


def _shown(lines: tuple[Line, ...]) -> str:
    shown = [line_and_code(*line) for line in lines[:MOST_LINES]]
    more = len(lines) - len(shown)
    return some_of(shown) + (f" and {more} more" if more else "")
