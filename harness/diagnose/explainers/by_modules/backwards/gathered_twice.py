"""Vectors that a line has twice on a rank, and others that it has not, in words."""

from __future__ import annotations

from collections.abc import Sequence

from sumgrad.base.outcome import some_of, spans
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.in_code.lines import expression
from sumgrad.diagnose.explainers.by_modules.looked import as_a_hint
from sumgrad.diagnose.modules.how_wrong.gathered_twice import Twice, Vector, gathered_twice

MOST_SHOWN = 2


@as_a_hint
def vectors_twice(case: Case, ranks: Sequence[int]) -> list[str]:
    """What wrong ranks have twice where a right one has each once; nothing where right ranks have
    some twice."""
    traces = case.traces
    found = [*gathered_twice(traces)] if traces is not None else []
    odd = {one.computation.site for one in found if one.rank not in ranks or one.like in ranks}
    told: dict[str, list[Twice]] = {}
    for one in found:
        if one.computation.site not in odd:
            told.setdefault(one.computation.site, []).append(one)
    if not told:
        return []
    first = next(iter(told.values()))
    said = [f"on rank {one.rank} {_of(one.twice)} twice and {_of(one.never)} not at all"
            for one in first[:MOST_SHOWN]]  # fmt: skip
    more = len(first) - len(said)
    said += [f"and the like on {more} more"] if more else []
    return [f"{expression(first[0].computation)} gives {'; '.join(said)}; on rank "
            f"{spans(sorted({one.like for one in first}))} each once"]  # fmt: skip


def _of(vectors: Sequence[Vector]) -> str:
    calls: dict[tuple[str, int, int], list[int]] = {}
    for v in vectors:
        calls.setdefault((v.module, v.rank, v.call), []).append(v.number)
    return some_of([f"vectors {spans(sorted(own))} of what {module or 'the model'} gives on rank "
                    f"{rank} in call {call}" for (module, rank, call), own in calls.items()]
                   )  # fmt: skip
