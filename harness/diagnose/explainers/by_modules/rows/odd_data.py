"""Data that enter a module and are none of the single process's, or of another row, in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from sumgrad.base.outcome import some_of, spans
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.between import is_in
from sumgrad.diagnose.explainers.by_modules.looked import as_a_hint, line_and_code
from sumgrad.diagnose.modules.inputs import companions
from sumgrad.diagnose.modules.inputs.bags import OtherBag, other_bags
from sumgrad.diagnose.modules.inputs.entered import Odd, is_whole, odd_rows, row_of
from sumgrad.diagnose.modules.inputs.pairs_twice import Twice, pairs_twice
from sumgrad.diagnose.modules.inputs.parts_handed import Joined, joined_parts
from sumgrad.diagnose.modules.inputs.rows_handed import as_often, wrong_and_right_rows
from sumgrad.diagnose.modules.where.first_wrong import FirstWrong
from sumgrad.diagnose.modules.where.look import Look
from sumgrad.record.line import Line
from sumgrad.record.trace import Trace, Traces

MOST_ROWS = 3  # that are written out
T = TypeVar("T", Joined, Twice, OtherBag)


@dataclass(frozen=True, slots=True, kw_only=True)
class OddData:
    """What enters a module and is none of the single process's, in words. is_sure: values say that
    it belongs elsewhere; else it may be numbers that are meant to be others."""

    module: str
    said: tuple[str, ...]
    is_sure: bool = True


def odd_data(case: Case, look: Look, found: FirstWrong) -> OddData | None:
    """The module that is wrong, or one beside or around it, which whole numbers enter that are no
    row of the single process's, or are those of a row with what is not that row's beside; and
    which."""
    traces = case.traces
    if traces is None:
        return None
    around = [m for m in look.modules if m != found.wrong and is_in(found.wrong, m)]
    for module in (found.wrong, *reversed(found.modules), *around):
        beside = [] if _comes_out_right(case, look, found, module) else (
            list(_beside(case, found, module))
        )  # fmt: skip
        if beside:
            text = (
                f"what {module or 'the model'} is handed for one row does not belong together: "
                f"{'; '.join(beside[:MOST_ROWS])}"
            )
            return OddData(module=module, said=(text,))
        strange = (
            _joined(case, look, found, module)
            or _twice(case, look, found, module)
            or _bags(case, look, found, module)
            or _of_another_field(case, found, module)
        )
        if strange:
            return OddData(module=module, said=tuple(strange))
        told: list[str] = []
        made: dict[Line, None] = {}
        usual = _is_usual(case, look, found, module)
        for rank in found.ranks:
            odd = list(odd_rows(traces.ranks[rank], traces.single, module))
            if module != found.wrong:  # rows are packed and padded in many ways
                odd = [one for one in odd if one.is_nearly_one]
            odd = _without_chance(odd)
            if usual:
                odd = [one for one in odd if one.of is not None]
            words = [_odd_row(one) for one in odd[:MOST_ROWS]]
            more = [f"{len(odd) - MOST_ROWS} more"] if len(odd) > MOST_ROWS else []
            told += [f"on rank {rank} {', '.join([*words, *more])}"] if odd else []
            made |= dict.fromkeys(_made(traces.ranks[rank], module, one) for one in odd)
        if told:
            said = (
                f"whole numbers that enter {module or 'the model'} are no row, nor a stretch of a "
                f"row, of those in the single process: {'; '.join(told[:MOST_ROWS])}",
                *([f"they were made at {line_and_code(*next(iter(made)))}"]
                  if len(made) == 1 and next(iter(made))[0] else []),
            )  # fmt: skip
            return OddData(module=module, said=said, is_sure=False)
    return None


@as_a_hint
def _joined(case: Case, look: Look, found: FirstWrong, module: str) -> list[str]:
    """Where rows of several parts are put together of other rows' parts; the first of a rank, and
    how many there are more."""
    first = _first_of_a_rank(case, look, found, module, joined_parts)
    if first is None:
        return []
    rank, one, num = first
    parts = ", ".join(
        f"part {i} is part {part} of row {row}" for i, (row, part) in enumerate(one.of)
    )
    made = f", made at {line_and_code(*one.made)}," if one.made[0] else ""
    more = f", and so in {num - 1} more" if num > 1 else ""
    return [f"row {one.row} of what {module or 'the model'} is handed as {one.name}{made} is put "
            f"together of parts that belong elsewhere in the single process, on rank {rank} in "
            f"call {one.call}: {parts}{more}: look at how rows and their parts are stacked, viewed "
            f"and transposed"]  # fmt: skip


@as_a_hint
def _twice(case: Case, look: Look, found: FirstWrong, module: str) -> list[str]:
    """Where pairs stand twice; the first call of a rank, and how many there are more."""
    first = _first_of_a_rank(case, look, found, module, pairs_twice)
    if first is None:
        return []
    rank, one, num = first
    pairs = some_of([f"({a}, {b})" for a, b in one.pairs])
    made = f", made at {line_and_code(*one.made)}" if one.made[0] else ""
    more = f", and so in {num - 1} more calls" if num > 1 else ""
    return [f"of what {module or 'the model'} is handed as {one.name} on rank {rank} in call "
            f"{one.call}{made}, {pairs} stands there more than once{more}, and in the single "
            f"process nothing does"]  # fmt: skip


@as_a_hint
def _bags(case: Case, look: Look, found: FirstWrong, module: str) -> list[str]:
    """Where bags end elsewhere; the first of a rank, and how many there are more."""
    first = _first_of_a_rank(case, look, found, module, other_bags)
    if first is None:
        return []
    rank, one, num = first
    made = f", made at {line_and_code(*one.made)}," if one.made[0] else ""
    more = f", and so in {num - 1} more" if num > 1 else ""
    its = f"with which a bag of {one.theirs} begins in the single process"
    if one.theirs < one.size:
        its = f"of which the first {one.theirs} alone are a bag of the single process's"
    return [f"bag {one.bag} of {one.of} that {module or 'the model'} is handed{made} on rank "
            f"{rank} in call {one.call} has {one.size} numbers, {its}{more}: look at where bags "
            f"begin and end"]  # fmt: skip


def _first_of_a_rank(
    case: Case,
    look: Look,
    found: FirstWrong,
    module: str,
    search: Callable[[Trace, Trace, str], Iterator[T]],
) -> tuple[int, T, int] | None:
    """What enters a module otherwise on the first wrong rank where something does, and how often
    there; None where that comes out right in some call, on whatever rank: then it tells nothing."""
    traces = case.traces
    if traces is None:
        return None
    right = _right_calls(look, found)
    every = {rank: list(search(t, traces.single, module)) for rank, t in traces.ranks.items()}
    for rank, trace in traces.ranks.items():
        if as_often(trace, module, found.wrong) and any(
            (rank, o.call) in right for o in every[rank]
        ):
            return None
    own = ((rank, every[rank]) for rank in found.ranks if every[rank])
    return next(((rank, told[0], len(told)) for rank, told in own), None)


def _right_calls(look: Look, found: FirstWrong) -> set[tuple[int, int]]:
    return {(s.rank, s.call.number) for s in look.seen[found.wrong] if s.forward == "right"}


def _without_chance(odd: Sequence[Odd]) -> list[Odd]:
    """What a row has moved it may have by chance: where most rows are not moved so far."""
    moved = [one.by for one in odd if one.by]
    often = max((moved.count(by) for by in moved), default=0)
    if 2 * often > len(odd) > 1:
        return [*odd]
    return [replace(one, of=None, by=0) if one.by else one for one in odd]


@as_a_hint
def _of_another_field(case: Case, found: FirstWrong, module: str) -> list[str]:
    """Where all rows that are none of those that enter there are rows of another field of the
    batch."""
    traces = case.traces
    if traces is None or not traces.single.batch:
        return []
    for rank in found.ranks:
        trace = traces.ranks[rank]
        odd = list(odd_rows(trace, traces.single, module))
        for name, field in traces.single.batch.items():
            of = [row_of(trace, module, one, field) for one in odd]
            if len(odd) > 1 and None not in of:
                shown = "; ".join(f"row {one.row} of call {one.call} is row {row} of it"
                                  for one, row in list(zip(odd, of, strict=True))[:2])  # fmt: skip
                made = _made(trace, module, odd[0])
                at = f", made at {line_and_code(*made)}" if made[0] else ""
                return [f"what enters {module or 'the model'} on rank {rank}{at} is `{name}` of "
                        f"the batch: {shown}"]  # fmt: skip
    return []


def _made(trace: Trace, module: str, odd: Odd) -> Line:
    """The line that made what a row is of; empty where that is not known."""
    for of, (call, name), at, data in zip(
        trace.entered, trace.entered_as, trace.entered_at, trace.data, strict=False
    ):
        if (of, call) == (module, odd.call) and odd.name in ("", name) and is_whole(data):
            return at
    return "", ""


def _is_usual(case: Case, look: Look, found: FirstWrong, module: str) -> bool:
    """Whether rows that are like none enter where it is right, too, as numbers that each
    micro-batch counts anew."""
    right, traces = _right_calls(look, found), case.traces
    return traces is not None and any(
        odd.of is None and (rank, odd.call) in right
        for rank, trace in traces.ranks.items()
        for odd in odd_rows(trace, traces.single, module)
    )


def _beside(case: Case, found: FirstWrong, module: str) -> Iterator[str]:
    """By rank, the first row with what is not its own beside, and how many there are more."""
    traces = case.traces
    if traces is None:
        return
    for rank in found.ranks:
        odd = list(companions.odd_companions(traces.ranks[rank], traces.single, module))
        if odd:
            more = f", and so in {len(odd) - 1} more" if len(odd) > 1 else ""
            made = _handed_from(traces, rank, module, odd[0])
            yield f"on rank {rank} {_odd_companion(odd[0])}{more}{made}"


def _handed_from(traces: Traces, rank: int, module: str, odd: companions.Odd) -> str:
    """The line that made what is not that row's, or wrote into it last."""
    trace = traces.ranks[rank]
    held = zip(trace.entered, trace.entered_as, trace.entered_at, strict=False)
    made = next((at for of, (call, name), at in held
                 if (of, call, name) == (module, odd.call, odd.name)), ("", ""))  # fmt: skip
    return f", which was made at {line_and_code(*made)}" if made[0] else ""


