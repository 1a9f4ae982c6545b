"""Functions of a user's whose backward hands a tensor no gradient that one is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sumgrad.diagnose.modules.in_code.followed import followed
from sumgrad.diagnose.modules.in_code.lines import Lines
from sumgrad.diagnose.modules.values.value_states import gradient_of
from sumgrad.record.computed import MODULE, Computation, Computed

Key = tuple[str, str]  # a Function's class, and where its backward stands


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GivesNothing:
    """In each of its calls on these ranks; at: of its tensors, by number. call: the first of
    them."""

    call: Computation
    at: int
    ranks: tuple[int, ...]


def give_nothing(lines: Lines) -> dict[Key, GivesNothing]:
    """Of each Function the first such tensor, of which the single process has a gradient. Not what
    lines only cut from leaves, whose gradients it may add up itself, nor what the single process's
    gives nothing, too."""
    meant = {*_odd(lines.single)}
    every = {rank: _odd(lines.computed(rank)) for rank in lines.states.ranks}
    out: dict[Key, GivesNothing] = {}
    for rank, own in every.items():
        for (key, at), call in own.items():
            number = call.takes[at]
            if (key, at) in meant or not isinstance(number, int):
                continue
            if _is_cut_from_a_leaf(lines, rank, number) or not _has_one(lines, rank, number):
                continue
            on = tuple(r for r, odd in every.items() if (key, at) in odd)
            out.setdefault(key, GivesNothing(call=call, at=at, ranks=on))
    return out


def may_give_nothing(computed: Computed) -> set[Key]:
    """Functions that give some tensor nothing, whatever that is."""
    return {key for key, _ in _odd(computed)}


def _odd(computed: Computed) -> dict[tuple[Key, int], Computation]:
    """By Function and number of the tensor the first call, where none gives that one anything."""
    given: dict[tuple[Key, int], list[tuple[Computation, bool]]] = {}
    for key, call, at, is_given in _asked(computed):
        given.setdefault((key, at), []).append((call, is_given))
    return {key: calls[0][0] for key, calls in given.items() if not any(told for _, told in calls)}


def _asked(computed: Computed) -> Iterator[tuple[Key, Computation, int, bool]]:
    """Each tensor that autograd knows a function of, of a call that itself is given something."""
    for back in computed.backs:
        call = computed.computations[back.computation]
        if not any(outer is not None and bool(outer.any()) for outer in back.outer):
            continue
        if len(call.takes) != len(back.inner):
            continue  # as of a list of tensors: which is which is not known
        for at, (n, inner) in enumerate(zip(call.takes, back.inner, strict=True)):
            if isinstance(n, int) and n in computed.with_graph:
                yield (call.function, call.written), call, at, inner is not None


def _is_cut_from_a_leaf(lines: Lines, rank: int, number: int) -> bool:
    """Whether only lines that cut, turn or cast it are between it and what no line makes."""
    computations, ways = lines.computed(rank).computations, lines.ways(rank)
    before = followed([number], ways.gives, lambda place: computations[place].uses)
    makers = [computations[p] for n in (number, *before) for p in ways.gives.get(n, ())]
    return all(not c.function.startswith(MODULE) and lines.moves(rank, c) for c in makers)


def _has_one(lines: Lines, rank: int, number: int) -> bool:
    """Whether a gradient that is not zero reaches the same numbers in the single process."""
    for n in lines.states.alike(lines.computed(rank).values[number]):
        gradient = gradient_of(lines.single, n)
        if gradient is not None and bool(gradient.any()):
            return True
    return False
