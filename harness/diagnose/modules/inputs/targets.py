"""Another target: read from the gradient of a cross entropy, which is softmax - onehot(target).

Where a rank has the right logits and another target, its gradient differs from the right one in two
numbers of a vector, by the same amount: one class is no target any more, and another is one. Where
the single process has no target at all, softmax - onehot has one number below zero, and the sum 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sumgrad.diagnose.modules.values.matching import vectors
from sumgrad.diagnose.modules.values.seen import Seen
from sumgrad.diagnose.modules.values.whole import by_module
from sumgrad.record.trace import Traces
from torch import Tensor

FEWEST = 5  # classes: three of them have to agree on a factor
CLOSE = 1e-6  # of the largest number of a vector


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """vector: its number in the tensor. was: the class that the single process has there, None
    where it has no gradient; now: the class whose gradient it is."""

    seen: Seen
    vector: int
    was: int | None
    now: int


def other_targets(traces: Traces, module: str, found: Sequence[Seen]) -> list[Target] | None:
    """The targets of the wrong vectors of these, of those that can be told from others with the
    same output; None if something else is wrong with any."""
    whole = by_module(traces.single, module.__eq__)
    out: list[Target] = []
    for s in found:
        wanted = whole.get((module, s.call.part))
        got = _gradient(traces, s)
        if wanted is None or got is None or s.where is None or s.wrong is None:
            return None
        if s.where.columns != (0, wanted.gradients.shape[1]):
            return None
        for vector, reference in _references(s, wanted.gradients):
            told = _target(got[vector], reference)
            if told is None:
                return None
            out.append(Target(seen=s, vector=vector, was=told[0], now=told[1]))
    return out or None


def _gradient(traces: Traces, s: Seen) -> Tensor | None:
    """(n, C) of the call of a rank that was seen."""
    trace = traces.ranks[s.rank]
    key = (s.call.module, s.call.number, s.call.part, s.call.recomputed)
    for call, gradient in zip(trace.calls, trace.gradients, strict=True):
        if (call.module, call.number, call.part, call.recomputed) == key:
            return None if gradient is None else vectors(gradient)
    return None


def _references(s: Seen, gradients: Tensor) -> Iterator[tuple[int, Tensor]]:
    """The wrong vectors, and the right gradient of each; none that may be of several tokens."""
    assert s.where is not None
    assert s.wrong is not None
    wrong = set(s.wrong.tolist())
    for vector, may_be in zip(s.where.picked.tolist(), s.where.found, strict=True):
        if vector in wrong:
            several = gradients[may_be].unique(dim=0)
            if len(several) == 1:
                yield vector, several[0]


def _target(got: Tensor, wanted: Tensor) -> tuple[int | None, int] | None:
    """(was, now) of one vector. All but two of its numbers tell with which factor it enters."""
    if len(got) < FEWEST or not bool(got.any()):
        return None
    if not bool(wanted.any()):
        told = _onehot(got)
        return None if told is None else (None, told)
    live = wanted != 0
    factor = float((got[live] / wanted[live]).median())
    if not factor or not math.isfinite(factor):
        return None
    mine = got / factor
    apart, bound = mine - wanted, CLOSE * float(wanted.abs().max())
    odd = (apart.abs() > bound).nonzero()[:, 0].tolist()
    was, now = _onehot(wanted), _onehot(mine)
    if was is None or now is None or sorted(odd) != sorted({was, now}) or len(odd) != 2:
        return None
    return (was, now) if abs(float(apart[odd].sum())) <= bound else None


def _onehot(gradient: Tensor) -> int | None:
    """The class t of c (softmax - onehot(t)): all other numbers have one sign, and the sum is 0."""
    for sign in (1.0, -1.0):
        below = (sign * gradient < 0).nonzero()[:, 0].tolist()
        if len(below) == 1:
            most = float(gradient.abs().max())
            return below[0] if abs(float(gradient.sum())) <= CLOSE * most else None
    return None
