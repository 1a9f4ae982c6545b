"""What an accused line takes that the single process's takes otherwise, in words."""

from __future__ import annotations

from collections.abc import Sequence

from sumgrad.base.outcome import some_of
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.looked import as_a_hint, line_and_code, ordinal
from sumgrad.diagnose.modules.in_code.arguments_there import (
    broadcast_here,
    in_another_order,
    parameters_taken,
)
from sumgrad.diagnose.modules.in_code.lines import AtLine
from sumgrad.diagnose.modules.in_code.made_by import line_that_computed
from sumgrad.diagnose.modules.values.seen import TOLERANCES


@as_a_hint
def arguments_there(case: Case, found: Sequence[AtLine]) -> list[str]:
    """Of the first rank's: an argument whose vectors stand in another order, and one that is
    broadcast where that of the single process is not."""
    traces, dtype = case.traces, case.record.spec.tiers[case.tier]
    if not found or traces is None or dtype not in TOLERANCES or found[0].back:
        return []
    one = found[0]
    mine, whole = traces.ranks[one.rank].computed, traces.single.computed
    said = []
    for order in list(in_another_order(mine, whole, one.mine, TOLERANCES[dtype]))[:1]:
        number = one.mine.takes[order.at]
        made = line_that_computed(mine, number, {one.mine.line})
        at = f", made at {line_and_code(*made)}," if made[0] else ""
        said.append(
            f"on rank {one.rank} its {ordinal(order.at)} argument{at} has what that of the single "
            f"process has at places {order.in_words()} of dimension {order.dim}, in this order: "
            f"what goes with it, as a mask, must be ordered so, too"
        )
    for cast in list(broadcast_here(mine, whole, one.mine))[:1]:
        said.append(
            f"on rank {one.rank} its {ordinal(cast.at)} argument is one for all {cast.size} places "
            f"of dimension {cast.dim} of what it gives, and that of the single process has one for "
            f"each: {line_and_code(*cast.line)} takes a tensor of shape {cast.now} where there it "
            f"is {cast.was}"
        )
    for taken in list(parameters_taken(mine, whole, one.mine, traces.single.params))[:1]:
        said.append(
            f"on rank {one.rank} its {ordinal(taken.at)} argument is {taken.name}, by its numbers; "
            f"in the single process that line takes, one after the other, {some_of(taken.there)}"
        )
    return said
