"""A sum over ranks that is missing in the backward, beside what a residual brings, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from sumgrad.base.outcome import some_of, spans
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.between import without_place
from sumgrad.diagnose.explainers.by_modules.looked import (
    gone_into,
    line_and_code,
    traces_looked_at,
    unless_it_fails,
)
from sumgrad.diagnose.modules.how_wrong.missing_sum import SUMMED, MissingSum, missing_sum
from sumgrad.diagnose.modules.values.seen import TOLERANCES
from sumgrad.diagnose.modules.values.whole import by_module
from sumgrad.diagnose.modules.where.first_wrong import FirstWrong
from sumgrad.diagnose.modules.where.look import Look
from sumgrad.diagnose.names import axis_groups
from sumgrad.record.computed import MODULE, Computation
from sumgrad.record.trace import INTO, Traces

NEAREST = 8  # modules made from what is wrong that are looked at


@dataclass(frozen=True, slots=True, kw_only=True)
class Lacking:
    """The sum, in words; because: where it is seen, and where to look."""

    cause: str
    because: tuple[str, ...]


@unless_it_fails
def lacking_sum(case: Case, look: Look, found: FirstWrong) -> Lacking | None:
    """Of a gradient that is wrong on each rank, and right as a sum but for what all have."""
    traces, dtype = traces_looked_at(case), case.record.spec.tiers[case.tier]
    if traces is None or dtype != "float64" or found.lost or found.over_all or found.emptied:
        return None
    one = _first(case, look, found, traces, TOLERANCES[dtype])
    if one is None:
        return None
    kept = gradient_of_kept(case, one.kept)
    later = "" if one.kept.startswith(SUMMED) else (
        f" (or, where gradients are summed over it later, {kept} is in on each rank as if it were "
        f"a share)"
    )  # fmt: skip
    it = "it" if one.of == found.wrong else f"the gradient of {kept_in_words(one.of)}"
    cause = (f"a sum over {one.axis} is missing on the way{later}: summed over rank "
             f"{spans(list(one.ranks))} {it} is right, with {kept} counted once, which each has "
             f"whole")  # fmt: skip
    parts = _parts(look, found, one)
    because = [f"on the way the gradient that reaches {some_of(parts)} is a part on each rank, "
               f"whole only when summed over {one.axis}"] if parts else []  # fmt: skip
    uses = [*_uses(traces, one, parts), *_ways_beside(traces, one)]
    if parts and not uses:  # a script's lines are not recorded
        uses = [f"look at what takes what {parts[0]} gives: a sum of its gradient that is missing "
                f"belongs there"]  # fmt: skip
    return Lacking(cause=cause, because=(*because, *uses))


def _first(
    case: Case, look: Look, found: FirstWrong, traces: Traces, tolerance: float
) -> MissingSum | None:
    """Of what is wrong, or else of what goes into a module that is made from it and is near."""
    above = look.paths.all_above(found.wrong)
    near = [m for m in look.modules if m in above and m not in found.beside][:NEAREST]
    into = [tuple(s for s in gone_into(case, m) if s.backward == "wrong")
            for m in (*near, *found.modules)]  # fmt: skip
    for seen in (found.seen, *(own for own in into if own)):
        whole = by_module(traces.single, seen[0].call.module.__eq__)
        one = missing_sum(traces, seen, whole, axis_groups(case), tolerance)
        if one is not None:
            return one
    return None


def gradient_of_kept(case: Case, name: str) -> str:
    """Of a module, of INTO and one, or of SUMMED and a collective."""
    if name.startswith(SUMMED):
        return f"what the {without_place(case, name.removeprefix(SUMMED))} gives"
    return f"the gradient of {kept_in_words(name)}"


def kept_in_words(name: str) -> str:
    """Of a module, or of INTO and one."""
    return name if name.startswith(INTO) else f"what {name or 'the model'} gives"


def _parts(look: Look, found: FirstWrong, one: MissingSum) -> list[str]:
    """What is made from it, whose gradient is a part over the same axis."""
    above = look.paths.all_above(found.wrong)
    return [m for m in look.modules if m in above
            and any(s.backward == "part" and s.axis == one.axis for s in look.seen[m])]  # fmt: skip


def _ways_beside(traces: Traces, one: MissingSum) -> Iterator[str]:
    """Where a sum gives a part of the gradient: all lines that take what it is the gradient of."""
    computed = traces.ranks[one.ranks[0]].computed
    if not one.kept.startswith(SUMMED):
        return
    given = {n for c in computed.computations if c.function == f"{MODULE}{one.of}" for n in c.gives}
    taken = (c for c in computed.computations if not given.isdisjoint(c.takes))
    ways = [
        *dict.fromkeys(
            _way(c)
            for c in taken
            if not c.function_of and not computed.with_graph.isdisjoint(c.gives)
        )
    ]
    if len(ways) > 1:
        yield (f"what {one.of} gives is taken by {' and '.join(ways)}: the gradient that comes "
               f"back from one of these is summed, that of another is not")  # fmt: skip


def _way(c: Computation) -> str:
    is_modules = c.function.startswith(MODULE)
    return c.function.removeprefix(MODULE) if is_modules else line_and_code(c.line, c.code)


def _uses(traces: Traces, one: MissingSum, parts: Sequence[str]) -> Iterator[str]:
    """The line that takes what the first of the parts gives."""
    trace = traces.ranks[one.ranks[0]]
    for part in parts[:1]:
        outputs = [o for c, o in zip(trace.calls, trace.outputs, strict=True)
                   if (c.module, c.part) == (part, 0)]  # fmt: skip
        computed = trace.computed
        for c in computed.computations:
            given = [n for n in c.takes if isinstance(n, int) and n in computed.with_graph]
            passes = any(n in computed.with_graph for n in c.gives)  # a gradient, back to it
            taken = any(torch.equal(computed.values[n], o) for n in given for o in outputs)
            if passes and taken:
                at = line_and_code(c.line, c.code)
                yield (f"what {part} gives is taken at {at}: a sum of its gradient that is missing "
                       f"belongs before it")  # fmt: skip
                return
