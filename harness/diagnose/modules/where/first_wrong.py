"""Where a step goes wrong: a module that is wrong where all that leads to it is right."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from sumgrad.diagnose.modules.values.matching import SAME_FACTOR
from sumgrad.diagnose.modules.values.seen import Seen, constant
from sumgrad.diagnose.modules.where.look import Look
from sumgrad.record.trace import LOSS
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FirstWrong:
    """At `wrong` something is wrong, at none of `beside` yet.

    beside: in the forward what it is made from, in the backward what is made from it, or LOSS; the
    nearest that could be compared on every way, in the order in which a step meets them. seen: what
    is wrong of it. ratio: the gradient is right there but for this factor. lost: none reaches it.
    emptied: none reaches a part of its vectors. by_vector: the gradient is right there but for a
    factor of its own in each vector. over_all: only the sum over all ranks is wrong.
    """

    wrong: str
    seen: tuple[Seen, ...]
    beside: tuple[str, ...] = ()
    ratio: float | None = None
    lost: bool = False
    emptied: bool = False
    by_vector: bool = False
    over_all: bool = False

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({s.rank for s in self.seen}))

    @property
    def modules(self) -> tuple[str, ...]:
        """What of `beside` is a module."""
        return tuple(m for m in self.beside if m != LOSS)


def first_wrong_forward(look: Look) -> FirstWrong | None:
    """What is right again in a module made from it was computed in another way, and is no fault.

    Of modules that are called again and again on the way, the one that a rank meets first.
    """
    wrong = _wrong_modules(look)
    if not wrong:
        return None
    module = next((m for m in wrong[1:] if _is_met_before(look, m, wrong[0])), wrong[0])
    below = look.paths.next_below(module, lambda m: _vouches(look, m))
    right = sorted(below, key=look.modules.index)
    return FirstWrong(wrong=module, seen=tuple(_wrong_calls(look, module)), beside=tuple(right))


def first_wrong_elsewhere(look: Look, found: FirstWrong) -> dict[str, tuple[int, ...]]:
    """On ranks where that module is not wrong, those that are and that nothing wrong leads to, as
    other experts: module -> its ranks, each rank once. None that is wrong where that is, too: what
    several ranks add up is wrong on all of them."""
    out: dict[str, tuple[int, ...]] = {}
    told = {*found.ranks}
    for module in _wrong_modules(look):
        ranks = {s.rank for s in _wrong_calls(look, module)}
        is_there_too, ranks = not ranks.isdisjoint(found.ranks), ranks - told
        below = look.paths.all_below(module)
        if is_there_too or not ranks or not below or any(look.forward(m) == "wrong" for m in below):
            continue
        told |= ranks
        out[module] = tuple(sorted(ranks))
    return out


def met_first(look: Look, found: FirstWrong) -> FirstWrong:
    """What these ranks meet first of all that is wrong, where it is the same on all of them: a rank
    may run modules in another order than the single process does."""
    first: dict[int, tuple[int, str]] = {}
    for module in _wrong_modules(look):
        for s in _wrong_calls(look, module):
            if s.rank in found.ranks:
                first[s.rank] = min(first.get(s.rank, (s.at, module)), (s.at, module))
    modules = {module for _, module in first.values()}
    if len(modules) != 1 or modules == {found.wrong}:
        return found
    (module,) = modules
    seen = tuple(s for s in _wrong_calls(look, module) if s.rank in found.ranks)
    return FirstWrong(wrong=module, seen=seen)


def _wrong_modules(look: Look) -> list[str]:
    """But for those that are right again in what is made from them."""
    return [
        m
        for m in look.modules
        if look.forward(m) == "wrong" and (not _is_right_again(look, m) or _in_one_output(look, m))
    ]


def _wrong_calls(look: Look, module: str) -> list[Seen]:
    return [s for s in look.seen[module] if s.forward == "wrong" and not s.call.recomputed]


def _is_met_before(look: Look, module: str, first: str) -> bool:
    """Whether the first is made from this one in another call, and on each rank where it is wrong
    an earlier call of this one is, which follows right calls of the first."""
    if first not in look.paths.all_above(module):
        return False
    mine, its = _wrong_calls(look, module), _wrong_calls(look, first)
    for rank in {s.rank for s in its}:
        starts = min(s.at for s in its if s.rank == rank)
        earlier = [s.at for s in mine if s.rank == rank and s.at < starts]
        if not earlier:
            return False
        right = [s.at for s in look.seen[first] if s.rank == rank and s.forward == "right"]
        if not any(at < min(earlier) for at in right):
            return False
    return True


def _is_right_again(look: Look, module: str) -> bool:
    """Whether something right is made from it. Of what is right in those vectors alone that count,
    the others may lead on: not where something else made from it is wrong up to the end. Nor what
    no gradient passes, where one passes it, or should: that may be made from something else."""
    above = look.paths.all_above(module) - {LOSS}
    passed = module in look.paths.known or _is_passed(look, module)
    right = [m for m in above if look.forward(m) == "right" and (not passed or _is_passed(look, m))]
    if not right or any(_in_full(look, m) for m in right):
        return bool(right)
    return not any(
        look.forward(m) == "wrong"
        and not any(look.forward(a) == "right" for a in look.paths.all_above(m) - {LOSS})
        for m in above
    )


def _is_passed(look: Look, module: str) -> bool:
    """Whether a gradient reaches its output in some call."""
    return any(s.call.operation_back is not None for s in look.seen[module])


def _in_full(look: Look, module: str) -> bool:
    """Whether all vectors of a right output were compared."""
    return all(
        s.where is not None and len(s.where.picked) == math.prod(s.shape[:-1])
        for s in look.seen[module]
        if s.forward == "right" and not s.call.recomputed
    )


def _in_one_output(look: Look, module: str) -> bool:
    """Whether one of its outputs is wrong and another is right, from which the others are made."""
    states: dict[int, set[str]] = {}
    for s in look.seen[module]:
        if not s.call.recomputed:
            states.setdefault(s.call.part, set()).add(s.forward)
    return {"right"} in states.values() and any("wrong" in own for own in states.values())


def _vouches(look: Look, module: str) -> bool:
    """Whether its output is right, and in its place: what all rows share, as embeddings of
    positions, is found by its values wherever it belongs."""
    return look.forward(module) == "right" and not look.shared(module)


def first_wrong_recomputed(look: Look) -> FirstWrong | None:
    """A checkpoint, torch's or one by hand, that computes something else the second time."""
    for module in look.modules:
        wrong = [s for s in look.seen[module] if s.call.recomputed and s.forward == "wrong"]
        if wrong and look.forward(module) == "right":
            return FirstWrong(wrong=module, seen=tuple(wrong))
        by_hand = _again_by_hand(look.seen[module])
        if by_hand:
            return FirstWrong(wrong=module, seen=by_hand)
    return None


