"""What every module of a failing step did on every rank, in the order of the single process."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from sumgrad.base.tensors import hash_weights
from sumgrad.diagnose.modules.values.parts import Groups, with_parts, without_sums_over_rows
from sumgrad.diagnose.modules.values.seen import COARSE, TOLERANCES, Seen, State, see
from sumgrad.diagnose.modules.values.whole import Whole, by_module
from sumgrad.diagnose.modules.where.over_all import (
    with_sums_over_all,
    with_vectors_of_several_calls,
)
from sumgrad.diagnose.modules.where.paths import Paths, paths_of
from sumgrad.diagnose.modules.where.together import with_rows_of_others
from sumgrad.diagnose.modules.where.used_inside import unless_used_inside
from sumgrad.record.trace import INTO, Call, Trace, Traces
from torch import Tensor

NOTHING = "Identity"  # torch's own
ELSEWHERE = ", in the single process "


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Look:
    """Modules in the order in which their outputs are there in one process, and what was seen of
    them. paths: which are made from which. terms_at: module and number of its output -> the terms
    with a gradient there. lacking: modules whose outputs are right on every rank, and that give the
    single process others besides. sources: by module, its class and line, as it is on the
    ranks and then in the single process where its forward is another there."""

    modules: tuple[str, ...]
    seen: Mapping[str, Sequence[Seen]]
    sources: Mapping[str, str]
    paths: Paths
    terms: tuple[str, ...] = ()
    terms_at: Mapping[tuple[str, int], tuple[str, ...]] = field(default_factory=dict)
    lacking: tuple[str, ...] = ()

    def forward(self, module: str) -> State:
        """Of all ranks and calls that are no recomputation."""
        return _worst([s.forward for s in self.seen[module] if not s.call.recomputed])

    def shared(self, module: str) -> bool:
        """Whether its output is what all rows share, and has no rows."""
        return any(s.shared for s in self.seen[module])

    def backward(self, module: str) -> State:
        """Of all ranks and calls."""
        state = _worst([s.backward for s in self.seen[module]])
        shifted = any(s.shifted for s in self.seen[module])
        return "untold" if shifted and state == "right" else state


def _worst(states: Sequence[State]) -> State:
    for state in ("wrong", "part", "right"):
        if state in states:
            return state
    return "untold"


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
        m: [unless_used_inside(_unless_stage(s, seen, traces, modules), traces) for s in found]
        for m, found in seen.items()
    }
    seen = {m: _unless_not_used(found) for m, found in seen.items()}
    paths = paths_of(modules, traces.single.takes)
    seen = with_rows_of_others(seen, traces, whole, paths)
    seen = with_vectors_of_several_calls(seen, traces, whole, tolerance)
    seen = with_sums_over_all(seen, traces, whole, tolerance)
    return Look(
        modules=modules,
        seen=seen,
        sources=_sources(traces),
        paths=paths,
        terms=terms,
        lacking=tuple(m for m in modules if _is_lacking(m, seen[m], whole)),
        terms_at={
            key: tuple(t for t, g in zip(terms, held.by_term, strict=True) if bool(g.any()))
            for key, held in whole.items()
            if held.by_term is not None
        },
    )


def _sources(traces: Traces) -> dict[str, str]:
    out = {**traces.single.sources}
    for module, there in out.items():
        here = {t.sources[module] for t in traces.ranks.values() if module in t.sources}
        one = here.pop() if len(here) == 1 else ""
        if " at " in one and one.rpartition(" at ")[2] != there.rpartition(" at ")[2]:
            out[module] = f"{one}{ELSEWHERE}{there}"
    return out


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
        see(rank, trace, i, whole, tolerance)
        for rank, trace in traces.ranks.items()
        if not _only_stands_there(module, trace, traces.single)
        for i, call in enumerate(trace.calls)
        if call.module == module
    ]
    found = _computed_again(_without_trials(found), whole)
    found = with_parts(found, traces, whole, groups, tolerance)
    return without_sums_over_rows(found, traces, whole, tolerance)


def _only_stands_there(module: str, trace: Trace, single: Trace) -> bool:
    """Whether a rank has nothing in the place of a module, as a stage of a pipeline has of those
    before it and behind it: not amid what it has."""
    if not trace.classes.get(module) == NOTHING != single.classes.get(module, NOTHING):
        return False
    order = {m: i for i, m in enumerate(dict.fromkeys(c.module for c in single.calls))}
    has = {c.module for c in trace.calls if trace.classes.get(c.module, NOTHING) != NOTHING}
    beside = [order[m] for m in has if m in order and not _is_inside(module, m)]
    return not beside or not min(beside) < order[module] < max(beside)


def _is_lacking(module: str, seen: Sequence[Seen], whole: Mapping[tuple[str, int], Whole]) -> bool:
    """Whether no rank has some vectors of its first output; False where that cannot be told.

    Vectors without a gradient, of a module that has some, are masked out: nobody needs them, but
    for a call of which no rank has anything.
    """
    wanted, mine = whole.get((module, 0)), [s for s in seen if s.call.part == 0]
    if wanted is None or not mine or any(s.forward != "right" or s.where is None for s in mine):
        return False
    held = torch.zeros(len(wanted.outputs), dtype=torch.bool)
    for s in mine:
        assert s.where is not None
        if len(s.where.picked) < math.prod(s.shape[:-1]) or s.where.found.shape[1] != len(held):
            return False  # some of its vectors were drawn
        held |= s.where.found.any(0)
    used = wanted.gradients.any(1)
    if not bool(used.any()):
        used = torch.ones_like(used)
    each = wanted.each or len(held)
    for own, mine_of_it in zip(used.split(each), held.split(each), strict=True):
        if not bool(own.any() | mine_of_it.any()):
            return True  # a whole pass
    return bool((used & ~held).any())


def _unless_not_used(found: Sequence[Seen]) -> list[Seen]:
    """Of several outputs, nothing is told by those that no gradient reaches on any rank, where one
    reaches others: as of a loss that a model gives besides, and the step computes itself."""
    reached = {s.call.part for s in found if s.call.operation_back is not None}
    return [
        replace(s, forward="untold", wrong=None)
        if reached and s.call.part not in reached and s.forward == "wrong"
        else s
        for s in found
    ]


def _unless_stage(
    s: Seen, seen: Mapping[str, Sequence[Seen]], traces: Traces, modules: Sequence[str]
) -> Seen:
    """Of a stage of a pipeline nothing is told by the output of the model that it is cut from: it
    is that of its last layer, or what it has so far, and what follows is on another rank."""
    if s.forward != "wrong":
        return s
    if not s.call.module and _goes_on_elsewhere(s.rank, traces, modules):
        return replace(s, forward="untold", backward="untold", wrong=None)
    trace = traces.ranks[s.rank]
    mine = trace.output_of(s.call)
    called = {call.module for call in trace.calls}
    inside = [m for m in modules if m != s.call.module and _is_inside(m, s.call.module)]
    for i, module in enumerate(inside):
        lacking = set(inside[i + 1 :]) - called
        for other in seen[module] if lacking else ():
            theirs = trace.output_of(other.call) if other.rank == s.rank else None
            if other.forward == "right" and theirs is not None and torch.equal(mine, theirs):
                return replace(s, forward="untold", backward="untold", wrong=None)
    return s


def _goes_on_elsewhere(rank: int, traces: Traces, modules: Sequence[str]) -> bool:
    """Whether other ranks alone call what the single process calls last of its model."""
    called = {r: {call.module for call in trace.calls} for r, trace in traces.ranks.items()}
    own = [i for i, m in enumerate(modules) if m and m in called[rank]]
    later = {*modules[max(own) + 1 :]} - {""} if own else set()
    return any(not later.isdisjoint(others) for r, others in called.items() if r != rank)


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

    Not of zeros, which other rows give, too; nor where another module that is called as often gave
    something else meanwhile: then it is a call for other rows.
    """
    given = _given_by_all(trace)
    kept: dict[tuple[object, ...], int] = {}
    calls: list[Call] = []
    outputs: list[Tensor] = []
    gradients: list[Tensor | None] = []
    for call, output, gradient in zip(trace.calls, trace.outputs, trace.gradients, strict=True):
        key = (call.module, call.part, call.recomputed, output.shape, given(call))
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


