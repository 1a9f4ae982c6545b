"""A softmax in which more numbers count than in the single process, or fewer, in words."""

from __future__ import annotations

from collections.abc import Sequence

from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.looked import as_a_hint
from sumgrad.diagnose.modules.in_code.lines import AtLine
from sumgrad.diagnose.modules.in_code.masked_otherwise import known_rows, masked_otherwise


@as_a_hint
def masked_in_words(case: Case, found: Sequence[AtLine]) -> list[str]:
    """Of the first lines that give what the single process has nowhere, the first rank's."""
    traces = case.traces
    if traces is None or not found:
        return []
    line = found[0]
    computed = traces.ranks[line.rank].computed
    every = [c for c in computed.computations if c.site == line.mine.site]
    known = known_rows(line.mine.function, traces.single.computed)
    told = ((c, masked_otherwise(c, computed, known)) for c in every)
    call, one = next(((c, one) for c, one in told if one is not None), (line.mine, None))
    if one is None:
        return []
    shape = computed.values[call.uses[0]].shape
    of = f" of {shape[-2]}" if len(shape) > 1 else ""
    place = one.row % shape[-2] if len(shape) > 1 else one.row
    more = "more" if one.now > one.was else "fewer"
    rest = f", and so in {one.num - 1} more of its rows" if one.num > 1 else ""
    return [f"on rank {line.rank} {more} numbers count in what it takes: at place {place}{of} "
            f"{one.now} of them, and in the single process {one.was} of the same{rest}: look at "
            f"the mask that is added or filled in before"]  # fmt: skip
