"""What a wrong output has too much of, or lacks: a parameter, what goes in, another's output.

Where what goes into a module is right, its output should be that of the single process for the same
vectors. The difference is compared with what there is to be added: a bias that each rank adds
before a sum, a residual that is left out, or that is in twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from sumgrad.diagnose.modules.values.matching import SAME_FACTOR, vectors
from sumgrad.diagnose.modules.values.seen import Seen
from sumgrad.diagnose.modules.values.whole import Whole, by_module
from sumgrad.record.trace import INTO, Traces
from torch import Tensor

Wholes = Mapping[tuple[str, int], Whole]
FEWEST = 4  # numbers that differ: of fewer a multiple of another is chance
ROUNDING = 1e-12  # of what comes out of the same
LARGEST = 64  # times that something is in it too often


@dataclass(frozen=True, slots=True, kw_only=True)
class Surplus:
    """Every wrong call gives the right output and `times` of something more; less, if negative.

    name: of a parameter, or of a module: what it gives, or goes into it, as trace.INTO says.
    """

    name: str
    of: Literal["parameter", "module"]
    times: float


def surplus(
    traces: Traces, found: Sequence[Seen], into: Sequence[Seen], tolerance: float
) -> Surplus | None:
    """The same of all of `found`, wrong outputs of one module; None where there is none.

    into: what went into these calls. tolerance: a part of the largest number of the output.
    """
    there = by_module(traces.single, lambda _: True)
    return _the_same([_of_output(traces, s, into, there, tolerance) for s in found])


def surplus_back(
    traces: Traces, found: Sequence[Seen], factor: float, tolerance: float
) -> Surplus | None:
    """The same of gradients that reached right outputs of one module: of what reaches another.
    factor: that right gradients have there."""
    there = by_module(traces.single, lambda _: True)
    # Of what has the same gradient, as a module and the last one in it, the outer one.
    there = dict(sorted(there.items(), key=lambda one: len(one[0][0])))
    return _the_same([_of_gradient(traces, s, there, factor, tolerance) for s in found])


def _the_same(found: Sequence[Iterator[Surplus]]) -> Surplus | None:
    """The first that explains every call."""
    told: list[Surplus] = []
    for i, own in enumerate(found):
        every = [*own]
        told = [t for t in told if any(_is_alike(t, one) for one in every)] if i else every
        if not told:
            return None
    return told[0] if told else None


def _is_alike(one: Surplus, other: Surplus) -> bool:
    times = abs(one.times - other.times) <= SAME_FACTOR * abs(other.times)
    return times and (one.name, one.of) == (other.name, other.of)


def _of_output(
    traces: Traces, s: Seen, into: Sequence[Seen], there: Wholes, tolerance: float
) -> Iterator[Surplus]:
    """What explains the difference of one call's output; the likeliest first."""
    wanted, trace = there.get((s.call.module, s.call.part)), traces.ranks[s.rank]
    got = vectors(trace.output_of(s.call))
    number = None if wanted is None else _which_vectors(s, into, there, wanted.outputs)
    if wanted is None or number is None or int(number.max()) >= len(wanted.outputs):
        return
    if got.shape != (len(number), wanted.outputs.shape[1]):
        return
    off, bound = got - wanted.outputs[number], tolerance * float(wanted.outputs.abs().max())
    params = sorted(traces.single.params.items(),
                    key=lambda one: not one[0].startswith(f"{s.call.module}."))  # fmt: skip
    for name, value in params:
        if value.numel() == off.shape[1]:
            yield from _times(off, value.double().reshape(1, -1), bound, name, "parameter")
    own = f"{INTO}{s.call.module}"
    for (name, _), held in sorted(there.items(), key=lambda one: one[0][0] != own):
        if name != s.call.module and held.outputs.shape == wanted.outputs.shape:
            yield from _times(off, held.outputs[number], bound, name, "module")


def _of_gradient(
    traces: Traces, s: Seen, there: Wholes, factor: float, tolerance: float
) -> Iterator[Surplus]:
    """The same of a gradient that reached a right output."""
    wanted, trace = there.get((s.call.module, s.call.part)), traces.ranks[s.rank]
    gradient = trace.gradient_of(s.call)
    if wanted is None or gradient is None or s.where is None:
        return
    got, alone = vectors(gradient), s.where.found.sum(1) == 1
    if len(s.where.picked) != len(got) or not bool(alone.all()):
        return
    number = s.where.found.int().argmax(1)
    if got.shape[1] != wanted.gradients.shape[1]:
        return
    off = got - factor * wanted.gradients[number]
    bound = tolerance * abs(factor) * float(wanted.gradients.abs().max())
    for (name, _), held in there.items():
        if name != s.call.module and held.gradients.shape == wanted.gradients.shape:
            yield from _times(off, factor * held.gradients[number], bound, name, "module")


def _times(
    off: Tensor, what: Tensor, bound: float, name: str, of: Literal["parameter", "module"]
) -> Iterator[Surplus]:
    """off: (n, C); what: (n, C), or (1, C) for all alike."""
    what = what.expand_as(off)
    square = float((what * what).sum())
    if not square or len(what.unique()) < FEWEST:
        return
    times = float((off * what).sum()) / square
    fits = float((off - times * what).abs().max()) <= bound * max(1.0, abs(times))
    seen = float(off.abs().max()) > 1e3 * bound
    if fits and seen and abs(times) <= LARGEST:
        yield Surplus(name=name, of=of, times=times)


def _which_vectors(s: Seen, into: Sequence[Seen], there: Wholes, outputs: Tensor) -> Tensor | None:
    """(n,) of each vector of a call's output its number in the single process, by what went in.
    outputs: the single process's."""
    for one in into:
        where, whole = one.where, there.get((one.call.module, one.call.part))
        if (one.rank, one.call.number) != (s.rank, s.call.number) or one.forward != "right":
            continue
        if where is None or whole is None or one.shape[:-1] != s.shape[:-1] or not one.shape:
            continue
        if len(where.picked) == math.prod(one.shape[:-1]) and _are_alike(where.found, outputs):
            return where.found.int().argmax(1)
    return None


def _are_alike(found: Tensor, outputs: Tensor) -> bool:
    """Whether each vector is somewhere, and where it is several times, as a class token is in every
    row, the same comes out. found: (n, N); outputs: (N, C) or others of these."""
    if not bool(found.any(1).all()):
        return False
    several = found[found.sum(1) > 1]
    if found.shape[1] != len(outputs):
        return not len(several)
    first = outputs[several.int().argmax(1)]
    return all(torch.allclose(outputs[own], one.expand_as(outputs[own]), ROUNDING, 0.0)
               for own, one in zip(several, first, strict=True))  # fmt: skip
