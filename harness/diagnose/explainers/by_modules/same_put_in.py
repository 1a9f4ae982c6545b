"""Sums on the way into which all ranks put the same, in words."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

import torch
from sumgrad.base.outcome import spans
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.looked import as_a_hint
from sumgrad.diagnose.modules.first_wrong import FirstWrong
from sumgrad.record.trace import Trace
from torch import Tensor

FEWEST = 3  # numbers that differ: few are alike by chance
TIER = re.compile(r" \[[^]]*\]")  # and step, which are those of the case
Which = tuple[str, int]  # the words of a collective, and how many of the same were before it


@as_a_hint
def same_put_in(case: Case, found: FirstWrong) -> list[str]:
    """Of the first call that is wrong, between its output and the gradient that reaches it."""
    traces, s = case.traces, found.seen[0]
    if traces is None or s.call.operation_back is None:
        return []
    here = range(s.call.operation, s.call.operation_back)
    every = {rank: dict(_sums(trace)) for rank, trace in traces.ranks.items()}
    said: dict[str, None] = {}
    for which, (number, given) in every[s.rank].items():
        held = {rank: own[which][1] for rank, own in every.items() if which in own}
        alike = all(torch.equal(given, other) for other in held.values())
        if number in here and len(held) > 1 and alike and len(given.unique()) >= FEWEST:
            words = TIER.sub("", which[0])
            said[f"rank {spans(sorted(held))} all put the same numbers into the {words}: what "
                 f"comes out is {len(held)} times what each has"] = None  # fmt: skip
    return [*said]


def _sums(trace: Trace) -> Iterator[tuple[Which, tuple[int, Tensor]]]:
    """What the rank put into each sum, with its number."""
    before: dict[str, int] = defaultdict(int)
    for one in trace.exchanges:
        words = trace.operations[one.number] if one.number < len(trace.operations) else ""
        if words.startswith("allreduce(SUM)"):
            yield (words, before[words]), (one.number, one.given)
            before[words] += 1
