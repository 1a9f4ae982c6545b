"""What the single process computes from numbers that the ranks have, too, and no rank does: it
gives what no rank has, nor anything that is made of it; it masks or clamps what no rank does; it
calls a loss or an activation where the ranks call another.

By value alone, in float64, where equal numbers are no chance. What the ranks compute in another way
comes to the same in the end, and is none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from sumgrad.diagnose.modules.in_code.options import LOSSES
from sumgrad.diagnose.modules.values.numbers import Numbers
from sumgrad.record.computed import LARGE, MODULE, Computation, Computed

FEW = 0.1  # of a value's numbers that no rank has: it is there
State = Literal["there", "in_part", "lacking", "untold"]
# Functions that leave most numbers as they are, and what may be called in their place.
MASKING = {"clamp", "clamp_min", "clamp_max", "masked_fill", "relu", "tril", "triu", "hardtanh"}
MASKS = MASKING | {"where", "maximum", "minimum", "threshold", "leaky_relu", "setitem",
                   "index_fill", "masked_scatter"}  # fmt: skip
ACTIVATIONS = {"gelu", "silu", "relu", "relu6", "leaky_relu", "elu", "selu", "celu", "tanh",
               "sigmoid", "softplus", "mish", "hardswish", "hardsigmoid", "logsigmoid"}  # fmt: skip
NORMS = {"layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm"}
FAMILIES = (LOSSES, ACTIVATIONS, NORMS)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InPlace:
    """A rank's call `mine` takes what in the single process `its` takes, another function."""

    rank: int
    mine: Computation
    its: Computation


def left_undone(ranks: Sequence[Computed], whole: Computed) -> list[Computation]:
    """Of the single process, in its order, what gives what is nowhere on a rank; nothing where not
    all numbers were kept."""
    if any(map(_is_in_part, (*ranks, whole))):
        return []
    held = Numbers([value for computed in ranks for value in computed.values])
    states = [_state(held.share_unknown(value)) for value in whole.values]
    comes_right = _coming_right(whole, states)
    return [c for c in whole.computations if _is_first(c, states, comes_right)]


def left_unmasked(
    ranks: Sequence[Computed], whole: Computed, numbers: Numbers
) -> list[Computation]:
    """Of the single process, what changes some numbers of something and leaves the others, where
    ranks have that and no rank does so to it. numbers: of the single process's values."""
    if any(map(_is_in_part, (*ranks, whole))):
        return []
    asked = [c for c in whole.computations if c.function in MASKING and _changes(c, whole)]
    if not asked:
        return []
    there, masked = set[int](), set[int]()
    for computed in ranks:
        for c in computed.computations:
            masks = c.function in MASKS or (c.function == "mul" and _is_by_a_mask(c, computed))
            for take in c.takes:
                if isinstance(take, int):
                    its = numbers.holding(computed.values[take])
                    there |= its
                    masked |= its if masks else set()
    return [c for c in asked if c.takes[0] in there - masked]


def other_functions(
    ranks: Mapping[int, Computed], whole: Computed, numbers: Numbers
) -> Iterator[InPlace]:
    """Losses, activations and norms of the ranks where the single process calls another one, which
    no rank calls there. numbers: of the single process's values."""
    for family in FAMILIES:
        its: dict[int, list[Computation]] = {}
        for c in whole.computations:
            if c.function in family and (taken := _first(c)) is not None:
                its.setdefault(taken, []).append(c)
        found, called = list[InPlace](), set[tuple[int, str]]()
        for rank, computed in ranks.items():
            for c in computed.computations:
                if c.function in family and (taken := _first(c)) is not None:
                    held = numbers.holding(computed.values[taken]) & its.keys()
                    called |= {(number, c.function) for number in held}
                    there = [w for number in sorted(held) for w in its[number]]
                    if there and c.function not in {w.function for w in there}:
                        found.append(InPlace(rank=rank, mine=c, its=there[0]))
        yield from (one for one in found if (_first(one.its), one.its.function) not in called)


def _first(c: Computation) -> int | None:
    """The number of its first argument, where that is a tensor."""
    first = c.takes[0] if c.takes else None
    return first if isinstance(first, int) else None


def _is_in_part(computed: Computed) -> bool:
    takes = (take for c in computed.computations for take in c.takes)
    return any(isinstance(take, str) and take.startswith(LARGE) for take in takes)


def _state(unknown: float | None) -> State:
    if unknown is None:
        return "untold"
    if unknown < FEW:
        return "there"
    return "in_part" if unknown < 1 else "lacking"


def _coming_right(whole: Computed, states: Sequence[State]) -> set[int]:
    """Numbers of values of which something is made that is there, or some of it."""
    found = set[int]()
    for c in reversed(whole.computations):
        if any(states[n] in ("there", "in_part") or n in found for n in c.gives):
            found.update(c.uses)
    return found


def _is_first(c: Computation, states: Sequence[State], comes_right: set[int]) -> bool:
    taken = [states[take] for take in c.takes if isinstance(take, int)]
    return (
        bool(c.gives)
        and not c.function.startswith(MODULE)
        and all(states[n] == "lacking" and n not in comes_right for n in c.gives)
        and "there" in taken
        and "lacking" not in taken
    )


def _is_by_a_mask(c: Computation, computed: Computed) -> bool:
    """Whether one of its factors is zeros and ones."""
    taken = [computed.values[take] for take in c.takes if isinstance(take, int)]
    return any(value.numel() > 1 and bool(((value == 0) | (value == 1)).all()) for value in taken)


def _changes(c: Computation, whole: Computed) -> bool:
    """Whether it makes some numbers of a tensor others."""
    if len(c.gives) != 1 or not c.takes or not isinstance(c.takes[0], int):
        return False
    taken, given = whole.values[c.takes[0]], whole.values[c.gives[0]]
    if taken.shape != given.shape or taken.dtype != given.dtype:
        return False
    return not torch.equal(taken, given)
