"""What every module of a failing step did on every rank, in the order of the single process."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from sumgrad.base.tensors import hash_weights
from sumgrad.diagnose.modules.matching import (
    SAME_FACTOR,
    Compared,
    Match,
    add_up,
    compare_gradient,
    match,
    vectors,
)
from sumgrad.diagnose.modules.paths import Paths, paths_of
from sumgrad.diagnose.modules.whole import Whole, by_module, rows_of
from sumgrad.record.trace import INTO, Call, Trace, Traces
from torch import Tensor

TOLERANCES = {"float64": 1e-8, "float32": 1e-4}
COARSE = 3e-2

State = Literal["right", "wrong", "part", "untold"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Seen:
    """One tensor of one call on one rank. forward: its output; backward: what reached it.

    where: which vectors it is, if all of them were found; wrong: those of its vectors that are not
    right, in the forward or else in the backward. rows: (n,) of the batch, -1 where they are not
    told. factors: (n,) of the gradient's vectors, and terms: (n, T) of each term's. axis: over the
    ranks of which the gradient, or else the output, adds up to the right one. shared: what all rows
    share.
    """

    rank: int
    call: Call
    shape: tuple[int, ...]
    forward: State = "untold"
    backward: State = "untold"
    where: Match | None = None
    wrong: Tensor | None = None
    rows: Tensor | None = None
    factors: Tensor | None = None
    terms: Tensor | None = None
    axis: str | None = None
    shared: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Look:
    """Modules in the order in which their outputs are there in one process, and what was seen of
    them. paths: which are made from which. terms_at: module and number of its output -> the terms
    with a gradient there. lacking: modules whose outputs are right on every rank, and that give the
    single process others besides -> how many vectors of how many."""

    modules: tuple[str, ...]
    seen: Mapping[str, Sequence[Seen]]
    sources: Mapping[str, str]
    paths: Paths
    terms: tuple[str, ...] = ()
    terms_at: Mapping[tuple[str, int], tuple[str, ...]] = field(default_factory=dict)
    lacking: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def forward(self, module: str) -> State:
        """Of all ranks and calls that are no recomputation."""
        return _worst([s.forward for s in self.seen[module] if not s.call.recomputed])

    def shared(self, module: str) -> bool:
        """Whether its output is what all rows share, and has no rows."""
        return any(s.shared for s in self.seen[module])

    def backward(self, module: str) -> State:
        """Of all ranks and calls."""
        return _worst([s.backward for s in self.seen[module]])


def _worst(states: Sequence[State]) -> State:
    for state in ("wrong", "part", "right"):
        if state in states:
            return state
    return "untold"


Groups = Sequence[tuple[str, list[tuple[int, ...]]]]


def look_at(traces: Traces, dtype: str, groups: Groups) -> Look:
    """Compare every rank's trace with the single process's.

    groups: names of axes with their groups of ranks, over which parts may add up.
    """
    tolerance = TOLERANCES.get(dtype, COARSE)
    terms = tuple(traces.single.by_term)
    every = tuple(dict.fromkeys(call.module for call in traces.single.calls))
    modules = tuple(m for m in every if not m.startswith(INTO))
    traces = terms_together(traces)
    whole = by_module(traces.single, modules.__contains__)
    seen = {m: _on_every_rank(m, traces, whole, groups, tolerance) for m in modules}
    seen = {
        m: [_unless_stage(s, seen, traces, modules) for s in found] for m, found in seen.items()
    }
    return Look(
        modules=modules,
        seen=seen,
        sources=traces.single.sources,
        paths=paths_of(modules, traces.single.takes),
        terms=terms,
        lacking={m: n for m in modules if (n := _lacking(m, seen[m], whole)) is not None},
        terms_at={
            key: tuple(t for t, g in zip(terms, held.by_term, strict=True) if bool(g.any()))
            for key, held in whole.items()
            if held.by_term is not None
        },
    )


def look_into(traces: Traces, dtype: str, groups: Groups, module: str) -> list[Seen]:
    """The same of what goes into one module: its arguments, and the gradient that they end up
    with, of all that uses them. traces: with their terms together."""
    name = f"{INTO}{module}"
    whole = by_module(traces.single, name.__eq__)
    return _on_every_rank(name, traces, whole, groups, TOLERANCES.get(dtype, COARSE))


def _on_every_rank(
    module: str, traces: Traces, whole: Mapping[tuple[str, int], Whole], groups: Groups,
    tolerance: float,
) -> list[Seen]:  # fmt: skip
    found = [
        _see(rank, trace, i, whole, tolerance)
        for rank, trace in traces.ranks.items()
        for i, call in enumerate(trace.calls)
        if call.module == module
    ]
    found = _computed_again(_without_trials(found))
    found = _with_parts(found, traces, whole, groups, tolerance)
    return _without_sums_over_rows(found, traces, whole, tolerance)


def _without_sums_over_rows(
    found: list[Seen], traces: Traces, whole: Mapping[tuple[str, int], Whole], tolerance: float
) -> list[Seen]:
    """An output that sums over the rows of a call is none of the single process's: together the
    calls of all ranks are, some of them perhaps several times."""
    out = list(found)
    for part in {s.call.part for s in found if s.forward == "wrong"}:
        mine = [i for i, s in enumerate(found) if s.forward == "wrong" and s.call.part == part]
        wanted = whole[found[mine[0]].call.module, part]
        given = [_output(traces, found[i]) for i in mine]
        if wanted.rows is not None or len(mine) < 2 or len({g.shape for g in given}) > 1:
            continue
        total = vectors(torch.stack(given).sum(0))
        for times in range(1, len(mine) + 1):
            where = match(total / times, wanted.outputs, tolerance)
            if where is not None and bool(where.found.any(1).all()):
                for i in mine:
                    out[i] = replace(found[i], forward="untold", backward="untold", wrong=None)
                break
    return out


def _output(traces: Traces, seen: Seen) -> Tensor:
    trace = traces.ranks[seen.rank]
    return trace.outputs[trace.calls.index(seen.call)]


def _lacking(
    module: str, seen: Sequence[Seen], whole: Mapping[tuple[str, int], Whole]
) -> tuple[int, int] | None:
    """Of the vectors of its first output, how many no rank has; None where that cannot be told.

    Vectors without a gradient, in a call that has some, are masked out: nobody needs them.
    """
    wanted, mine = whole.get((module, 0)), [s for s in seen if s.call.part == 0]
    if wanted is None or not mine or any(s.forward != "right" or s.where is None for s in mine):
        return None
    held = torch.zeros(len(wanted.outputs), dtype=torch.bool)
    for s in mine:
        assert s.where is not None
        if len(s.where.picked) < math.prod(s.shape[:-1]) or s.where.found.shape[1] != len(held):
            return None  # some of its vectors were drawn
        held |= s.where.found.any(0)
    used = torch.cat([
        own if bool(own.any()) else torch.ones_like(own)
        for own in wanted.gradients.any(1).split(wanted.each or len(held))
    ])  # fmt: skip
    lacks = int((used & ~held).sum())
    return (lacks, int(used.sum())) if lacks else None


def _unless_stage(
    s: Seen, seen: Mapping[str, Sequence[Seen]], traces: Traces, modules: Sequence[str]
) -> Seen:
    """Of a stage of a pipeline nothing is told by the output of the model that it is cut from: it
    is that of its last layer, and what follows is on another rank."""
    if s.forward != "wrong":
        return s
    trace = traces.ranks[s.rank]
    mine = trace.outputs[trace.calls.index(s.call)]
    called = {call.module for call in trace.calls}
    inside = [m for m in modules if m != s.call.module and _is_inside(m, s.call.module)]
    for i, module in enumerate(inside):
        lacking = set(inside[i + 1 :]) - called
        for other in seen[module] if lacking else ():
            theirs = trace.outputs[trace.calls.index(other.call)] if other.rank == s.rank else None
            if other.forward == "right" and theirs is not None and torch.equal(mine, theirs):
                return replace(s, forward="untold", backward="untold", wrong=None)
    return s


def _is_inside(module: str, outer: str) -> bool:
    return not outer or module.startswith(f"{outer}.")


def terms_together(traces: Traces) -> Traces:
    """Of a loss of several terms, the ranks' calls that each term made as one."""
    if len(traces.single.by_term) < 2:
        return traces
    ranks = {rank: _terms_together(trace) for rank, trace in traces.ranks.items()}
    return replace(traces, ranks=ranks)