def _comes_out_right(case: Case, look: Look, found: FirstWrong, module: str) -> bool:
    """Whether a row with what is not its own beside comes out right all the same: then that tells
    nothing."""
    traces = case.traces
    _, right = wrong_and_right_rows(look, found)
    return traces is not None and any(
        (rank, odd.call, odd.row) in right
        for rank, trace in traces.ranks.items()
        if as_often(trace, module, found.wrong)
        for odd in companions.odd_companions(trace, traces.single, module)
    )


def _odd_companion(odd: companions.Odd) -> str:
    row = f"row {odd.row}" + (f" of call {odd.call}" if odd.call else "")
    text = f"{row} has as {odd.told} what row {odd.of} has in the single process, and as {odd.name}"
    if odd.others:
        return (f"{text} something else than that one at {odd.others} of {odd.size} places (at "
                f"place {odd.at} {odd.now:g} where that has {odd.was:g})")  # fmt: skip
    if not odd.whose:
        return f"{text} what no row has there"
    rows = f"row{'s'[: len(odd.whose) > 1]} {spans(odd.whose)}"
    return f"{text} what {rows} ha{'ve' if len(odd.whose) > 1 else 's'} there"


def _odd_row(odd: Odd) -> str:
    row = f"row {odd.row}" + (f" of {odd.name}" if odd.name else "")
    row += f" of call {odd.call}" if odd.call else ""
    if odd.of is None:
        return f"{row} is like none"
    if odd.by:
        places = f"{abs(odd.by)} place{'s'[: abs(odd.by) > 1]} to the "
        return f"{row} is that one's row {odd.of} moved {places}{'right' if odd.by > 0 else 'left'}"
    first = f"at place {odd.at} {odd.now} where that has {odd.was}"
    return f"{row} is that one's row {odd.of} but for {odd.others} of its elements ({first})"
