"""Functions of a user's whose backward hands a tensor no gradient that one is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from sumgrad.record.computed import Computation, Computed

Key = tuple[str, str]  # a Function's class, and where its backward stands


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GivesNothing:
    """In each of its calls on these ranks; at: of its tensors, by number. call: the first of
    them."""

    call: Computation
    at: int
    ranks: tuple[int, ...]


def give_nothing(ranks: Mapping[int, Computed], single: Computed) -> dict[Key, GivesNothing]:
    """Of each Function the first such tensor. Not leaves, whose gradient it may add up itself, nor
    what the single process's gives nothing, too."""
    meant = {*_odd(single)}
    every = {rank: _odd(computed) for rank, computed in ranks.items()}
    out: dict[Key, GivesNothing] = {}
    for own in every.values():
        for (key, at), call in own.items():
            on = tuple(rank for rank, odd in every.items() if (key, at) in odd)
            if (key, at) not in meant:
                out.setdefault(key, GivesNothing(call=call, at=at, ranks=on))
    return out


def _odd(computed: Computed) -> dict[tuple[Key, int], Computation]:
    """By Function and number of the tensor the first call, where none gives that one anything."""
    given: dict[tuple[Key, int], list[tuple[Computation, bool]]] = {}
    for key, call, at, is_given in _asked(computed):
        given.setdefault((key, at), []).append((call, is_given))
    return {key: calls[0][0] for key, calls in given.items() if not any(told for _, told in calls)}


def _asked(computed: Computed) -> Iterator[tuple[Key, Computation, int, bool]]:
    """Each tensor that a line or a module made, of a call that itself is given something."""
    made = {n for c in computed.computations for n in c.gives if n not in c.takes}
    for back in computed.backs:
        call = computed.computations[back.computation]
        if not any(outer is not None and bool(outer.any()) for outer in back.outer):
            continue
        tensors = [n for n in call.takes if isinstance(n, int)]
        for at, (n, inner) in enumerate(zip(tensors, back.inner, strict=False)):
            if n in computed.with_graph and n in made and n not in computed.arrivals:
                yield (call.function, call.written), call, at, inner is not None
