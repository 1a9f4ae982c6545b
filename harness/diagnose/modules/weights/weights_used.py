"""Parameters that a module computes with and that are not the model's, as a gather may leave them.

What a wrapper cuts it puts together again when a module is called, and when its gradient comes.
The same hooks look in the single process; what it has too is right.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from sumgrad.record.ranks import sample_of
from sumgrad.record.trace import MAX_SAMPLE, MAX_USED, Trace, Traces
from torch import Tensor

SAME = 1e-8  # of the parameter's largest element, in float64, as modules' outputs are compared
When = Literal["forward", "backward", "uncalled"]
UNCALLED: When = "uncalled"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OtherWeight:
    """A parameter as a module of one rank had it. got, wanted: (n,) at `places` of `numel`."""

    name: str
    rank: int
    when: When
    places: Tensor
    got: Tensor
    wanted: Tensor
    numel: int

    @property
    def wrong(self) -> Tensor:
        """(n,) bool."""
        bound = SAME * float(self.wanted.abs().max())
        return ~((self.got - self.wanted).abs() <= bound)


def other_weights(traces: Traces, module: str, when: When) -> list[OtherWeight]:
    """The parameters of a module itself, on every rank that has them whole."""
    return [
        found
        for rank, trace in traces.ranks.items()
        for key in trace.used
        if (name := key.partition("/")[2]).rpartition(".")[0] == module
        and key.startswith(f"{when}/")
        and (found := _other(traces.single, rank, trace, name, when)) is not None
    ]


def uncalled_state(traces: Traces) -> list[OtherWeight]:
    """What modules that are never called hold, as a dict of buffers, and the single process's do
    not."""
    return [
        found
        for rank, trace in traces.ranks.items()
        for key in trace.used
        if key.startswith(f"{UNCALLED}/")
        and (found := _other(traces.single, rank, trace, key.partition("/")[2], UNCALLED))
    ]


def _other(single: Trace, rank: int, trace: Trace, name: str, when: When) -> OtherWeight | None:
    """The first state of a parameter that the single process never has; None where that has as many
    as are kept, and may have had this one, too."""
    numel = trace.used_numel.get(name)
    states = [single.used.get(f"{at}/{name}", ()) for at in ("forward", "backward", UNCALLED)]
    right = [t.double() for own in states for t in own]
    if not numel or numel != single.used_numel.get(name) or not right:
        return None
    if any(len(own) >= MAX_USED for own in states):
        return None
    places = sample_of(numel, MAX_SAMPLE)
    for held in trace.used[f"{when}/{name}"]:
        beside = [
            OtherWeight(name=name, rank=rank, when=when, places=places, got=held.double(),
                        wanted=wanted, numel=numel)
            for wanted in right
        ]  # fmt: skip
        if all(bool(one.wrong.any()) for one in beside):
            return min(beside, key=lambda one: int(one.wrong.sum()))
    return None


def how(found: OtherWeight) -> str:
    """In words: which of its elements, and what they are."""
    wrong = found.wrong
    got, wanted = found.got[wrong], found.wanted[wrong]
    first, last = int(found.places[wrong][0]), int(found.places[wrong][-1])
    whole = bool(wrong.all())
    where = "all its elements" if whole else f"elements {first}-{last} of {found.numel}"
    if not whole and not bool(wrong[(found.places >= first) & (found.places <= last)].all()):
        where = f"{int(wrong.sum())} of {len(wrong)} elements between {first} and {last}"
    if not bool(torch.isfinite(got).all()):
        return f"{where} are not finite"
    if not bool(got.any()):
        return f"{where} are zeros"
    factor = float((got * wanted).sum() / wanted.square().sum()) if bool(wanted.any()) else 0.0
    left = float((got - factor * wanted).norm())
    if factor and left <= 1e-9 * float(got.norm()):
        return f"{where} are {factor:.6g} times what they should be"
    off = float(((got - wanted).abs() / wanted.abs().clamp(min=1e-300)).max())
    if off <= 2.0**-7:
        return f"{where} are right to {off:.1g} of themselves, as if rounded to few digits"
    return f"{where} have other values"