def _given_by_all(trace: Trace) -> Callable[[Call], object]:
    """What tells calls apart: what all modules that are called as often gave in that call."""
    often: dict[str, int] = {}
    hashes: dict[tuple[int, int], list[tuple[int, str]]] = {}
    for call in trace.calls:
        often[call.module] = max(often.get(call.module, 0), call.number + 1)
    for call, output in zip(trace.calls, trace.outputs, strict=True):
        key = often[call.module], call.number
        hashes.setdefault(key, []).append((call.part, hash_weights({call.module: output})))
    told = {key: hash(tuple(found)) for key, found in hashes.items()}
    return lambda call: told[often[call.module], call.number]


def _computed_again(found: list[Seen], whole: Mapping[tuple[str, int], Whole]) -> list[Seen]:
    """A call that no gradient reached is none that lost it, where the rank computed the same again,
    in one call or in several, and that got it: all of it that gets one in the single process."""
    reached = [s for s in found if s.where is not None and s.call.operation_back is not None]

    def again(s: Seen) -> bool:
        others = [
            other.where.found.any(0)
            for other in reached
            if other.rank == s.rank and other.call.part == s.call.part and other.where is not None
        ]
        wanted = whole.get((s.call.module, s.call.part))
        if s.where is None or wanted is None or not others:
            return False
        mine = s.where.found.any(0) & wanted.gradients.any(1)
        return not bool((mine & ~torch.stack(others).any(0)).any())

    lost = [s.backward == "wrong" and s.call.operation_back is None for s in found]
    return [
        replace(s, backward="untold") if gone and again(s) else s
        for s, gone in zip(found, lost, strict=True)
    ]


def _without_trials(found: list[Seen]) -> list[Seen]:
    """Without calls that are not right and got no gradient, where the rank has right ones with one.

    A pipeline finds the shapes of its stages by them. Not where a rank computes it again: then a
    checkpoint's first pass gets no gradient.
    """
    again = {s.rank for s in found if s.call.recomputed}
    right = {
        s.rank for s in found if s.forward == "right" and s.call.operation_back is not None
    } - again
    return [
        s
        for s in found
        if s.forward == "right"
        or s.call.recomputed
        or s.call.operation_back is not None
        or s.backward == "wrong"
        or s.rank not in right
    ]