def _terms_together(trace: Trace) -> Trace:
    """Calls that gave the same, one for each term, as one call: with the sum of their gradients.

    Not of zeros, which other rows give, too.
    """
    kept: dict[tuple[object, ...], int] = {}
    calls: list[Call] = []
    outputs: list[Tensor] = []
    gradients: list[Tensor | None] = []
    for call, output, gradient in zip(trace.calls, trace.outputs, trace.gradients, strict=True):
        key = (call.module, call.part, call.recomputed, output.shape, hash_weights({"": output}))
        telling = bool(output.any())
        at = kept.setdefault(key, len(calls)) if telling else len(calls)
        if at == len(calls):
            calls.append(call)
            outputs.append(output)
            gradients.append(gradient)
        elif gradient is not None:
            before = gradients[at]
            gradients[at] = gradient if before is None else before + gradient
            if calls[at].operation_back is None:
                calls[at] = replace(calls[at], operation_back=call.operation_back)
    return replace(trace, calls=tuple(calls), outputs=tuple(outputs), gradients=tuple(gradients))


def _computed_again(found: list[Seen]) -> list[Seen]:
    """A call that no gradient reached is none that lost it, where the rank computed the same again
    and that got it."""
    reached = [s for s in found if s.where is not None and s.call.operation_back is not None]

    def again(s: Seen) -> bool:
        return any(
            other.rank == s.rank
            and other.where is not None
            and s.where is not None
            and torch.equal(other.where.found, s.where.found)
            for other in reached
        )

    lost = [s.backward == "wrong" and s.call.operation_back is None for s in found]
    return [
        replace(s, backward="untold") if gone and again(s) else s
        for s, gone in zip(found, lost, strict=True)
    ]


