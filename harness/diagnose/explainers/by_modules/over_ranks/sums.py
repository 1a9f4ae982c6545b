"""Sums that are not what they should be, by what the ranks put in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from sumgrad.base.outcome import spans
from sumgrad.diagnose.explainers.by_modules.looked import fraction_of
from sumgrad.diagnose.explainers.by_modules.over_ranks.at_fault import AtFault, Looking
from sumgrad.diagnose.modules.over_ranks.collectives import SAME, Collective, part_of_rank, times_of
from sumgrad.diagnose.modules.over_ranks.fitted_parts import (
    Fitted,
    accounts_for,
    fit_parts,
    is_whole_already,
)
from sumgrad.diagnose.modules.over_ranks.right_sums import Truth
from sumgrad.diagnose.names import axis_groups
from torch import Tensor


def other_sums(looking: Looking, op: Collective) -> AtFault | None:
    """A sum whose parts, with other factors or of other ranks, are what is right there."""
    if not op.is_sum and op.family != "broadcast":
        return None
    shown = looking.shown(op)
    larger = [
        ranks for _, sets in axis_groups(looking.case) for ranks in sets if {*op.ranks} < {*ranks}
    ]
    whole_already = None
    for truth in looking.truths(op):
        other = _other_sum(looking, op, truth, shown, larger)
        if other is None:
            continue
        told, right = other
        off = looking.off_by(op, truth)
        if accounts_for(off, op, right, looking.tolerance):
            put_right = f"with that put right {looking.words(truth.module)} is the single process's"
            return replace(told, because=(*told.because, put_right))
        # A hook of the step's own on what a module gives comes after what is seen of it here.
        if off is None and looking.back and told.kind == "double_reduction":
            whole_already = whole_already or told
    return whole_already


def zeros_put_in(looking: Looking, op: Collective) -> AtFault | None:
    """A sum of a linear layer's parts that is not right, into which a rank puts nothing although
    something goes into its part of the layer. Not where it is wrong on ranks before, without it."""
    if looking.rank != min(looking.found.ranks):
        return None
    members = [r for r in op.ranks if r in op.by_rank]
    empty = [r for r in members if not bool(op.by_rank[r].given.any())]
    if looking.back or not op.is_sum or not empty or 2 * len(empty) > len(members):
        return None
    for truth in looking.truths(op):
        off, module = looking.off_by(op, truth), truth.module
        if off is None or not bool(off.any()) or looking.look.sources.get(module) != "Linear":
            continue
        if all(looking.goes_into(module, rank) for rank in empty):
            return AtFault(
                kind="lost_contribution",
                cause=f"rank {spans(empty)} puts zeros into {looking.shown(op)}, although its "
                f"part of {module} has something to give",
                because=("what is not written yet, or is zeroed once more, looks like this",),
                ranks=tuple(empty),
            )
    return None


def _other_sum(
    looking: Looking, op: Collective, truth: Truth, shown: str, larger: Sequence[tuple[int, ...]]
) -> tuple[AtFault, Tensor] | None:
    """What a collective does otherwise if this is right there, and what it would give then."""
    tolerance, what = looking.tolerance, looking.what(truth)
    given = op.given(op.ranks)
    if given is None:
        return None
    if op.family == "broadcast":
        every = fit_parts(op, op.ranks, truth, tolerance, with_before=False)
        told = AtFault(
            kind="skipped_collective",
            cause=f"{shown} hands on what one rank has, where the sum of what all of them have is "
            f"right",
            because=(f"what the ranks have before it adds up to {what}",),
            ranks=op.ranks,
        )
        return (told, torch.stack(given).sum(0)) if every and every.all_once else None
    if is_whole_already(op, truth, tolerance):
        told = AtFault(
            kind="double_reduction",
            cause=f"what the ranks put into {shown} is whole already: it is counted "
            f"{len(op.ranks)} times",
            because=(f"every one of them puts in {what}",),
            ranks=op.ranks,
        )
        return (told, given[0]) if op.event.get("reduce") != "AVG" else None
    whole = fit_parts(op, op.ranks, truth, tolerance, with_before=False)
    if whole is not None and whole.all_once:
        told = AtFault(
            kind="avg",
            cause=f"{shown} averages (AVG), where the sum is meant",
            because=(f"what its ranks put in adds up to {what}, so that all that follows is "
                     f"divided by {len(op.ranks)}",),
            ranks=op.ranks,
        )  # fmt: skip
        return (told, torch.stack(given).sum(0)) if op.event.get("reduce") == "AVG" else None
    if whole is not None:
        other = _one_rank_otherwise(whole, shown, what)
        return None if other is None else (other, _put_together(op, whole))
    older = fit_parts(op, op.ranks, truth, tolerance, with_before=True)
    if older is not None and older.before:
        stale = _from_before(older, shown, what)
        return None if stale is None else (stale, _put_together(op, older))
    for ranks in larger:
        more = fit_parts(op, ranks, truth, tolerance, with_before=False)
        if more is not None and more.all_once:
            lacking = tuple(sorted({*ranks} - {*op.ranks}))
            told = AtFault(
                kind="too_few_ranks",
                cause=f"{shown} is over too few ranks: it lacks rank {spans(lacking)}",
                because=(f"only with what rank {spans(lacking)} has there it adds up to {what}",),
                ranks=op.ranks,
            )
            return told, _put_together(op, more)
    return None


def _put_together(op: Collective, fitted: Fitted) -> Tensor:
    """What ranks put in, with these factors."""
    now = [c * op.by_rank[r].given.double().reshape(-1) for r, c in fitted.factors.items()]
    for rank, c in fitted.before.items():
        held = op.by_rank[rank].before
        assert held is not None
        now.append(c * held.double().reshape(-1))
    return torch.stack(now).sum(0)


def _one_rank_otherwise(fitted: Fitted, shown: str, what: str) -> AtFault | None:
    """Parts that enter with another factor than those of most ranks, which enter once."""
    other = {r: c for r, c in fitted.factors.items() if abs(c - 1) > SAME}
    if 2 * len(other) > len(fitted.factors) or any(abs(c) <= SAME for c in other.values()):
        return None
    factors = [1 / c for c in other.values()]
    alike = max(factors) - min(factors) <= SAME
    named = f"{fraction_of(factors[0])} times what it should"
    return AtFault(
        kind="rank_factor",
        cause=f"rank {spans(sorted(other))} puts {named if alike else 'too much or too little'} "
        f"into {shown}",
        because=(f"without that what the ranks put in adds up to {what}",),
        ranks=tuple(sorted(other)),
    )


def _from_before(fitted: Fitted, shown: str, what: str) -> AtFault | None:
    """What a rank put in in the step before is in it once more."""
    if any(abs(c + 1) > SAME for c in fitted.before.values()):
        return None
    if any(abs(c - 1) > SAME for c in fitted.factors.values()):
        return None
    ranks = tuple(sorted(fitted.before))
    return AtFault(
        kind="stale_buffer",
        cause=f"what rank {spans(ranks)} puts into {shown} has on top what it put in there in the "
        f"step before: a buffer is not zeroed",
        because=(f"without it what the ranks put in adds up to {what}",),
        ranks=ranks,
    )


def other_weights_of_ranks(looking: Looking, op: Collective) -> AtFault | None:
    """A sum, or a mean, that is right with weights of the ranks, and that has them all alike."""
    got = op.own.got
    if not op.is_sum or got is None:
        return None
    for truth in looking.truths(op):
        off = looking.off_by(op, truth)
        found = fit_parts(op, op.ranks, truth, looking.tolerance, with_before=False)
        if off is None or found is None or len(found.factors) < len(op.ranks):
            continue
        used = times_of(off + part_of_rank(op, truth.target), got.double().reshape(-1))
        right = list(found.factors.values())
        if used is None or min(right) <= SAME or max(right) - min(right) <= SAME * max(right):
            continue
        times = 1 / len(op.ranks) if op.event.get("reduce") == "AVG" else 1.0
        shares = ", ".join(fraction_of(c) for c in right)
        return AtFault(
            kind="weights_of_ranks",
            cause=f"what the ranks put into {looking.shown(op)} is weighed alike, each by "
            f"{fraction_of(used * times)}, where it is right with weights of their own: {shares} "
            f"of rank {', '.join(map(str, found.factors))}",
            because=(
                f"with these weights it is {looking.what(truth)}",
                "a mean of means of unequally many looks like this",
            ),
            ranks=op.ranks,
        )
    return None
