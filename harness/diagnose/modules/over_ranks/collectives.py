"""Collectives as a rank's group issued them, by value: what went in, what came out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from sumgrad.judge.joint import collective_in_words
from sumgrad.ledger.operations import FAMILIES, REDUCTIONS, members
from sumgrad.record.directory import Record
from sumgrad.record.exchanged import Exchange
from sumgrad.record.trace import Traces
from torch import Tensor

MAX_SLICES = 8  # of a module's features that a collective's tensor may be
SAME = 1e-6  # a factor closer to another than this is the same


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Collective:
    """One collective as a rank's group issued it, and the like one of every other rank.

    event: the rank's, of its ledger. ranks: the group's, in its order. by_rank: the exchange of
    every rank that issued the same line's operation as often before.
    """

    rank: int
    event: Mapping[str, object]
    ranks: tuple[int, ...]
    by_rank: Mapping[int, Exchange]

    @property
    def own(self) -> Exchange:
        return self.by_rank[self.rank]

    @property
    def family(self) -> str:
        return FAMILIES.get(str(self.event["op"]), str(self.event["op"]))

    @property
    def is_sum(self) -> bool:
        return self.family in REDUCTIONS and self.event.get("reduce") in ("SUM", "AVG")

    def given(self, ranks: Sequence[int]) -> list[Tensor] | None:
        """What these ranks put in, as float64; None unless all did, each as much."""
        found = [self.by_rank[r].given for r in ranks if r in self.by_rank]
        if len(found) < len(ranks) or len({t.numel() for t in found}) > 1:
            return None
        return [t.double().reshape(-1) for t in found]


def collectives(traces: Traces, rank: int, start: int, end: int) -> list[Collective]:
    """The collectives of floating numbers that a rank issues from one number to another."""
    found = _by_number(traces)[rank]
    return [found[number] for number in sorted(found) if start <= number < end]


@lru_cache(maxsize=2)
def _by_number(traces: Traces) -> Mapping[int, Mapping[int, Collective]]:
    """Rank -> number in its ledger -> collective."""
    keys: dict[int, list[tuple[object, ...]]] = {}
    like: dict[tuple[object, ...], dict[int, Exchange]] = {}
    for rank, trace in traces.ranks.items():
        times: dict[tuple[object, ...], int] = {}
        held = {one.number: one for one in trace.exchanges}
        keys[rank] = []
        for number, event in enumerate(trace.events):
            line = event["op"], event["site"], event["label"]
            key = (*line, times.get(line, 0))
            times[line] = times.get(line, 0) + 1
            keys[rank].append(key)
            if number in held:
                like.setdefault(key, {})[rank] = held[number]
    return {
        rank: {
            number: Collective(rank=rank, event=event, ranks=ranks, by_rank=like[key])
            for number, (event, key) in enumerate(zip(trace.events, keys[rank], strict=True))
            if rank in like.get(key, {}) and len(ranks := members(event)) > 1
        }
        for rank, trace in traces.ranks.items()
    }


def in_words(record: Record, op: Collective) -> str:
    """`the all-reduce over dp (ranks 0-2) at train.py:31`."""
    return collective_in_words(record, op.family, op.ranks, str(op.event["site"]))


def part_of_rank(op: Collective, whole: Tensor) -> Tensor:
    """Of something as it goes into a collective, what the rank has of it afterwards."""
    if op.family != "reduce_scatter":
        return whole
    size, place = len(whole) // len(op.ranks), op.ranks.index(op.rank)
    return whole[place * size : (place + 1) * size]


def untouched(op: Collective) -> Tensor | None:
    """What the buffer has where nothing has come: what went in, its own part of it, or zeros."""
    one = op.own
    if one.got is None:
        return None
    given, numel = one.given.double().reshape(-1), one.got.numel()
    if op.family in ("allreduce", "reduce", "broadcast"):
        return given
    place = op.ranks.index(op.rank)
    if op.family == "reduce_scatter":
        return given[place * numel : (place + 1) * numel] if len(given) >= numel else None
    out = torch.zeros(numel, dtype=torch.float64)
    if op.family == "all_gather":
        start = place * given.numel()
        room = out[start : start + given.numel()]
        room.copy_(given[: len(room)])
        return out
    if op.family == "all_to_all":
        out[: given.numel()] = given[:numel]
        return out
    return None


def mixed_with(value: Tensor, got: Tensor, own: Tensor, close: float = 1e-12) -> int:
    """How many elements are the rank's own and not the result's, if each is one of the two."""
    size = float(got.abs().max()) * close
    is_got, is_own = (value - got).abs() <= size, (value - own).abs() <= size
    return int((is_own & ~is_got).sum()) if bool((is_got | is_own).all()) else 0


def segment_of(buffer: Tensor, part: Tensor, close: float) -> int | None:
    """Where these numbers stand one after the other in a flat buffer."""
    size = float(part.abs().max())
    if not size or len(part) > len(buffer):
        return None
    first = int(part.abs().argmax())
    for at in ((buffer - part[first]).abs() <= close * size).nonzero()[:, 0].tolist():
        start = at - first
        held = buffer[max(start, 0) : start + len(part)]
        fits = start >= 0 and len(held) == len(part)
        if fits and bool(((held - part).abs() <= close * size).all()):
            return int(start)
    return None


def slices(value: Tensor, numel: int) -> Iterator[Tensor]:
    """A tensor as so many numbers: all of it, or its features in equal parts."""
    flat = value.double()
    if flat.numel() == numel:
        yield flat.reshape(-1)
    elif flat.numel() and value.dim() and numel and flat.numel() % numel == 0:
        times = flat.numel() // numel
        if times <= MAX_SLICES and value.shape[-1] % times == 0:
            for part in flat.split(value.shape[-1] // times, dim=-1):
                yield part.reshape(-1)


def times_of(given: Tensor, value: Tensor) -> float | None:
    """c with given = c value, c not 0."""
    square = float((value * value).sum())
    if not square:
        return None
    c = float((given * value).sum()) / square
    if abs(c) < SAME or float((given - c * value).abs().max()) > 1e-12 * float(given.abs().max()):
        return None
    return 1.0 if abs(c - 1) < 1e-12 else c
