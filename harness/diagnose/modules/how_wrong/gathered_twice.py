"""Tensors that hold some vectors of a module's output twice, where another rank holds each once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from sumgrad.record.computed import Computation
from sumgrad.record.trace import Trace, Traces
from torch import Tensor

MOST_VECTORS = 4096  # of one tensor


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Vector:
    """One that a module gives: which rank's, in which call, and its number there."""

    module: str
    rank: int
    call: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Twice:
    """What a line gives on a rank. like: the rank whose tensor there has each of its vectors once,
    of which `never` are not here."""

    rank: int
    computation: Computation
    twice: tuple[Vector, ...]
    never: tuple[Vector, ...]
    like: int


def gathered_twice(traces: Traces) -> Iterator[Twice]:
    """Of each line and rank the first such call."""
    known = _vectors_of_modules(traces.ranks)
    held = {rank: _by_turn(trace) for rank, trace in traces.ranks.items()}
    told: set[tuple[int, str]] = set()
    for rank, turns in held.items():
        for key, (made, value) in turns.items():
            times = Counter(_vectors(value))
            if (rank, made.site) in told or max(times.values(), default=1) < 2:
                continue
            found = _like(held, rank, key, value)
            if found is None:
                continue
            like, wanted = found
            twice = [_best(known, v, rank) for v in times if times[v] > 1]
            never = [_best(known, v, like) for v in wanted if v not in times]
            if None in twice or None in never:
                continue
            told.add((rank, made.site))
            yield Twice(
                rank=rank,
                computation=made,
                twice=tuple(sorted(v for v in twice if v is not None)),
                never=tuple(sorted(v for v in never if v is not None)),
                like=like,
            )


Turn = tuple[str, int]


def _by_turn(trace: Trace) -> dict[Turn, tuple[Computation, Tensor]]:
    times: Counter[str] = Counter()
    found: dict[Turn, tuple[Computation, Tensor]] = {}
    for c in trace.computed.computations:
        key = c.site, times[c.site]
        times[c.site] += 1
        for value in (trace.computed.values[n] for n in c.gives[:1]):
            is_vectors = value.dim() > 1 and value.shape[-1] > 1 and value.is_floating_point()
            if is_vectors and value[..., 0].numel() <= MOST_VECTORS:
                found[key] = c, value
    return found


def _like(
    held: dict[int, dict[Turn, tuple[Computation, Tensor]]], rank: int, key: Turn, value: Tensor
) -> tuple[int, list[bytes]] | None:
    """The rank with the most of the same vectors, each of them once."""
    mine, best = {*_vectors(value)}, None
    for other, turns in held.items():
        if other == rank or key not in turns or turns[key][1].shape != value.shape:
            continue
        vectors = [*_vectors(turns[key][1])]
        common = len(mine & {*vectors})
        if len({*vectors}) == len(vectors) and common and (best is None or common > best[2]):
            best = other, vectors, common
    return None if best is None else best[:2]


def _vectors_of_modules(ranks: Mapping[int, Trace]) -> dict[bytes, dict[int, Vector]]:
    """By ranks that give it, each one's first."""
    found: dict[bytes, dict[int, Vector]] = {}
    for rank, trace in ranks.items():
        for call, output in zip(trace.calls, trace.outputs, strict=True):
            if output.dim() < 2 or not output.is_floating_point():
                continue
            for number, vector in enumerate(_vectors(output)):
                one = Vector(module=call.module, rank=rank, call=call.number, number=number)
                found.setdefault(vector, {}).setdefault(rank, one)
    return found


def _best(known: Mapping[bytes, Mapping[int, Vector]], vector: bytes, rank: int) -> Vector | None:
    """Rather of this rank, else of the first."""
    own = known.get(vector)
    return None if own is None else own.get(rank) or next(iter(own.values()))


def _vectors(value: Tensor) -> Iterator[bytes]:
    for vector in value.contiguous().reshape(-1, value.shape[-1]):
        yield vector.numpy().tobytes()