def _again_by_hand(found: Sequence[Seen]) -> tuple[Seen, ...]:
    """Calls that are wrong and get a gradient, where as many right ones of the rank, with nothing
    else in their place, get none: what an earlier call gave is computed again for the backward."""
    out: list[Seen] = []
    for rank in {s.rank for s in found}:
        mine = [s for s in found if s.rank == rank and not s.call.recomputed]
        reached = [s for s in mine if s.call.operation_back is not None]
        wrong = [s for s in reached if s.forward == "wrong"]
        right = [s.where for s in reached if s.where is not None]
        left = [
            s
            for s in mine
            if s.forward == "right"
            and s.call.operation_back is None
            and s.where is not None
            and not any(torch.equal(s.where.found, w.found) for w in right)
        ]
        if not wrong:
            continue
        if sorted((s.call.part, s.shape) for s in wrong) != sorted(
            (s.call.part, s.shape) for s in left
        ):
            return ()  # another output of the same calls, or a part of them
        if min(s.call.number for s in wrong) < min(s.call.number for s in left):
            return ()
        out += wrong
    return tuple(sorted(out, key=lambda s: (s.rank, s.call.number)))


def first_wrong_backward(look: Look, failing: Sequence[str]) -> FirstWrong | None:
    """Against the order of the forward. failing: modules that own a wrong gradient."""
    order = list(reversed(look.modules))
    odd = {module: found for module in order if (found := _odd(look, module)) is not None}
    right = {module for module in order if module not in odd and look.backward(module) == "right"}
    # What is right again in a module that it is made from was put together in another way, unless
    # its own parameters are wrong: then the way down passed by its side.
    passed: dict[str, FirstWrong] = {}
    for module, found in odd.items():
        if _is_right_behind(look, found, passed):
            continue
        one_part = found.lost and any(s.backward == "right" for s in look.seen[module])
        apart = module in failing or one_part or found.emptied
        below = right & look.paths.all_below(module)
        if apart or all(_is_as_wrong(look, m, found) for m in below):
            return found
        passed[module] = found
    return None


