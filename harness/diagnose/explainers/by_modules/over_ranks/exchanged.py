"""Which collective makes it wrong, between what is right and what is not: by what ranks put in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from sumgrad.base.outcome import spans
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.between import range_between
from sumgrad.diagnose.explainers.by_modules.looked import fraction_of, looked, traces_looked_at
from sumgrad.diagnose.explainers.by_modules.over_ranks.at_fault import AtFault, Looking
from sumgrad.diagnose.explainers.by_modules.over_ranks.sums import (
    other_sums,
    other_weights_of_ranks,
    zeros_put_in,
)
from sumgrad.diagnose.modules.over_ranks.collectives import SAME, Collective, collectives
from sumgrad.diagnose.modules.over_ranks.fitted_parts import fit_parts
from sumgrad.diagnose.modules.over_ranks.goes_on import (
    GoesOn,
    Source,
    goes_on,
    goes_on_in_sum,
    sources,
)
from sumgrad.diagnose.modules.where.first_wrong import FirstWrong
from sumgrad.diagnose.modules.where.look import Look
from sumgrad.record.trace import INTO, Traces

NOTHING = "a rank that has nothing to give is right to: then look elsewhere"
MOST = 12  # collectives in between that are looked at


def collective_at_fault(case: Case, found: FirstWrong, *, back: bool) -> AtFault | None:
    """The first one between what is right and what is wrong that its values accuse."""
    traces, look = traces_looked_at(case), looked(case)
    if traces is None or look is None:
        return None
    try:
        for rank in found.ranks:
            told = _on_rank(case, traces, look, found, rank, back=back)
            if told is not None:
                return told
    except (RuntimeError, ValueError, LookupError):
        return None  # tensors of shapes that nobody thought of
    return None


def _on_rank(
    case: Case, traces: Traces, look: Look, found: FirstWrong, rank: int, *, back: bool
) -> AtFault | None:
    between = range_between(case, found, rank, back=back)
    evidence = [other_sums, _given, _result, zeros_put_in, other_weights_of_ranks]
    if between is None and back and not found.modules:
        between, back = _towards_the_loss(found, rank), False  # what is issued in the forward
        evidence.remove(zeros_put_in)  # of scores of targets, say, that other ranks hold
    if between is None:
        return None
    looking = Looking(case=case, traces=traces, look=look, found=found, rank=rank, back=back)
    told = _first(looking, between, evidence)
    if told is not None or back:
        return told
    # What only some ranks have is taken for padding, and looks right where it is not summed.
    return _first(replace(looking, everywhere=True), range(between.start), (other_sums, _result))


def _towards_the_loss(found: FirstWrong, rank: int) -> range | None:
    """The numbers of what a rank issues between an output and the gradient that it gets."""
    s = next(s for s in found.seen if s.rank == rank)
    end = s.call.operation_back
    return None if end is None else range(s.call.operation, end)


def _first(
    looking: Looking,
    numbers: range,
    evidence: Sequence[Callable[[Looking, Collective], AtFault | None]],
) -> AtFault | None:
    """What the first kind of evidence says that tells of any of these operations."""
    asked = collectives(looking.traces, looking.rank, numbers.start, numbers.stop)[-MOST:]
    found = (see(looking, op) for see in evidence for op in asked)
    return next((told for told in found if told is not None), None)


def _given(looking: Looking, op: Collective) -> AtFault | None:
    """A rank that puts in something else than the others, which put in what a module gave them."""
    if op.family in ("broadcast", "scatter", "gather"):
        return None
    members = [r for r in op.ranks if r in op.by_rank]
    if len(members) < len(op.ranks):
        return None
    shown = looking.shown(op)
    empty = [r for r in members if not bool(op.by_rank[r].given.any())]
    found = {r: sources(looking.traces, op, r, back=looking.back) for r in members}
    told = _from_one_module(found, members)
    if told is None:
        return None
    module, others = told
    of = module.removeprefix(INTO)
    what = f"the gradient at {of}" if looking.back else f"what {of} gave"
    if {*empty} >= {*others}:
        return AtFault(
            kind="lost_contribution",
            cause=f"rank {spans(others)} puts zeros into {shown}, where others put {what}",
            because=("what is not written yet, or is zeroed once more, looks like this", NOTHING),
            ranks=tuple(others),
        )
    factors = {_factor(found[r], module) for r in others}
    (first, *more) = factors
    if first is None or more:
        return None  # it may be right to put in something else, as what is masked
    return AtFault(
        kind="rank_factor",
        cause=f"rank {spans(others)} puts {fraction_of(first)} times {what} into {shown}; "
        f"others put it in as it is",
        ranks=tuple(others),
    )


def _from_one_module(
    found: dict[int, list[Source]], members: Sequence[int]
) -> tuple[str, list[int]] | None:
    """The module that most ranks have it from as it is, and those that do not."""
    names = dict.fromkeys(s.module for own in found.values() for s in own if s.factor == 1.0)
    for module in names:
        has = [r for r in members if any((s.module, s.factor) == (module, 1.0) for s in found[r])]
        if 2 * len(has) > len(members) > len(has):
            return module, [r for r in members if r not in has]
    return None


def _factor(found: Sequence[Source], module: str) -> float | None:
    return next((s.factor for s in found if s.module == module), None)


def _result(looking: Looking, op: Collective) -> AtFault | None:
    """A right result in place of which something else goes on."""
    shown = looking.shown(op)
    if not op.is_sum:
        told = goes_on(op, looking.after(op))
        return None if told is None else _not_the_result(op, told, shown)
    for truth in looking.truths(op):
        found = fit_parts(op, op.ranks, truth, looking.tolerance, with_before=False)
        if found is None or not found.all_once:
            continue
        told = goes_on_in_sum(op, looking.off_by(op, truth))
        if told is not None:
            where = looking.words(truth.module)
            return _not_the_result(op, replace(told, where=where), shown)
    return None


def _not_the_result(op: Collective, told: GoesOn, shown: str) -> AtFault | None:
    if told.times != 1.0:
        if abs(told.times - len(op.ranks)) > SAME:
            return None
        return AtFault(
            kind="double_reduction",
            cause=f"the result of {shown} is counted {len(op.ranks)} times in {told.where}",
            ranks=op.ranks,
        )
    own = "zeros or its own part" if op.family == "all_gather" else "what it has itself"
    if told.own >= told.numel:
        return AtFault(
            kind="unused_result",
            cause=f"the result of {shown} is not used on rank {op.rank}: {told.where} has "
            f"{own} in its place",
            because=("reduced or gathered into a temporary, or read before it was there, it "
                     "looks like this",),
            ranks=(op.rank,),
        )  # fmt: skip
    return AtFault(
        kind="missing_wait",
        cause=f"the result of {shown} is read too early, or put back in part, on rank {op.rank}: "
        f"{told.where} has {own} in place of {told.own} of its {told.numel} numbers",
        because=(
            "wait for it before its first use; where it is waited for, look at what puts the "
            "result back",
        ),
        ranks=(op.rank,),
    )
