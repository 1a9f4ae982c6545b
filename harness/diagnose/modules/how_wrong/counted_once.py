"""Outputs that are parts of a sum over ranks, but for what each rank has whole.

As where every strip of an image adds a term of all of it: no rank's output is the single process's,
and their sum is, with what a line gave on every rank alike counted once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from sumgrad.diagnose.modules.values.matching import match, vectors
from sumgrad.diagnose.modules.values.parts import Groups
from sumgrad.diagnose.modules.values.seen import Seen
from sumgrad.diagnose.modules.values.whole import Whole
from sumgrad.record.computed import Computation
from sumgrad.record.trace import Trace, Traces
from torch import Tensor

CLOSE = 1e-12  # of the largest number: what ranks have alike
MOST = 256  # computations of a call that are looked at


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedOnce:
    """What `line` gives, which is alike on `ranks` of an axis, is in the sum once for each."""

    axis: str
    ranks: tuple[int, ...]
    line: Computation


def counted_once(
    traces: Traces,
    found: Sequence[Seen],
    whole: Mapping[tuple[str, int], Whole],
    groups: Groups,
    tolerance: float,
) -> CountedOnce | None:
    """Of wrong outputs of one module; the first line that explains all that were seen."""
    wrong = {s.rank for s in found}
    for axis, sets in groups:
        mine = [ranks for ranks in sets if len(ranks) > 1 and wrong & {*ranks}]
        sums = [(ranks, [*_sums(traces, found, ranks)]) for ranks in mine]
        if not sums or wrong - {rank for ranks, own in sums if own for rank in ranks}:
            continue  # of some nothing is known as a sum
        every = [[*_explaining(traces, s, total, ranks, whole, tolerance)]
                 for ranks, own in sums for s, total in own]  # fmt: skip
        sites = [{c.site for c in own} for own in every]
        line = next((c for c in every[0] if all(c.site in own for own in sites)), None)
        if line is not None:
            return CountedOnce(axis=axis, ranks=tuple(mine[0]), line=line)
    return None


def _sums(
    traces: Traces, found: Sequence[Seen], ranks: Sequence[int]
) -> Iterator[tuple[Seen, Tensor]]:
    """Of each output of the first rank the sum over the ranks, where all of them gave one."""
    by_key = {(s.rank, s.call.number, s.call.part): s for s in found}
    for s in (s for s in found if s.rank == ranks[0]):
        own = [by_key.get((rank, s.call.number, s.call.part)) for rank in ranks]
        held = [traces.ranks[one.rank].output_of(one.call) for one in own if one is not None]
        if len(held) == len(ranks) and len({h.shape for h in held}) == 1:
            yield s, torch.stack(held).double().sum(0)


def _explaining(
    traces: Traces, s: Seen, total: Tensor, ranks: Sequence[int],
    whole: Mapping[tuple[str, int], Whole], tolerance: float,
) -> Iterator[Computation]:  # fmt: skip
    """The lines inside of the module with what is too often in a sum."""
    wanted = whole.get((s.call.module, s.call.part))
    own = [_inside(traces.ranks[rank], s) for rank in ranks]
    if wanted is None or len({len(one) for one in own}) > 1:
        return
    for at, c in enumerate(own[0][:MOST]):
        pairs = zip(ranks, own, strict=True)
        values = [_given(traces.ranks[rank], one[at], c) for rank, one in pairs]
        told = [v for v in values if v is not None]
        if len(told) < len(ranks) or not _are_alike(told):
            continue
        if told[0].numel() not in (1, total.numel()):
            continue
        value = told[0] if told[0].numel() == 1 else told[0].reshape(total.shape)
        rest = traces.ranks[s.rank].output_of(s.call) - value
        if _is_all(value, rest) or _is_taken_off(traces.ranks[s.rank], rest):
            continue
        where = match(vectors(total - (len(ranks) - 1) * value), wanted.outputs, tolerance)
        if where is not None and bool(where.found.any(1).all()):
            yield c


def _is_all(value: Tensor, rest: Tensor) -> bool:
    """Whether nothing is left of an output without it: then that is no part of a sum."""
    return float(rest.abs().max()) <= CLOSE * float(value.abs().max())


def _is_taken_off(trace: Trace, rest: Tensor) -> bool:
    """Whether a rank puts what is left without it into a collective: so it is meant."""
    flat = rest.reshape(-1)
    bound = CLOSE * float(flat.abs().max())
    given = [e.given.reshape(-1).double() for e in trace.exchanges if e.given.numel() == len(flat)]
    return any(float((g - flat).abs().max()) <= bound for g in given)


def _inside(trace: Trace, s: Seen) -> list[Computation]:
    """What a rank's lines computed in one call of a module, in order."""
    end = trace.calls.index(s.call)
    before = [i for i, c in enumerate(trace.calls[:end]) if c.module == s.call.module
              and c.number < s.call.number]  # fmt: skip
    start = before[-1] if before else -1
    return [c for c in trace.computed.computations
            if s.call.module in c.inside and start < c.calls <= end]  # fmt: skip


def _given(trace: Trace, c: Computation, same: Computation) -> Tensor | None:
    """What a computation gives, where it is of the same place in the code as another."""
    if c.site != same.site or len(c.gives) != 1:
        return None
    value = trace.computed.values[c.gives[0]]
    return value.double() if value.is_floating_point() and bool(value.any()) else None


def _are_alike(values: Sequence[Tensor]) -> bool:
    first = values[0]
    bound = CLOSE * float(first.abs().max())
    return all(v.shape == first.shape and float((v - first).abs().max()) <= bound for v in values)
