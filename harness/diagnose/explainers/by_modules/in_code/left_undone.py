"""What the single process computes and no rank does, beside a cause, in words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from sumgrad.base.outcome import some_of, spans
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.in_code.branches import KINDS
from sumgrad.diagnose.explainers.by_modules.in_code.lines import expression
from sumgrad.diagnose.explainers.by_modules.looked import as_a_hint
from sumgrad.diagnose.modules.in_code.left_undone import (
    InPlace,
    left_undone,
    left_unmasked,
    other_functions,
)
from sumgrad.diagnose.modules.in_code.options import unlike_options
from sumgrad.diagnose.modules.values.numbers import Numbers
from sumgrad.record.computed import Computation
from sumgrad.record.trace import Traces

MOST = 2  # of one kind
HAS_NO_RANK = "gives from what ranks have, too, numbers that no rank has, nor what is made of them"
CALLS_NO_RANK = "changes numbers that ranks have, too, and no rank calls the like on them"


def without_what_is_left_undone(because: Sequence[str]) -> tuple[str, ...]:
    """Beside an edit that makes it right: ranks may do the same in another way."""
    return tuple(line for line in because if not line.endswith((HAS_NO_RANK, CALLS_NO_RANK)))


def with_what_is_left_undone(case: Case, diagnosis: Diagnosis) -> Diagnosis:
    """Of a step whose tensors are float64. It comes first where nothing is known."""
    traces, dtype = case.traces, case.record.spec.tiers[case.tier]
    if traces is None or dtype != "float64" or diagnosis.kind not in KINDS:
        return diagnosis
    said = tuple(_said(traces))
    if diagnosis.standing == "open":
        return replace(diagnosis, because=(*said, *diagnosis.because))
    return replace(diagnosis, because=(*diagnosis.because, *said))


@as_a_hint
def _said(traces: Traces) -> list[str]:
    ranks = {rank: trace.computed for rank, trace in traces.ranks.items()}
    every, whole = [*ranks.values()], traces.single.computed
    numbers = Numbers(whole.values)
    return [
        *_in_place_of_others(other_functions(ranks, whole, numbers)),
        *_undone(left_undone(every, whole), HAS_NO_RANK),
        *_undone(left_unmasked(every, whole, numbers), CALLS_NO_RANK),
        *_otherwise(traces),
    ]


def _undone(found: Sequence[Computation], what: str) -> Iterator[str]:
    shown = list(dict.fromkeys(expression(c) for c in found))
    if shown:
        lines = some_of(shown[:MOST]) + (" and others" if len(shown) > MOST else "")
        yield f"in the single process {lines} {what}"


def _in_place_of_others(found: Iterable[InPlace]) -> Iterator[str]:
    ranks: dict[tuple[str, str, str], set[int]] = {}
    for one in found:
        key = expression(one.mine), expression(one.its), one.its.function
        ranks.setdefault(key, set()).add(one.rank)
    for (mine, its, function), on in list(ranks.items())[:MOST]:
        yield (f"{mine} takes on rank {spans(sorted(on))} what {its} takes in the single process, "
               f"and no rank calls {function} on it")  # fmt: skip


def _otherwise(traces: Traces) -> Iterator[str]:
    ranks: dict[tuple[str, str, str], list[int]] = {}
    for rank, trace in sorted(traces.ranks.items()):
        for one in unlike_options(trace.computed, traces.single.computed):
            on = ranks.setdefault((expression(one.mine), one.now, one.was), [])
            on += [] if rank in on else [rank]
    for (mine, now, was), on in list(ranks.items())[:MOST]:
        yield (f"{mine} has {now} on rank {spans(on)}, and all calls of it in the single process "
               f"have {was}")  # fmt: skip