def _without_trials(found: list[Seen]) -> list[Seen]:
    """Without calls that are not right and got no gradient, where the rank has right ones.

    A pipeline finds the shapes of its stages by them.
    """
    right = {s.rank for s in found if s.forward == "right"}
    return [
        s
        for s in found
        if s.forward == "right"
        or s.call.recomputed
        or s.call.operation_back is not None
        or s.backward == "wrong"
        or s.rank not in right
    ]


def _see(
    rank: int, trace: Trace, i: int, whole: Mapping[tuple[str, int], Whole], tolerance: float
) -> Seen:
    call, output, gradient = trace.calls[i], trace.outputs[i], trace.gradients[i]
    seen = Seen(rank=rank, call=call, shape=tuple(output.shape))
    if call.module in trace.left_out:
        return seen
    wanted, got = whole.get((call.module, call.part)), vectors(output)
    where = None if wanted is None else match(got, wanted.outputs, tolerance)
    if where is None or wanted is None:
        return seen
    if not bool(where.here.all()):
        if _is_beside_the_loss(call, whole):
            return seen
        lost = (
            gradient is None and _got_elsewhere(trace, call) and bool(wanted.gradients.any(1).all())
        )
        if not lost and not seen.shape:
            return seen  # one number is no slice of another: a loss of fewer rows, a mean
        wrong = None if lost else where.picked[~where.here]
        back: State = "wrong" if lost else "untold"
        return replace(seen, forward="wrong", backward=back, wrong=wrong)
    if not bool(where.found.any()):
        return seen  # zeros may be padding, and may be what is left of anything
    rows = None if wanted.rows is None else rows_of(where, wanted.rows, seen.shape[0])
    shared = wanted.rows is None and len(got) <= wanted.each and not wanted.flat
    seen = replace(seen, forward="right", where=where, rows=rows, shared=shared)
    if call.recomputed and gradient is None:
        return seen
    if gradient is None:
        return replace(seen, backward="wrong" if _is_needed(where, wanted) else "untold")
    found = compare_gradient(vectors(gradient), wanted.gradients, where, tolerance, wanted.by_term)
    if not bool(found.right.all()):
        # What all rows share has the gradient of them all; a rank has that of its own.
        state: State = "untold" if seen.shared else "wrong"
        factors = found.factors.masked_fill(~found.right, float("nan"))
        return replace(seen, backward=state, wrong=where.picked[~found.right], factors=factors)
    telling = wanted.directions > max(1, found.terms.shape[1]) or _one_factor(found)
    mixed = bool((found.factors.isnan() & ~found.terms.isnan().all(1)).any())
    return replace(
        seen,
        backward="right" if telling else "untold",
        factors=found.factors if telling and not mixed else None,
        terms=found.terms if telling and found.terms.shape[1] else None,
    )


def _got_elsewhere(trace: Trace, call: Call) -> bool:
    """Whether another part of the same call's output got a gradient."""
    return not call.recomputed and any(
        (other.module, other.number) == (call.module, call.number)
        and other.part != call.part
        and gradient is not None
        for other, gradient in zip(trace.calls, trace.gradients, strict=True)
    )


def _one_factor(found: Compared) -> bool:
    """Of all vectors, or for each term: one number would have fitted few of them by chance."""
    if constant(found.factors) is not None:
        return True
    told = [own[~own.isnan()] for own in found.terms.unbind(1)]
    return bool(told) and all(len(own) and constant(own) is not None for own in told)


