"""What went into the collectives of a traced step and what they gave, by value, on one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

KINDS = ("given", "before", "got")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Exchange:
    """One operation of a rank.

    number: in its ledger. given: what the rank put in, as it was then; got: what was there when it
    was waited for, None where nobody waited. before: what the same operation of the step before was
    given. Each is one tensor as it was handed over, or several as one of one dimension.
    """

    number: int
    given: Tensor
    got: Tensor | None = None
    before: Tensor | None = None


def exchanges_as_tensors(exchanges: Sequence[Exchange]) -> dict[str, Tensor]:
    """`KIND/NUMBER` -> tensor."""
    return {
        f"{kind}/{one.number}": held
        for one in exchanges
        for kind in KINDS
        if (held := getattr(one, kind)) is not None
    }


def exchanges_from(held: Mapping[str, Tensor]) -> tuple[Exchange, ...]:
    """Of what exchanges_as_tensors gave, among others."""
    numbers = sorted(int(key.partition("/")[2]) for key in held if key.startswith("given/"))
    return tuple(
        Exchange(
            number=number,
            given=held[f"given/{number}"],
            got=held.get(f"got/{number}"),
            before=held.get(f"before/{number}"),
        )
        for number in numbers
    )
