"""A wrong gradient that is right somewhere else, in words: of other vectors, calls, targets."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from sumgrad.base.outcome import some_of, spans
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.in_code.lines import expression
from sumgrad.diagnose.explainers.by_modules.looked import line_and_code, traces_looked_at
from sumgrad.diagnose.modules.how_wrong.elsewhere import Elsewhere, gradients_elsewhere
from sumgrad.diagnose.modules.inputs.targets import Target, other_targets
from sumgrad.diagnose.modules.values.matching import vectors
from sumgrad.diagnose.modules.values.seen import constant
from sumgrad.diagnose.modules.values.whole import by_module
from sumgrad.diagnose.modules.weights.copies import Lost, lost_at_copies
from sumgrad.diagnose.modules.where.first_wrong import FirstWrong
from sumgrad.diagnose.modules.where.look import Look
from sumgrad.diagnose.modules.where.loss_weights import same
from sumgrad.record.computed import MODULE

MOST_TARGETS = 3  # that are written out


def is_zero(case: Case, found: FirstWrong) -> bool:
    """Whether the gradient is zero in all vectors that are wrong."""
    traces = traces_looked_at(case)
    for s in found.seen if traces is not None else ():
        assert traces is not None
        trace = traces.ranks[s.rank]
        gradient = trace.gradient_of(s.call)
        if gradient is None or s.wrong is None or bool(vectors(gradient)[s.wrong].any()):
            return False
    return traces is not None


def has_none_there(case: Case, found: FirstWrong) -> bool:
    """Whether the single process has no gradient at any of the vectors that are wrong."""
    traces = traces_looked_at(case)
    if traces is None:
        return False
    whole = by_module(traces.single, found.wrong.__eq__)
    for s in found.seen:
        wanted = whole.get((s.call.module, s.call.part))
        if wanted is None or s.where is None or s.wrong is None:
            return False
        mine = s.where.found[torch.isin(s.where.picked, s.wrong)].any(0)
        if not bool(mine.any()) or bool(wanted.gradients[mine].any()):
            return False
    return True


def of_other_places(case: Case, look: Look, found: FirstWrong) -> list[str]:
    """Gradients that are right somewhere else."""
    traces = traces_looked_at(case)
    if traces is None:
        return []
    dtype = case.record.spec.tiers[case.tier]
    told = gradients_elsewhere(traces, look, found.seen, dtype, factor_beside(look, found))
    alike: dict[str, list[int]] = {}
    for one in told:
        alike.setdefault(_elsewhere(one), []).append(one.rank)
    shown = [f"on rank {spans(ranks)} {text}" for text, ranks in alike.items()]
    return ["; ".join(shown[:MOST_TARGETS])] if shown else []


def factor_beside(look: Look, found: FirstWrong) -> float:
    """That of the right gradients beside what is wrong; 1 where it is not known."""
    factors = [constant(s.factors) for m in found.modules for s in look.seen[m]
               if s.rank in found.ranks and s.backward == "right"]  # fmt: skip
    known = [f for f in factors if f is not None]
    return known[0] if known and len(known) == len(factors) and same(known) else 1.0


def _elsewhere(one: Elsewhere) -> str:
    if one.level == "sums":
        summed: dict[int, list[int]] = {}
        for mine, its in one.calls:
            summed.setdefault(mine, []).append(its)
        which = [f"call {mine} gets those of call {spans(its)}" for mine, its in summed.items()]
        return (f"it is what belongs to several calls, added up: {some_of(which)}: look for what "
                f"is not cleared between them")  # fmt: skip
    if one.level == "numbers":
        return "all its numbers are among those of the right gradient, at other places or again"
    whose = f"vectors that rank {spans(one.holders)} holds"
    if not one.holders or one.holders == (one.rank,):
        whose = "other vectors" + (" of its own" if one.holders else "")
    if any(mine != its for mine, its in one.calls) and not one.added:
        which = [f"call {mine} gets that of call {its}" for mine, its in one.calls]
        return f"it is the gradient of {whose}: {some_of(which)}"
    if one.added:
        return f"it is the right one with the gradient of {whose} added"
    return f"it is the gradient of {whose}"


def of_other_targets(case: Case, look: Look, found: FirstWrong) -> list[str]:
    """Targets of a cross entropy that are others than the single process's."""
    traces = case.traces
    told = None if traces is None else other_targets(traces, found.wrong, found.seen)
    if not told:
        return []
    shown = [
        f"class {t.now} at {_token(t)}, where that has "
        + ("no gradient" if t.was is None else f"class {t.was}")
        for t in told[:MOST_TARGETS]
    ]
    if all(t.was is None for t in told):
        what = "of tokens that have none in the single process"
    else:
        what = "of other targets than the single process's"
    more = len(told) - len(shown)
    text = "; ".join([*shown, f"and at least {more} more"] if more else shown)
    return [f"it is the gradient {what}: {text}: look at how "
            f"targets are cut, shifted and masked"]  # fmt: skip


def _token(target: Target) -> str:
    s, at = target.seen, f"vector {target.vector}"
    if len(s.shape) > 2:
        at = f"position {target.vector % s.shape[1]}"
    where = s.where.picked.tolist().index(target.vector) if s.where is not None else 0
    row = -1 if s.rows is None else int(s.rows[where])
    return f"{at}{f' of row {row}' if row >= 0 else ''} on rank {s.rank}"


def lost_on_the_way(case: Case, look: Look, found: FirstWrong) -> list[str]:
    """What the gradient lacks, and that reached a copy of the output."""
    traces = traces_looked_at(case)
    if traces is None or found.over_all:
        return []
    try:
        lost = lost_at_copies(traces, found.seen, factor_beside(look, found))
    except (RuntimeError, ValueError, LookupError):
        return []  # as in looked(): a cause is not lost by a hint
    if lost is None:
        return []
    s, copies = lost
    where = f"on rank {s.rank} in call {s.call.number}"
    return [f"{where} it lacks exactly what reached {copies_in_words(copies)}"]


def copies_in_words(lost: Sequence[Lost]) -> str:
    """`its copy on rank 1 (made at FILE:12) and is not handed back`."""
    shown = "; ".join(_copy(one) for one in lost[:MOST_TARGETS])
    more = f"; {len(lost) - MOST_TARGETS} more copies" if len(lost) > MOST_TARGETS else ""
    return f"{shown}{more} and is not handed back"


def _copy(one: Lost) -> str:
    line, code = one.made
    module = one.taken.function.removeprefix(MODULE)
    by = expression(one.taken) if one.taken.line else module
    made = f"made at {line_and_code(line, code)}" if line else f"the one that {by} takes"
    often = f" in {one.backwards} of {one.of} backwards" if one.of > 1 else ""
    return f"its copy on rank {one.rank} ({made}){often}"
