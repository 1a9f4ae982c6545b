"""Vectors of a forward that are right but for one factor: a scale that is missing, or one more."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from sumgrad.diagnose.modules.values.matching import vectors
from sumgrad.diagnose.modules.values.seen import Seen
from sumgrad.diagnose.modules.values.whole import by_module
from sumgrad.record.trace import Traces
from torch import Tensor

MOST_VECTORS = 64  # of each call, that are compared
MAX_ELEMENTS = 1 << 22  # vectors times vectors
FEWEST = 3  # elements: fewer point in one direction by chance
SAME = 1e-9  # of a factor


def one_factor(traces: Traces, seen: Sequence[Seen], tolerance: float) -> float | None:
    """c, where each wrong vector is c times a vector of the single process's, all with one c."""
    found = factors_of(traces, seen, tolerance)
    every = torch.cat(found) if found else torch.empty(0)
    if not len(every) or float((every - every[0]).abs().max()) > SAME * float(every[0].abs()):
        return None
    return float(every[0])


def factors_of(traces: Traces, seen: Sequence[Seen], tolerance: float) -> list[Tensor] | None:
    """Of each call, of each of its wrong vectors, what it is times a vector of the single
    process's; None where one is no multiple of any."""
    factors: list[Tensor] = []
    whole = by_module(traces.single, {s.call.module for s in seen}.__contains__)
    for s in seen:
        wanted = whole.get((s.call.module, s.call.part))
        if wanted is None or s.wrong is None or s.mixed:
            return None
        trace = traces.ranks[s.rank]
        got = vectors(trace.output_of(s.call))[s.wrong][:MOST_VECTORS]
        found = _factors(got, wanted.outputs, tolerance)
        if found is None:
            return None
        factors.append(found)
    return factors


def _factors(got: Tensor, wanted: Tensor, tolerance: float) -> Tensor | None:
    """(n,) of each vector; None where one is no multiple of any."""
    n, width = got.shape
    if width != wanted.shape[1] or width < FEWEST or n * len(wanted) > MAX_ELEMENTS:
        return None
    wanted = wanted[wanted.any(1)]
    if not len(wanted) or not bool(got.any(1).all()):
        return None
    alike = (got / got.norm(dim=1, keepdim=True)) @ (wanted / wanted.norm(dim=1, keepdim=True)).T
    nearest = wanted[alike.abs().argmax(1)]
    factors = (got * nearest).sum(1) / nearest.square().sum(1)
    off = (got - factors[:, None] * nearest).abs().amax(1)
    return factors if bool((off <= tolerance * got.abs().amax(1)).all()) else None
