"""Where a step hands autograd a gradient that is a part on each rank, in words."""

from __future__ import annotations

from collections.abc import Iterator

from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.looked import line_and_code, unless_it_fails
from sumgrad.diagnose.modules.values.seen import Seen
from sumgrad.diagnose.modules.where.first_wrong import FirstWrong
from sumgrad.diagnose.modules.where.look import Look
from sumgrad.record.computed import same_value
from sumgrad.record.trace import Trace


@unless_it_fails
def handed_in_parts(case: Case, look: Look, found: FirstWrong) -> str:
    """Of what is made from the wrong one, where a backward starts, as at the end of a stage; empty
    where none does from a part."""
    traces, above = case.traces, look.paths.all_above(found.wrong)
    ranks = {} if traces is None else {rank: traces.ranks[rank] for rank in found.ranks}
    for rank, trace in ranks.items():
        for one in trace.started:
            seen = [s for s in _given_by(look, trace, one.call) if s.rank == rank]
            part = next((s for s in seen if s.backward == "part" and s.call.module in above), None)
            if part is None or any(s.backward == "right" for s in seen):
                continue  # as where the stage ends with what adds up on the way back
            made = f", made at {line_and_code(*one.made)}," if one.made[0] else ""
            made = "" if one.made == one.line else made
            what = part.call.module or "the model"
            return (f"what {line_and_code(*one.line)} hands to autograd as the gradient of what "
                    f"{what} gives{made} is a part on each rank, whole only when summed over "
                    f"{part.axis}: look for a sum or a gather that is missing where it is "
                    f"received")  # fmt: skip
    return ""


def _given_by(look: Look, trace: Trace, at: int) -> Iterator[Seen]:
    """Of all modules that give the very same: a stage's is that of its last layer."""
    for call, output in zip(trace.calls, trace.outputs, strict=True):
        if same_value(output, trace.outputs[at]):
            yield from (s for s in look.seen.get(call.module, ()) if s.call == call)
