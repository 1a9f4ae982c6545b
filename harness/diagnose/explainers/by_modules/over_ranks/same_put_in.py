"""Sums on the way into which all ranks put the same, in words."""

from __future__ import annotations

import torch
from sumgrad.base.outcome import spans
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.between import without_place
from sumgrad.diagnose.explainers.by_modules.looked import as_a_hint
from sumgrad.diagnose.modules.over_ranks.collectives import collectives
from sumgrad.diagnose.modules.where.first_wrong import FirstWrong

FEWEST = 3  # numbers that differ: few are alike by chance


@as_a_hint
def same_put_in(case: Case, found: FirstWrong) -> list[str]:
    """Of the first call that is wrong, between its output and the gradient that reaches it."""
    traces, s = case.traces, found.seen[0]
    if traces is None or s.call.operation_back is None:
        return []
    said: dict[str, None] = {}
    for op in collectives(traces, s.rank, s.call.operation, s.call.operation_back):
        words = without_place(case, traces.ranks[s.rank].operations[op.own.number])
        held = {rank: op.by_rank[rank].given for rank in op.ranks if rank in op.by_rank}
        given = op.own.given
        alike = all(torch.equal(given, other) for other in held.values())
        is_sum = words.startswith("allreduce(SUM)")
        if is_sum and len(held) > 1 and alike and len(given.unique()) >= FEWEST:
            said[f"rank {spans(sorted(held))} all put the same numbers into the {words}: what "
                 f"comes out is {len(held)} times what each has"] = None  # fmt: skip
    return [*said]
