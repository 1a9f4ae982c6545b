"""Whose rows: which the ranks read, how often, and what goes through the modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch
from sumgrad.base.outcome import some_of, spans
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.looked import (
    as_a_hint,
    line_and_code,
    line_in_its_function,
    looked_by_rows,
    named,
    predicts,
)
from sumgrad.diagnose.explainers.of_factors.factors import explained, in_the_gradients
from sumgrad.diagnose.explanation import Explanation, Left
from sumgrad.diagnose.modules.in_code.parted import where_ranks_part
from sumgrad.diagnose.modules.inputs.rows_read import calls_of_rows, rows_read, rows_through
from sumgrad.diagnose.modules.where.look import Look
from sumgrad.diagnose.modules.where.loss_weights import same, shares_at_the_loss
from sumgrad.diagnose.names import axis_groups
from sumgrad.diagnose.own_gradients import add_up_evenly
from sumgrad.record.trace import Traces

MOST_RANKS = 3  # that are written out
ROWS_ARE_TOLD = "which rows each rank has is told at"
MOST_WORDS = 24  # characters of what a line takes


def rows_not_read_once(case: Case, left: Left) -> Iterator[Explanation]:
    """Rows that go through the modules more often than others, or never, and that this is all."""
    found = uneven_rows(case)
    if found is not None and found[1]:
        yield explained(case, found[0])


def rows_read_unevenly(case: Case, left: Left) -> Iterator[Explanation]:
    """The same where it may not be all that is wrong."""
    found = uneven_rows(case)
    if found is not None:
        yield explained(case, found[0])


def uneven_rows(case: Case) -> tuple[Diagnosis, bool] | None:
    """The cause, and whether rows counted so often are the measured gradient."""
    look, traces = looked_by_rows(case), case.traces
    num_rows = case.record.spec.facts.num_rows if case.record.spec.facts else 0
    if look is None or traces is None:
        return None
    read = rows_read(traces)
    found = [(None, read)] if read else []
    found += list(rows_through(look).items())  # type: ignore[arg-type]
    even = None
    for module, by_rank in found:
        assert by_rank is not None
        times = [sum(own[row] for own in by_rank.values()) for row in range(num_rows)]
        if len(set(times)) == 1:
            even = module
            continue
        usual = _usual(times)
        words = _uneven(times, usual, by_rank)
        weights = torch.tensor(times, dtype=torch.float64)
        proved = predicts(case, weights)
        if not proved and (_count_alike(look, num_rows) or add_up_evenly(case)):
            continue  # as where a rank without rows takes one and weighs it with nought
        if not proved and not module and _is_even(rows_read(traces, counted=True), num_rows):
            continue  # what is read once more is for a log, say: no gradient comes of it
        where = f"{named(look, module)} on each rank" if module else "the modules"
        first = "" if module or proved else _first_entered(traces)
        of = f"of what enters {named(look, first)}, " if first else ""
        because = [f"{of}{_who_reads(by_rank)}"]
        if module and even is not None:
            because.append(f"at {named(look, even)} every row is there as often as others")
        because.append("rows counted so often are the measured gradient, up to one factor" if proved
                       else "whether this alone is the measured gradient is not known")  # fmt: skip
        because += _where_they_enter(traces, by_rank)
        because += [] if module else _where_ranks_part(traces)
        because += [] if module else _in_which_calls(traces, by_rank)
        cause = f"not every row goes through {where} once: {words}"
        if not module:
            cause = f"{of}the ranks do not read every row once: {words}"
        return (
            Diagnosis(
                cause=cause,
                kind="rows_read",
                standing="proved" if proved else "likely",
                ranks=tuple(sorted(by_rank)),
                because=(*because, *(() if proved else in_the_gradients(case))),
            ),
            proved,
        )
    return None


def _first_entered(traces: Traces) -> str:
    """The module that rows enter first on all ranks; nothing where it is the model itself, whose
    inputs a step may use beside it."""
    firsts = {trace.entered[0] for trace in traces.ranks.values() if trace.entered}
    return firsts.pop() if len(firsts) == 1 else ""


def _is_even(found: Mapping[int, Counter[int]] | None, num_rows: int) -> bool:
    if found is None:
        return False
    return len({sum(own[row] for own in found.values()) for row in range(num_rows)}) == 1


def _count_alike(look: Look, num_rows: int) -> bool:
    """Whether all rows have one factor in what reaches the last module, over ranks and calls."""
    found = shares_at_the_loss(look)
    if found is None or any(f is None for s in found[1] for f in s.by_row.values()):
        return False
    totals = [0.0] * num_rows
    for row, factor in (pair for s in found[1] for pair in s.by_row.items()):
        totals[row] += factor or 0.0
    return bool(num_rows) and same(totals)


@as_a_hint
def _where_they_enter(traces: Traces, by_rank: Mapping[int, Counter[int]]) -> list[str]:
    """The one line that made what enters the first module, on the ranks that have rows."""
    entered = {
        (module, made)
        for rank, own in by_rank.items()
        for module, made in zip(
            traces.ranks[rank].entered, traces.ranks[rank].entered_at, strict=False
        )
        if own and module == traces.ranks[rank].entered[0]
    }
    (module, made), *others = sorted(entered) or [("", ("", ""))]
    if others or not made[0]:
        return []
    return [f"what enters {module or 'the model'} was made at {line_and_code(*made)}"]


@as_a_hint
def _where_ranks_part(traces: Traces) -> list[str]:
    """The line from which on each rank has rows of its own, and what it takes there."""
    found = where_ranks_part(traces)
    if found is None:
        return []
    shown = [f"{words[:MOST_WORDS]} on rank {rank}" for rank, words in found.words.items()]
    taken = f": {some_of(shown)}" if shown else ""
    where = line_in_its_function(*found.line, found.within)
    return [f"{ROWS_ARE_TOLD} {where}, of what is the same on all of them{taken}"]


@as_a_hint
def _in_which_calls(traces: Traces, by_rank: Mapping[int, Counter[int]]) -> list[str]:
    """Of ranks that read rows more than once, in which calls each time."""
    told, every = [], calls_of_rows(traces)
    for rank, own in by_rank.items():
        calls, often = every.get(rank, {}), max(own.values(), default=0)
        alike: dict[tuple[int, ...], list[int]] = {}
        for row in (row for row, n in own.items() if n == often > 1):
            alike.setdefault(tuple(sorted(calls[row])), []).append(row)
        shown = [f"rows {spans(sorted(rows))} in calls {spans(list(at))}"
                 for at, rows in alike.items() if len(at) > 1]  # fmt: skip
        told += [f"rank {rank} takes {', '.join(shown)}"] if shown else []
    return ["; ".join(told[:MOST_RANKS])] if told else []


def _usual(times: Sequence[int]) -> int:
    """How often most rows are there; where all others are whole multiples of the fewest, these."""
    told = {*times} - {0}
    fewest = min(told)
    if all(n % fewest == 0 for n in told):
        return fewest
    return max(told, key=times.count)


def _uneven(times: Sequence[int], usual: int, by_rank: Mapping[int, Counter[int]]) -> str:
    words = []
    for number in sorted(set(times) - {usual}):
        rows = [row for row, n in enumerate(times) if n == number]
        by = [rank for rank, own in by_rank.items() if any(own[row] for row in rows)]
        often = "never" if not number else f"{number / usual:g} times as often as others"
        words.append(f"rows {spans(rows)} {often}" + (f" (rank {spans(by)})" if number else ""))
    return ", ".join(words)


def reading(case: Case) -> list[str]:
    """Who reads which rows, where ranks differ in it."""
    found = rows_read(case.traces) if case.traces else None
    if found is None or len({tuple(sorted(own)) for own in found.values()}) < 2:
        return []
    often = sum(found.values(), Counter[int]())
    odd = len(set(often.values())) > 1
    return [*([_who_reads(found)] if odd else []), *_along_axes(case, found)]


def _along_axes(case: Case, found: Mapping[int, Counter[int]]) -> list[str]:
    """Along which axes ranks read the same rows, and along which others."""
    alike: list[str] = []
    other: list[str] = []
    groups = axis_groups(case)
    pools = {pool.name for pool in case.record.spec.topology.pools if len(pool.axes) > 1}
    for axis, sets in groups if len(groups) > 1 else ():
        if axis in pools:
            continue  # it holds all of its axes
        held = [{tuple(sorted(found[r])) for r in ranks if r in found} for ranks in sets]
        (alike if all(len(rows) < 2 for rows in held) else other).append(axis)
    text = f"ranks along {some_of(other)} read different rows" if other else ""
    return [text + (f", ranks along {some_of(alike)} the same" if alike else "")] if other else []


def _who_reads(found: Mapping[int, Counter[int]]) -> str:
    by_rows: dict[str, list[int]] = {}
    for rank, own in found.items():
        by_rows.setdefault(spans(sorted(own)) or "none", []).append(rank)
    return "; ".join(f"rank {spans(ranks)} reads rows {rows}" for rows, ranks in by_rows.items())
