"""What goes through a Program's modules in one process, over the full batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from sumgrad.record.computed import computed_together
from sumgrad.record.spec import Facts
from sumgrad.record.trace import Call, Trace
from sumgrad.record.ways import Passed, Ways
from sumgrad.subjects.program.protocol import coarsest, default_dtype, trained
from sumgrad.subjects.program.reference.single import Single
from sumgrad.subjects.program.watched.computations import computations_beside
from sumgrad.subjects.program.watched.watch import MAX_BYTES, ModuleWatch
from torch import Tensor


def trace_reference(
    program: Any,
    facts: Facts,
    tiers: Mapping[str, torch.dtype],
    *,
    tier: str,
    step: int,
    lift: bool = True,
) -> Trace:
    """The trace of one step, of all terms together. Raises Broken where loss_sum does."""
    single = Single(program, facts, tiers[tier], rounded_to=coarsest(tiers.values()), lift=lift)
    single.set_step(step)
    rows = torch.arange(facts.num_rows)
    found: dict[str, Trace] = {}
    total = 0.0
    for name in single.terms:
        count = single.value_and_count(name, rows)[1]
        watching = ModuleWatch(single.model, with_paths=True, with_ways=True)
        computations = computations_beside(watching)
        with watching as seen, default_dtype(single.dtype), computations:
            single.at_loss = seen.at_loss
            single.gradient(name, rows, rows, seed=1 / count)
        found[name] = replace(seen.trace(single.batch), computed=computations.computed())
        total += single.value / count
    params = {n: p.detach().clone() for n, p in trained(single.model).items()}
    size = sum(p.numel() * p.element_size() for p in params.values())
    known = not any(isinstance(term, tuple) for term in single.terms.values())
    return replace(
        _together(found),
        params=params if size <= MAX_BYTES else {},
        losses=(total,) if known else (),
    )


def _together(found: Mapping[str, Trace]) -> Trace:
    """Terms that each ran the model: calls with the same output have the sum of their gradients."""
    first = next(iter(found.values()))
    if len(found) == 1:
        return first
    calls: list[Call] = []
    outputs: list[Tensor] = []
    places: dict[str, dict[int, Tensor]] = {term: {} for term in found}
    for term, trace in found.items():
        for call, output, gradient in zip(trace.calls, trace.outputs, trace.gradients, strict=True):
            at = _same_call(calls, outputs, call, output)
            if at is None:
                at = len(calls)
                calls.append(call)
                outputs.append(output)
            if gradient is not None:
                before = places[term].get(at)
                places[term][at] = gradient if before is None else before + gradient
    totals: list[Tensor | None] = []
    for i in range(len(calls)):
        held = [own[i] for own in places.values() if i in own]
        totals.append(torch.stack(held).sum(0) if held else None)
    return replace(
        first,
        calls=tuple(calls),
        outputs=tuple(outputs),
        gradients=tuple(totals),
        left_out=tuple({name: None for trace in found.values() for name in trace.left_out}),
        sources={
            name: source for trace in found.values() for name, source in trace.sources.items()
        },
        takes=_united(trace.takes for trace in found.values()),
        ways=_united_ways(trace.ways for trace in found.values()),
        computed=computed_together([trace.computed for trace in found.values()]),
        used=_united_used(found.values()),
        used_numel={n: num for trace in found.values() for n, num in trace.used_numel.items()},
        by_term={
            term: tuple(own.get(i) for i in range(len(calls))) for term, own in places.items()
        },
    )


def _united(takes: Iterable[Mapping[str, tuple[str, ...]]]) -> dict[str, tuple[str, ...]]:
    out: dict[str, dict[str, None]] = {}
    for one in takes:
        for name, others in one.items():
            out.setdefault(name, {}).update(dict.fromkeys(others))
    return {name: tuple(others) for name, others in out.items()}


def _united_ways(ways: Iterable[Ways]) -> Ways:
    out: dict[str, dict[str, dict[Passed, None]]] = {}
    for one in ways:
        for to, found in one.items():
            for start, passed in found.items():
                out.setdefault(to, {}).setdefault(start, {}).update(dict.fromkeys(passed))
    return {to: {s: tuple(p) for s, p in found.items()} for to, found in out.items()}


def _united_used(found: Iterable[Trace]) -> dict[str, tuple[Tensor, ...]]:
    out: dict[str, list[Tensor]] = {}
    for trace in found:
        for name, own in trace.used.items():
            held = out.setdefault(name, [])
            held += [t for t in own if not any(torch.equal(t, known) for known in held)]
    return {name: tuple(own) for name, own in out.items()}


def _same_call(
    calls: Sequence[Call], outputs: Sequence[Tensor], call: Call, output: Tensor
) -> int | None:
    for i, (known, held) in enumerate(zip(calls, outputs, strict=True)):
        same = (known.module, known.part) == (call.module, call.part)
        if same and held.shape == output.shape and torch.equal(held, output):
            return i
    return None