def _is_beside_the_loss(call: Call, whole: Mapping[tuple[str, int], Whole]) -> bool:
    """Whether no gradient reaches this part of an output and one does reach another, as of a state
    that is handed on."""
    live = {part: bool(held.gradients.any()) for (m, part), held in whole.items()
            if m == call.module}  # fmt: skip
    return any(live.values()) and not live.get(call.part, False)


def _is_needed(where: Match, wanted: Whole) -> bool:
    """Whether some gradient reaches these vectors in one process."""
    held = where.found.any(0)
    return bool(wanted.gradients[held].any())


def constant(factors: Tensor | None) -> float | None:
    """The one factor of all vectors that tell one."""
    if factors is None:
        return None
    told = factors[~factors.isnan()]
    if not len(told) or float((told - told[0]).abs().max()) > SAME_FACTOR * float(told[0].abs()):
        return None
    return float(told[0])


def _with_parts(
    found: list[Seen],
    traces: Traces,
    whole: Mapping[tuple[str, int], Whole],
    groups: Groups,
    tolerance: float,
) -> list[Seen]:
    """What is wrong by itself and right summed over the ranks of an axis is a part."""
    out = list(found)
    place = {_key(s.rank, s): i for i, s in enumerate(found)}
    for axis, sets in groups:
        for ranks in sets:
            for s in found:
                mine = [place.get(_key(rank, s), -1) for rank in ranks]
                if s.rank != ranks[0] or -1 in mine:
                    continue
                for held in ([found[j] for j in mine], *_same_slices([found[j] for j in mine])):
                    if not any(_may_be_part(x) for x in held):
                        continue
                    if all(out[place[_key(x.rank, x)]] is not x for x in held):
                        continue  # it is whole over a smaller axis already
                    if _adds_up(held, traces, whole, tolerance):
                        few = (
                            "" if len(held) == len(mine) else ", of ranks with the same part of it"
                        )
                        for x in held:
                            out[place[_key(x.rank, x)]] = _as_part(x, f"{axis}{few}")
                        if len(held) == len(mine):
                            break
    return out


def _same_slices(found: Sequence[Seen]) -> list[list[Seen]]:
    """Those of an axis that hold the same vectors, as ranks that share a head do; of several."""
    alike: list[list[Seen]] = []
    for s in found:
        for others in alike:
            known = others[0].where
            if (
                s.where is not None
                and known is not None
                and s.where.columns == known.columns
                and (torch.equal(s.where.found, known.found))
            ):
                others.append(s)
                break
        else:
            alike.append([s])
    return [held for held in alike if 1 < len(held) < len(found)]


def _may_be_part(s: Seen) -> bool:
    """What is wrong by itself, or right in some of its vectors and nothing in others."""
    if "wrong" in (s.forward, s.backward):
        return True
    told = None if s.factors is None else s.factors[~s.factors.isnan()]
    return s.backward == "right" and told is not None and bool((told == 0).any() & told.any())


def _key(rank: int, s: Seen) -> tuple[int, int, int, bool]:
    return rank, s.call.number, s.call.part, s.call.recomputed


def _as_part(s: Seen, axis: str) -> Seen:
    if s.forward == "wrong":
        return replace(s, forward="part", axis=axis)
    return replace(s, backward="part", axis=axis)


def _adds_up(
    mine: Sequence[Seen], traces: Traces, whole: Mapping[tuple[str, int], Whole], tolerance: float
) -> bool:
    wanted = whole.get((mine[0].call.module, mine[0].call.part))
    if wanted is None or len({s.shape for s in mine}) != 1:
        return False
    held = [(traces.ranks[s.rank], traces.ranks[s.rank].calls.index(s.call)) for s in mine]
    if any(s.forward == "wrong" for s in mine):
        total = torch.stack([vectors(t.outputs[i]) for t, i in held]).sum(0)
        found = match(total, wanted.outputs, tolerance)
        return found is not None and bool(found.here.all()) and bool(found.found.any())
    parts = [t.gradients[i] for t, i in held]
    if any(p is None for p in parts) or any(s.where is None for s in mine):
        return False
    first = mine[0].where
    assert first is not None
    same = all(s.where is not None and torch.equal(s.where.found, first.found) for s in mine)
    if not any(s.backward == "wrong" for s in mine) and len({str(s.factors) for s in mine}) < 2:
        return False  # the same lack on all of them
    known = [vectors(p) for p in parts if p is not None]
    return same and add_up(known, wanted.gradients, first, tolerance)