def _is_right_behind(look: Look, found: FirstWrong, passed: Mapping[str, FirstWrong]) -> bool:
    """Whether what reaches it has the factor of what is above modules that were passed over, and
    another only than these have: as where what reached them was seen before a hook."""
    beside, over = [*found.beside], False
    while odd := [m for m in beside if m in passed]:
        above = {a for m in odd for a in passed[m].beside}
        beside, over = [m for m in {*beside, *above} if m not in odd], True
    return over and found.ratio is not None and all(
        (f := constant(s.factors)) is not None
        and (before := _factor_above(look, beside, s)) is not None
        and abs(f - before) <= SAME_FACTOR * abs(before)
        for s in found.seen
    )  # fmt: skip


def _is_as_wrong(look: Look, module: str, found: FirstWrong) -> bool:
    """Whether what reaches a module has the factor that is too much at another: it goes on so."""
    if found.ratio is None:
        return False
    there = {constant(s.factors) for s in found.seen}
    factors = [constant(s.factors) for s in look.seen[module] if s.backward == "right"]
    return bool(factors) and all(
        f is not None and any(w is not None and abs(f - w) <= SAME_FACTOR * abs(w) for w in there)
        for f in factors
    )


def _odd(look: Look, module: str) -> FirstWrong | None:
    """What is wrong of the gradients that reach a module."""
    above = look.paths.next_above(module, lambda m: look.backward(m) == "right")
    order = {m: i for i, m in enumerate((*look.modules, LOSS))}
    beside = tuple(sorted(above, key=order.__getitem__, reverse=True))
    wrong = [s for s in look.seen[module] if s.backward == "wrong"]
    if wrong:
        lost = all(s.wrong is None for s in wrong)
        return FirstWrong(wrong=module, seen=tuple(wrong), beside=beside, lost=lost)
    emptied = [e for s in look.seen[module] if (e := _emptied(look, beside, s)) is not None]
    if emptied:
        return FirstWrong(wrong=module, seen=tuple(emptied), beside=beside, emptied=True)
    together = [s for s in look.seen[module] if s.over_all == "wrong"]
    if together:
        return FirstWrong(wrong=module, seen=tuple(together), beside=beside, over_all=True)
    jumps: list[tuple[Seen, float]] = []
    uneven: list[Seen] = []
    for s in look.seen[module]:
        factor, before = constant(s.factors), _factor_above(look, beside, s)
        if s.backward != "right" or s.factors is None or before is None:
            continue
        if factor is None:
            # Of a table that is cut each rank takes others' rows for nothing: these have none.
            told = s.factors[~s.factors.isnan() & (s.factors != 0)]
            unlike = len(told) > 1 and constant(told) is None
            uneven += [s] if before and unlike and _is_told_in_it(look, beside, s) else []
        elif abs(factor - before) > SAME_FACTOR * max(abs(before), abs(factor)):
            jumps.append((s, factor / before if before else float("inf")))
    if uneven:
        return FirstWrong(wrong=module, seen=tuple(uneven), beside=beside, by_vector=True)
    if not jumps:
        return None
    first = jumps[0][1]
    same = all(abs(ratio - first) <= SAME_FACTOR * abs(first) for _, ratio in jumps)
    seen = tuple(s for s, _ in jumps)
    lost = all(constant(s.factors) == 0 for s in seen)
    ratio = first if same and not lost else None
    return FirstWrong(wrong=module, seen=seen, beside=beside, ratio=ratio, lost=lost)


