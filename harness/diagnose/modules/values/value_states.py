"""Whether a rank's values, and the gradients that reach them, are the single process's: by value.

Any slice of it, in any order, is right. A gradient is compared where its value was found, as that
of a module is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from sumgrad.diagnose.modules.values.matching import Match, add_up, compare_gradient, match, vectors
from sumgrad.diagnose.modules.values.numbers import Numbers
from sumgrad.diagnose.modules.values.parts import Groups
from sumgrad.diagnose.modules.values.seen import State, constant, one_factor
from sumgrad.record.computed import Computed, places_of
from sumgrad.record.trace import Traces
from torch import Tensor

Key = tuple[tuple[int, ...], str, bytes]  # of a value: its shape, dtype and digest
FEWEST = 2  # different numbers that are no chance
MOST_ALIKE = 8  # values of the single process that one is compared with


class ValueStates:
    """By rank and number of a value. there: what the single process has.

    groups: names of axes with their groups of ranks, over which parts may add up; sets: the latter.
    """

    def __init__(self, traces: Traces, groups: Groups, tolerance: float) -> None:
        self._ranks = {rank: trace.computed for rank, trace in traces.ranks.items()}
        self._single = traces.single.computed
        self.there = Numbers([*self._single.values, *traces.single.params.values()])
        self.sets = [ranks for _, sets in groups for ranks in sets]
        self._tolerance = tolerance
        self._forward: dict[tuple[int, int], State] = {}
        self._backward: dict[tuple[int, int], State] = {}
        self._factors: dict[tuple[int, int], float | None] = {}  # of gradients that are right
        self._places = {rank: places_of(computed) for rank, computed in self._ranks.items()}
        self._at_place = {
            rank: {place: number for number, place in found.items()}
            for rank, found in self._places.items()
        }
        self._sites = {
            number: (site, k) for number, (site, _, k) in places_of(self._single).items()
        }
        self._sent: dict[Key, tuple[int, int]] | None = None

    @property
    def ranks(self) -> list[int]:
        return [*self._ranks]

    def factor(self, rank: int, number: int) -> float | None:
        """Of the gradient that reaches a value and is right; None where it is not one or is not
        known."""
        return self._factors.get((rank, number))

    def same_call(self, rank: int, number: int) -> Iterator[tuple[int, int]]:
        """Of the other ranks, the rank and the number of the value that the same call gave."""
        place = self._places[rank].get(number)
        for other, found in self._at_place.items() if place is not None else ():
            if other != rank and place in found:
                yield other, found[place]

    def forward(self, rank: int, number: int) -> State:
        key = rank, number
        if key not in self._forward:
            self._forward[key] = self._state(rank, number)
        return self._forward[key]

    def backward(self, rank: int, number: int) -> State:
        key = rank, number
        if key not in self._backward:
            self._backward[key] = self._state_back(rank, number)
        return self._backward[key]

    def _state(self, rank: int, number: int) -> State:
        unknown = self.there.unknown(self._ranks[rank].values[number])
        if unknown is None:
            return "untold"
        if not unknown:
            return "right"
        for held in self.together(rank, number):
            values = torch.stack([self._ranks[r].values[n] for r, n in held])
            if bool((values == values[0]).all()):
                continue  # copies, whose sum may be anything
            total = values.sum(0)
            if 0 in (self.there.unknown(total), self.there.unknown(total / len(held))):
                return "part"
        return "wrong"

    def _state_back(self, rank: int, number: int) -> State:
        value, got = self._ranks[rank].values[number], gradient_of(self._ranks[rank], number)
        told: list[State] = []
        for other in self._of_its_line(rank, number):
            whole, wanted = self._single.values[other], gradient_of(self._single, other)
            where = match(vectors(value), vectors(whole), self._tolerance)
            if wanted is None or where is None or not bool(where.here.all()):
                continue
            if not bool(vectors(wanted)[where.found.any(0)].any()):
                continue
            if got is None:
                told.append("wrong")
                continue
            if got.shape != value.shape:
                continue
            by_term = self._by_term(other, wanted)
            found = compare_gradient(vectors(got), vectors(wanted), where, self._tolerance, by_term)
            if bool(found.right.all()):
                if one_factor(found):
                    self._factors[rank, number] = constant(found.factors)
                    return "right"
                told.append("untold")  # weights of rows or places, which what follows may mix
                continue
            if self._is_part(rank, number, vectors(wanted), where):
                return "part"
            told.append("wrong")
        return "wrong" if told and {*told} == {"wrong"} else "untold"

    def is_there_negative(self, rank: int, number: int) -> bool:
        """Whether it is the single process's but for the sign."""
        return self.there.unknown(-self._ranks[rank].values[number]) == 0

    def adds_up(self, rank: int, number: int, wanted: Tensor) -> bool:
        """Whether the same value of all ranks of a group, unlike on each, is together among what is
        wanted: a part on each of them."""
        ordered = wanted.double().reshape(-1).sort().values
        bound = self._tolerance * float(wanted.abs().max()) if wanted.numel() else 0.0
        for held in self.together(rank, number):
            values = torch.stack([self._ranks[r].values[n].double().reshape(-1) for r, n in held])
            if not bound or not values.numel() or bool((values == values[0]).all()):
                continue
            total = values.sum(0)
            at = torch.searchsorted(ordered, total - bound).clamp(max=len(ordered) - 1)
            if bool(((ordered[at] - total).abs() <= bound).all()):
                return True
        return False

    def beside(self, rank: int, number: int) -> tuple[Tensor, Tensor] | None:
        """(n, C) both: what reaches a value, and what reaches it in the single process, of the
        vectors that are there once; None where that is not known."""
        value, got = self._ranks[rank].values[number], gradient_of(self._ranks[rank], number)
        for other in self.alike(value) if got is not None and got.shape == value.shape else ():
            wanted = gradient_of(self._single, other)
            where = match(vectors(value), vectors(self._single.values[other]), self._tolerance)
            if wanted is None or where is None or got is None:
                continue
            alone = where.found.sum(1) == 1
            start, end = where.columns
            its = vectors(wanted)[where.found[alone].long().argmax(1), start:end]
            return vectors(got)[where.picked[alone]], its
        return None

    def _by_term(self, number: int, wanted: Tensor) -> Tensor | None:
        """(T, N, C) the single process's gradient of each term, where the loss has several."""
        own = [g.get(number) for g in self._single.gradients]
        held = [torch.zeros_like(wanted) if g is None else g for g in own]
        return torch.stack([vectors(g) for g in held]) if len(held) > 1 else None

    def _is_part(self, rank: int, number: int, wanted: Tensor, where: Match) -> bool:
        """Whether the gradients of all ranks of a group add up to what is wanted."""
        for ranks in self.together(rank, number):
            parts = [gradient_of(self._ranks[r], n) for r, n in ranks]
            known = [vectors(p) for p in parts if p is not None]
            if len(known) == len(parts) and add_up(known, wanted, where, self._tolerance):
                return True
        return False

    def alike(self, value: Tensor) -> list[int]:
        """Values of the single process that have all its numbers, of its last dimension first."""
        held = sorted(n for n in self.there.holding(value) if n < len(self._single.values))
        last = value.shape[-1:]
        return sorted(held, key=lambda n: self._single.values[n].shape[-1:] != last)[:MOST_ALIKE]

    def _of_its_line(self, rank: int, number: int) -> list[int]:
        """Values of the single process that have all its numbers; where the line that gives it, or
        gave it to the rank that sent it, gives some of them there, these: what hands its numbers on
        has another gradient."""
        every, place = self.alike(self._ranks[rank].values[number]), self._places[rank].get(number)
        if place is None and (sender := self.sender(rank, number)) is not None:
            place = self._places[sender[0]][sender[1]]
        same = [n for n in every if place and self._sites.get(n) == (place[0], place[2])]
        return same or every

    def sender(self, rank: int, number: int) -> tuple[int, int] | None:
        """Of a value that no line gives here, which other rank's does: that rank and its number of
        it, of several the last one that a line gives which the single process runs, too."""
        if number in self._places[rank]:
            return None
        if self._sent is None:
            known = {*self._sites.values()}
            self._sent = {}
            for other, places in self._places.items():
                for n, (site, _, k) in places.items():
                    if (site, k) in known and n in self._ranks[other].with_graph:
                        self._sent[_key(self._ranks[other].values[n])] = other, n
        value = self._ranks[rank].values[number]
        found = self._sent.get(_key(value)) if len(value.unique()) >= FEWEST else None
        return found if found is not None and found[0] != rank else None

    def has_its_vectors(self, value: Tensor) -> bool:
        """Whether each vector of a value is one of one value of the single process."""
        for other in self.alike(value):
            where = match(vectors(value), vectors(self._single.values[other]), self._tolerance)
            if where is not None and bool(where.here.all()):
                return True
        return False

    def together(self, rank: int, number: int) -> Iterator[list[tuple[int, int]]]:
        """The same value of all ranks of a group that this one is in: rank and number of each."""
        place, shape = self._places[rank].get(number), self._ranks[rank].values[number].shape
        for ranks in self.sets if place is not None else ():
            if rank not in ranks or len(ranks) < 2:
                continue
            held = [(r, self._at_place.get(r, {}).get(place)) for r in ranks]  # type: ignore[arg-type]
            known = [(r, n) for r, n in held if n is not None]
            if len(known) == len(ranks) and all(
                self._ranks[r].values[n].shape == shape for r, n in known
            ):
                yield known


def gradient_of(computed: Computed, number: int) -> Tensor | None:
    """Of all terms together."""
    held = [own[number] for own in computed.gradients if number in own]
    return torch.stack(held).sum(0) if held else None


def _key(value: Tensor) -> Key:
    numbers = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return tuple(value.shape), str(value.dtype), hashlib.blake2b(numbers).digest()
