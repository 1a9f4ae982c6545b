"""Where a step hands autograd a gradient that is a part on each rank, in words."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.looked import line_and_code
from sumgrad.diagnose.modules.first_wrong import FirstWrong
from sumgrad.diagnose.modules.look import Look
from sumgrad.diagnose.modules.seen import Seen
from sumgrad.record.trace import Trace


def handed_in_parts(case: Case, look: Look, found: FirstWrong) -> str:
    """Of what is made from the wrong one, where a backward starts, as at the end of a stage; empty
    where none does from a part."""
    traces, above = case.traces, look.paths.all_above(found.wrong)
    ranks = {} if traces is None else {rank: traces.ranks[rank] for rank in found.ranks}
    for rank, trace in ranks.items():
        for one in trace.started:
            part = next((s for s in _given_by(look, trace, one.call) if s.rank == rank
                         and s.backward == "part" and s.call.module in above), None)  # fmt: skip
            if part is None:
                continue
            made = "" if one.made == one.line or not one.made[0] else (
                f", made at {line_and_code(*one.made)},")  # fmt: skip
            return (f"what {line_and_code(*one.line)} hands to autograd as the gradient of what "
                    f"{part.call.module} gives{made} is a part on each rank, whole only when "
                    f"summed over {part.axis}: look for a sum or a gather that is missing where "
                    f"it is received")  # fmt: skip
    return ""


def _given_by(look: Look, trace: Trace, at: int) -> Iterator[Seen]:
    """Of all modules that give the very same: a stage's is that of its last layer."""
    output = trace.outputs[at]
    calls = [c for c, o in zip(trace.calls, trace.outputs, strict=True) if o.shape == output.shape
             and torch.equal(o, output)]  # fmt: skip
    for call in calls:
        yield from (s for s in look.seen.get(call.module, ()) if s.call == call)