def _is_told_in_it(look: Look, above: Sequence[str], s: Seen) -> bool:
    """Whether what is made from a call's vectors, of several numbers each, is right in that call
    itself: of single numbers any factor fits, and other ranks' say nothing of it."""
    mine = [t for m in above if m != LOSS for t in look.seen[m]
            if (t.rank, t.call.number) == (s.rank, s.call.number)]  # fmt: skip
    return s.shape[-1:] != (1,) and bool(mine) and all(t.backward == "right" for t in mine)


def _emptied(look: Look, beside: Sequence[str], s: Seen) -> Seen | None:
    """The same as wrong where some of its vectors have no gradient, here or elsewhere, and the
    others the one factor of all that is made from it: a part of it is cut off."""
    if s.backward != "right" or s.factors is None or s.where is None or s.shared:
        return None
    none, before = s.factors == 0, _factor_above(look, beside, s)
    others = constant(s.factors[~none])
    if not bool(none.any()) or not before or others is None:
        return None
    if abs(others - before) > SAME_FACTOR * abs(before):
        return None
    if bool((s.where.found[none].any(0) & _reached(look, s)).any()):
        return None  # as where a table is cut, and each rank takes what others have for nothing
    return replace(s, backward="wrong", wrong=s.where.picked[none])


def _reached(look: Look, s: Seen) -> Tensor:
    """(N,) the single process's vectors that have a gradient on some rank."""
    assert s.where is not None
    out = torch.zeros(s.where.found.shape[1], dtype=torch.bool)
    for other in look.seen[s.call.module]:
        if other.call.part != s.call.part or other.where is None or other.factors is None:
            continue
        live = (other.factors != 0) & ~other.factors.isnan()
        out |= other.where.found[live].any(0)
    return out


def _is_another_output(t: Seen, s: Seen) -> bool:
    """Whether it is of a module around this one, and single numbers, of which any factor fits: it
    may be made of something else, as one of several outputs."""
    outer, inner = t.call.module, s.call.module
    around = not outer or inner.startswith(f"{outer}.")
    return around and t.shape[-1:] == (1,) != s.shape[-1:]


def _is_of_the_same(look: Look, t: Seen, s: Seen) -> bool:
    """Whether a call of what is above may take what a call gave: by their numbers, or, where one of
    the two is called more often, as an encoder that some micro-batches do without, by the order."""
    if t.call.recomputed or s.call.recomputed:
        return True
    mine, its = (_calls_on(look, one.call.module, s.rank) for one in (s, t))
    if t.rank != s.rank or len(mine) == len(its):
        return t.call.number == s.call.number
    next_one = min((at for at in mine.values() if at > s.at), default=math.inf)
    return s.at < t.at < next_one


def _calls_on(look: Look, module: str, rank: int) -> dict[int, int]:
    """By number, where in the trace a rank's calls are that are no recomputation."""
    own = [s for s in look.seen[module] if s.rank == rank and not s.call.recomputed]
    return {s.call.number: s.at for s in own}


def _factor_above(look: Look, above: Sequence[str], s: Seen) -> float | None:
    """The one factor that a call's gradient had in all that is made from its output.

    Of the same rank, or of all where it has none of them, as the next stage of a pipeline. What is
    computed again is counted otherwise.
    """
    found = [
        t
        for m in above
        if m != LOSS
        for t in look.seen[m]
        if _is_of_the_same(look, t, s) and not _is_another_output(t, s)
    ]
    told = [t for t in found if t.backward != "untold"]
    mine = [t for t in told if t.rank == s.rank] or told
    factors = [constant(t.factors) for t in mine if t.backward == "right"]
    first = factors[0] if factors else None
    if first is None or len(factors) < len(mine):
        return None
    known = [f for f in factors if f is not None and abs(f - first) <= SAME_FACTOR * abs(first)]
    return first if len(known) == len(factors) else None
