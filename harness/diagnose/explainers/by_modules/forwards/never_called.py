"""Modules that the single process calls and no rank does, where their parameters are not right."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from sumgrad.base.outcome import some_of, spans
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.between import is_in
from sumgrad.diagnose.explainers.by_modules.looked import source_from_here
from sumgrad.diagnose.modules.where.first_wrong import FirstWrong
from sumgrad.record.directory import Record
from sumgrad.record.trace import INTO


def called_on_ranks_alone(case: Case, found: FirstWrong) -> list[str]:
    """Modules inside of build()'s model that the wrong ranks call, and the single process does
    not; it itself is wrapped, and called as they like."""
    traces = case.traces
    if traces is None:
        return []
    there = {call.module.removeprefix(INTO) for call in traces.single.calls}
    left_out = {*traces.single.left_out}
    every = [
        {c.module for c in traces.ranks[r].calls if not c.module.startswith(INTO)} - there
        for r in found.ranks
    ]
    mine = set.intersection(*every) & {*traces.single.classes} - left_out - {""}
    outer = sorted(m for m in mine if not any(is_in(m, other) for other in mine))
    if not outer:
        return []
    is_are = "is" if len(outer) == 1 else "are"
    return [f"{some_of(outer)} {is_are} called on rank {spans(found.ranks)}, and not in the single "
            f"process"]  # fmt: skip


def never_called(
    record: Record, failed: Iterable[str], *, right: Collection[str] = ()
) -> list[str]:
    """failed: names of parameters whose gradients are wrong or missing. right: modules that give
    what they should, whatever is called in them."""
    traces = record.traces
    if traces is None:
        return []
    called = {call.module for trace in traces.ranks.values() for call in trace.calls}
    owners = {name.rpartition(".")[0] for name in failed}
    there = dict.fromkeys(c.module for c in traces.single.calls if not c.module.startswith(INTO))
    seen = {name for trace in traces.ranks.values() for name in trace.classes}
    # Not the inside of compiled ones; of the model itself the ranks may call the parts.
    never = [m for m in there if m and m not in called and m in seen]
    # The outermost of each, if parameters in it are not right.
    outer = [m for m in never if not any(is_in(m, other) for other in (*never, *right))]
    told = [m for m in outer if any(owner == m or is_in(owner, m) for owner in owners)]
    if not told or not called:
        return []
    names = [f"{m} ({source_from_here(s)})" if (s := traces.single.sources.get(m)) else m
             for m in told]  # fmt: skip
    return [f"{some_of(names)} is called in the single process and on no rank: what the ranks "
            f"run in its place could not be held against it"]  # fmt: skip
