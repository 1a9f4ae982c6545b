"""Reductions of gradients by value: what they were given and gave, beside what a parameter has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from sumgrad.base.outcome import some_of, spans
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.of_factors.factors import explained
from sumgrad.diagnose.explanation import Explanation, Left
from sumgrad.diagnose.modules.over_ranks.collectives import (
    Collective,
    collectives,
    in_words,
    mixed_with,
    segment_of,
    untouched,
)
from sumgrad.judge.cells import Cell
from sumgrad.record.trace import Traces
from torch import Tensor

CLOSE = 1e-9  # of the largest element: the same number, added up in another order
MOST = 200  # reductions of a rank that are looked at
KINDS = {
    "unused_result": "the result of {op} is right and is not used: {names} {have} what the rank "
    "had itself",
    "missing_wait": "the result of {op} is read too early: a part of {names} is what the rank had "
    "itself",
    "double_reduction": "the result of {op} is counted {times} times in {names}",
    "summed_again": "what the ranks put into {op} for {names} is summed already: it is counted "
    "{times} times",
    "lost_contribution": "rank {ranks} puts zeros into {op} in place of its gradient of {names}",
    "stale_buffer": "rank {ranks} puts into {op}, on top of its gradient of {names}, what it put "
    "in there in the step before: a buffer is not zeroed",
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Told:
    """What one reduction does wrong to one gradient. who: the ranks that put in what is wrong, or
    that hold it."""

    kind: str
    op: Collective
    cell: Cell
    who: tuple[int, ...]


def reductions_by_value(case: Case, left: Left) -> Iterator[Explanation]:
    """Of every wrong gradient one and the same reduction that does the same wrong."""
    traces = case.traces
    if traces is None or case.has_plan:
        return
    found = []
    for cell in case.failing_cells:
        if cell.measured.numel() < 2:
            continue  # one number is like many
        try:
            told = _of_cell(traces, cell)
        except (RuntimeError, ValueError, LookupError):
            return  # tensors of shapes that nobody thought of
        if told is None:
            return
        found.append(told)
    kind = _one_kind({one.kind for one in found})
    if kind is not None:
        yield explained(case, _in_words(case, kind, found))


def _one_kind(kinds: set[str]) -> str | None:
    """Of what is read too early some is all that was there before."""
    if kinds == {"unused_result", "missing_wait"}:
        return "missing_wait"
    return next(iter(kinds)) if len(kinds) == 1 else None


def _in_words(case: Case, kind: str, found: Sequence[_Told]) -> Diagnosis:
    first = found[0]
    names = list(dict.fromkeys(one.cell.name for one in found))
    ranks = tuple(sorted({rank for one in found for rank in one.who}))
    ops = list(dict.fromkeys(in_words(case.record, one.op) for one in found))
    cause = KINDS[kind].format(
        op=some_of(ops),
        names=some_of(names),
        have="has" if len(names) == 1 else "have",
        times=len(first.op.ranks),
        ranks=spans(ranks),
    )
    right = {
        "lost_contribution": "with what these ranks should put in it gives the right gradient",
        "stale_buffer": "without that it gives the right gradient",
        "summed_again": "each puts in the right gradient, which a reduction before it gave",
    }.get(kind, "with what it gives in its place the gradient is the right one")
    return Diagnosis(
        cause=cause,
        kind="double_reduction" if kind == "summed_again" else kind,
        standing="proved",
        ranks=ranks,
        because=(f"the values that went into it and came out were kept: {right}",),
    )


def _of_cell(traces: Traces, cell: Cell) -> _Told | None:
    """What the last reduction that tells does to this gradient."""
    trace = traces.ranks.get(cell.rank)
    if trace is None:
        return None
    issued = [j for j in collectives(traces, cell.rank, 0, len(trace.events)) if j.is_sum][-MOST:]
    for i, op in reversed(list(enumerate(issued))):
        told = (
            _result_of(op, issued[:i], cell)
            or _summed_again(op, issued[:i], cell)
            or _given_to(traces, op, cell)
        )
        if told is not None:
            return told
    return None


def _result_of(op: Collective, earlier: Sequence[Collective], cell: Cell) -> _Told | None:
    """The result is right, and the parameter has something else."""
    one, own = op.own, untouched(op)
    wanted, has = cell.wanted.value.reshape(-1), cell.measured.reshape(-1)
    if one.got is None or own is None or _same(has, wanted):
        return None
    got = one.got.double().reshape(-1)
    for factor in (1.0, 1 / len(op.ranks)):  # an average may be taken after it
        at = segment_of(got * factor, wanted, CLOSE)
        if at is None:
            continue
        mine = own[at : at + len(wanted)] * factor
        found = mixed_with(has, wanted, mine, CLOSE)
        if found:
            whole = found >= int((~_close(mine, wanted)).sum())
            kind = "unused_result" if whole else "missing_wait"
            return _Told(kind=kind, op=op, cell=cell, who=(cell.rank,))
        again = any(torch.equal(e.own.given, one.given) for e in earlier[-1:])
        if factor == 1 and again and _same(has, wanted * len(op.ranks)):
            return _Told(kind="double_reduction", op=op, cell=cell, who=op.ranks)
    return None


def _summed_again(op: Collective, earlier: Sequence[Collective], cell: Cell) -> _Told | None:
    """All its ranks put in the right gradient, which a sum before it gave, and have as many of it
    as there are ranks."""
    given, times = op.given(op.ranks), len(op.ranks)
    wanted, has = cell.wanted.value.reshape(-1), cell.measured.reshape(-1)
    if op.family != "allreduce" or op.event.get("reduce") != "SUM" or given is None:
        return None
    at = segment_of(given[0], wanted, CLOSE)
    if at is None or not _same(has, times * wanted):
        return None
    if not all(_same(held[at : at + len(wanted)], wanted) for held in given):
        return None
    results = (e.own.got for e in earlier)
    if not any(got is not None and segment_of(got.double().reshape(-1), wanted, CLOSE) is not None
               for got in results):  # fmt: skip
        return None
    return _Told(kind="summed_again", op=op, cell=cell, who=op.ranks)


def _given_to(traces: Traces, op: Collective, cell: Cell) -> _Told | None:
    """Ranks that put in something else than they should: what their own backwards gave, or what a
    reduction before this one did. With that put right the parameter has the right gradient."""
    got = op.own.got
    if op.family != "allreduce" or got is None:
        return None
    wanted, has = cell.wanted.value.reshape(-1), cell.measured.reshape(-1)
    at = segment_of(got.double().reshape(-1), has, CLOSE)
    given = None if at is None else op.given(op.ranks)
    if at is None or given is None:
        return None
    here = slice(at, at + len(wanted))
    actual = {rank: held[here] for rank, held in zip(op.ranks, given, strict=True)}
    owns = {rank: _own(traces, rank, cell) for rank in op.ranks}
    if all(own is not None for own in owns.values()):
        expected = {rank: own for rank, own in owns.items() if own is not None}
        told = _deviating(op, cell, expected, actual, here)
        if told is not None:
            kind, who = told
            return _Told(kind=kind, op=op, cell=cell, who=who)
    before = {rank: _just_before(traces, op, rank, len(given[0])) for rank in op.ranks}
    results = {rank: one.own.got.double().reshape(-1) for rank, one in before.items()
               if one is not None and one.own.got is not None}  # fmt: skip
    mine = before[cell.rank]
    if mine is None or [len(results.get(r, ())) for r in op.ranks] != [len(t) for t in given]:
        return None
    expected = {rank: held[here] for rank, held in results.items()}
    inputs = {rank: held[here] for rank, one in before.items()
              if one is not None and (held := untouched(one)) is not None}  # fmt: skip
    told = _deviating(op, cell, expected, actual, here, inputs, len(mine.ranks))
    if told is None:
        return None
    kind, who = told
    ours = kind in ("lost_contribution", "stale_buffer")
    return _Told(kind=kind, op=op if ours else mine, cell=cell, who=who)


def _just_before(traces: Traces, op: Collective, rank: int, size: int) -> Collective | None:
    """The last reduction of a rank before this one that gave as much."""
    if rank not in op.by_rank:
        return None
    issued = collectives(traces, rank, 0, op.by_rank[rank].number)
    for one in reversed(issued):
        got = one.own.got if one.is_sum else None
        if got is not None and got.numel() == size:
            return one
    return None


def _deviating(
    op: Collective,
    cell: Cell,
    expected: Mapping[int, Tensor],
    actual: Mapping[int, Tensor],
    here: slice,
    inputs: Mapping[int, Tensor] | None = None,
    times: int = 1,
) -> tuple[str, tuple[int, ...]] | None:
    """Which ranks put in something else than what is expected, and in which way: all in one, and
    nothing else is wrong. inputs: what a rank has where an earlier reduction, over so many ranks,
    whose result is expected, has not come.
    """
    wanted, has = cell.wanted.value.reshape(-1), cell.measured.reshape(-1)
    kinds: dict[int, str] = {}
    change = torch.zeros_like(wanted)
    for rank, right in expected.items():
        mine, before = actual[rank], op.by_rank[rank].before
        if _same(mine, right):
            continue
        change += right - mine
        old = None if before is None else before.double().reshape(-1)[here]
        if not bool(mine.any()):
            kinds[rank] = "lost_contribution"
        elif old is not None and bool(old.any()) and _same(mine, right + old):
            kinds[rank] = "stale_buffer"
        elif times > 1 and _same(mine, right * times):
            kinds[rank] = "double_reduction"
        elif inputs is not None and rank in inputs and _same(mine, inputs[rank]):
            kinds[rank] = "unused_result"
        elif inputs is not None and rank in inputs and mixed_with(mine, right, inputs[rank], CLOSE):
            kinds[rank] = "missing_wait"
        else:
            return None
    kind = _one_kind({*kinds.values()})
    return (kind, tuple(kinds)) if kind is not None and _same(has + change, wanted) else None


def _own(traces: Traces, rank: int, cell: Cell) -> Tensor | None:
    """What a rank's own backwards gave a parameter that it has whole, as one dimension."""
    trace = traces.ranks.get(rank)
    held = None if trace is None else trace.own.get(cell.name)
    if held is None or cell.index is not None or held.shape[-1] != cell.measured.numel():
        return None
    return held.double().sum(0)


def _close(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).abs() <= CLOSE * float(b.abs().max())


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(_close(a, b).all())
