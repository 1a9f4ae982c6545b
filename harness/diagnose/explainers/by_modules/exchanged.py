"""Which collective makes it wrong, between what is right and what is not: by what ranks put in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from sumgrad.base.outcome import spans
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.between import is_in, range_between
from sumgrad.diagnose.explainers.by_modules.looked import fraction_of, looked, traces_looked_at
from sumgrad.diagnose.modules.collectives import (
    SAME,
    Collective,
    collectives,
    in_words,
    part_of_rank,
    times_of,
)
from sumgrad.diagnose.modules.first_wrong import FirstWrong
from sumgrad.diagnose.modules.fitted_parts import Fitted, accounts_for, fit_parts, is_whole_already
from sumgrad.diagnose.modules.goes_on import GoesOn, Source, goes_on, goes_on_in_sum, sources
from sumgrad.diagnose.modules.look import Look
from sumgrad.diagnose.modules.right_sums import Truth, off_by, truths
from sumgrad.diagnose.modules.seen import COARSE, TOLERANCES, constant
from sumgrad.diagnose.modules.whole import Whole, by_module
from sumgrad.diagnose.names import axis_groups
from sumgrad.record.trace import INTO, Traces
from torch import Tensor

NOTHING = "a rank that has nothing to give is right to: then look elsewhere"
MOST = 12  # collectives in between that are looked at
MOST_AFTER = 40  # tensors of modules after them


@dataclass(frozen=True, slots=True, kw_only=True)
class AtFault:
    """One collective that does what it should not. cause, because: in words. ranks: whose part."""

    kind: str
    cause: str
    because: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()


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
    except (RuntimeError, ValueError, IndexError, KeyError):
        return None  # tensors of shapes that nobody thought of
    return None


def _on_rank(
    case: Case, traces: Traces, look: Look, found: FirstWrong, rank: int, *, back: bool
) -> AtFault | None:
    between = range_between(case, found, rank, back=back)
    if between is None and back and not found.modules:
        between, back = _towards_the_loss(found, rank), False  # what is issued in the forward
    if between is None:
        return None
    looking = _Looking(case=case, traces=traces, look=look, found=found, rank=rank, back=back)
    told = _first(looking, between, (_sums, _given, _result, _zeros, _weights))
    if told is not None or back:
        return told
    # What only some ranks have is taken for padding, and looks right where it is not summed.
    return _first(replace(looking, everywhere=True), range(between.start), (_sums, _result))


def _towards_the_loss(found: FirstWrong, rank: int) -> range | None:
    """The numbers of what a rank issues between an output and the gradient that it gets."""
    s = next(s for s in found.seen if s.rank == rank)
    end = s.call.operation_back
    return None if end is None else range(s.call.operation, end)


def _first(
    looking: _Looking,
    numbers: range,
    evidence: Sequence[Callable[[_Looking, Collective], AtFault | None]],
) -> AtFault | None:
    """What the first kind of evidence says that tells of any of these operations."""
    asked = collectives(looking.traces, looking.rank, numbers.start, numbers.stop)[-MOST:]
    found = (see(looking, op) for see in evidence for op in asked)
    return next((told for told in found if told is not None), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Looking:
    """What is looked at, and from where. everywhere: any module may have the right sum, not only
    those around the wrong one."""

    case: Case
    traces: Traces
    look: Look
    found: FirstWrong
    rank: int
    back: bool
    everywhere: bool = False

    @property
    def tolerance(self) -> float:
        return TOLERANCES.get(self.case.record.spec.tiers[self.case.tier], COARSE)

    @property
    def factor(self) -> float | None:
        """Of the gradients of this rank: that of what is right beside; None where there are
        several."""
        if not self.back:
            return 1.0
        found = [
            constant(s.factors)
            for m in self.found.modules
            for s in self.look.seen[m]
            if s.rank == self.rank and s.backward == "right"
        ]
        known = [f for f in found if f]
        if not known or len(known) < len(found) or max(known) - min(known) > SAME * abs(known[0]):
            return None
        return known[0]

    def whole(self) -> dict[tuple[str, int], Whole]:
        """What may be the right sum: of the wrong module, of what is in it, of its neighbours; put
        together once for all collectives and ranks."""
        key = f"right sums of {self.found.wrong!r}, {self.back}, {self.everywhere}"
        if key not in self.case.known:
            self.case.known[key] = by_module(self.traces.single, self._is_near())
        found: dict[tuple[str, int], Whole] = self.case.known[key]
        return found

    def _is_near(self) -> Callable[[str], bool]:
        if self.everywhere:
            return lambda _: True
        wrong = self.found.wrong
        near = {wrong, f"{INTO}{wrong}", *self.found.beside}
        near |= {f"{INTO}{m}" for m in self.found.beside}
        if wrong:
            near |= {m for m in self.look.modules if is_in(m, wrong)}
        paths = self.look.paths
        near |= {*paths.next_below(wrong, lambda _: True)}
        if self.back:
            near |= paths.all_above(wrong) & {
                m for b in self.found.modules for m in paths.all_below(b)
            }
        return near.__contains__

    def truths(self, op: Collective) -> Iterator[Truth]:
        factor = self.factor
        if factor is not None:
            yield from truths(
                op, self.look, self.traces.single, self.whole(), back=self.back, factor=factor
            )

    def what(self, truth: Truth) -> str:
        """`what layers.0.down gives in the single process`."""
        gives = not self.back and not truth.module.startswith(INTO)
        text = f"what {truth.module} gives" if gives else self.words(truth.module)
        return f"{text} in the single process"

    def shown(self, op: Collective) -> str:
        return in_words(self.case.record, op)

    def goes_into(self, module: str, rank: int) -> bool:
        """Whether numbers that are not all zero go into a module on a rank."""
        trace = self.traces.ranks[rank]
        return any(
            call.module == f"{INTO}{module}" and bool(output.any())
            for call, output in zip(trace.calls, trace.outputs, strict=True)
        )

    def off_by(self, op: Collective, truth: Truth) -> Tensor | None:
        return off_by(self.traces, op, truth, back=self.back)

    def after(self, op: Collective) -> list[tuple[str, Tensor]]:
        """What came after a collective on this rank, with what it is in words."""
        trace, number = self.traces.ranks[self.rank], op.own.number
        near: list[tuple[str, Tensor]] = []
        for call, output, gradient in zip(trace.calls, trace.outputs, trace.gradients, strict=True):
            at, value = (call.operation_back, gradient) if self.back else (call.operation, output)
            if at is None or value is None or at <= number:
                continue
            near.append((self.words(call.module), value))
        lines = []
        if not self.back:
            for one in trace.computed.computations:
                for argument in one.takes:
                    if isinstance(argument, int):
                        value = trace.computed.values[argument]
                        lines.append((f"what `{one.code}` computes with", value))
        return [*near[:MOST_AFTER], *lines]

    def words(self, module: str) -> str:
        """`the output of down`, `the gradient of what goes into down`."""
        name = module.removeprefix(INTO)
        text = f"what goes into {name}" if module.startswith(INTO) else f"the output of {name}"
        return f"the gradient of {text}" if self.back else text


def _sums(looking: _Looking, op: Collective) -> AtFault | None:
    """A sum whose parts, with other factors or of other ranks, are what is right there."""
    if not op.is_sum and op.family != "broadcast":
        return None
    shown = looking.shown(op)
    larger = [
        ranks for _, sets in axis_groups(looking.case) for ranks in sets if {*op.ranks} < {*ranks}
    ]
    for truth in looking.truths(op):
        other = _other_sum(looking, op, truth, shown, larger)
        if other is None:
            continue
        told, right = other
        if accounts_for(looking.off_by(op, truth), op, right, looking.tolerance):
            put_right = f"with that put right {looking.words(truth.module)} is the single process's"
            return replace(told, because=(*told.because, put_right))
    return None


def _zeros(looking: _Looking, op: Collective) -> AtFault | None:
    """A sum of a linear layer's parts that is not right, into which a rank puts nothing although
    something goes into its part of the layer."""
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
    looking: _Looking, op: Collective, truth: Truth, shown: str, larger: Sequence[tuple[int, ...]]
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


def _weights(looking: _Looking, op: Collective) -> AtFault | None:
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


def _given(looking: _Looking, op: Collective) -> AtFault | None:
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


def _result(looking: _Looking, op: Collective) -> AtFault | None:
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
        cause=f"the result of {shown} is read too early on rank {op.rank}: {told.where} has "
        f"{own} in place of {told.own} of its {told.numel} numbers",
        because=("wait for it before its first use",),
        ranks=(op.rank,),
    )
