"""What goes into a module scaled, where a norm in it hides that from the modules behind it."""

from __future__ import annotations

from sumgrad.base.outcome import spans
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.between import is_in
from sumgrad.diagnose.explainers.by_modules.forwards.wrong_outputs import factor_in_words
from sumgrad.diagnose.explainers.by_modules.looked import (
    as_a_hint,
    gone_into,
    line_and_code,
    named,
    traces_looked_at,
)
from sumgrad.diagnose.modules.values.scaled import MOST_VECTORS, factors_of, one_factor
from sumgrad.diagnose.modules.values.seen import TOLERANCES, Seen
from sumgrad.diagnose.modules.where.first_wrong import FirstWrong
from sumgrad.diagnose.modules.where.look import Look


def _takes_it_out(case: Case, look: Look, module: str) -> str | None:
    """The first norm inside that gives what is right of what goes into it wrong."""
    norms = (m for m in look.modules if "norm" in look.sources.get(m, "").lower())
    inside = (m for m in norms if is_in(m, module) and look.forward(m) == "right")
    return next((m for m in inside if any(s.forward == "wrong" for s in gone_into(case, m))), None)


def _vectors(s: Seen) -> str:
    assert s.wrong is not None
    return f"vectors {spans(s.wrong.tolist()[:MOST_VECTORS])}"


@as_a_hint
def scaled_outside(case: Case, look: Look, found: FirstWrong) -> list[str]:
    """Of the outermost module around what is wrong that is handed such vectors, on all wrong
    ranks and no other."""
    traces, dtype = traces_looked_at(case), case.record.spec.tiers[case.tier]
    if traces is None or dtype != "float64":
        return []
    for module in sorted((m for m in look.modules if is_in(found.wrong, m)), key=len):
        wrong = [s for s in gone_into(case, module) if s.forward == "wrong"]
        if not wrong or {s.rank for s in wrong} != {*found.ranks}:
            continue
        if factors_of(traces, wrong, TOLERANCES[dtype]) is None:
            return []
        one = one_factor(traces, wrong, TOLERANCES[dtype])
        how = "multiples of" if one is None else f"{factor_in_words(one)} times"
        norm = _takes_it_out(case, look, module)
        if norm is None:
            return []
        s = wrong[0]
        made = traces.ranks[s.rank].stack(s.call).made
        at = f", made at {line_and_code(*made)}," if made[0] else ""
        return [f"what goes into {named(look, module)}{at} is off by a factor in some vectors, "
                f"which {named(look, norm)} takes out again and a residual keeps: for one, "
                f"{_vectors(s)} of it on rank {s.rank} in call {s.call.number} are {how} some "
                f"that go in there in the single process"]  # fmt: skip
    return []
