"""What all rows share, as a table of positions: its gradient is whole only over all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from sumgrad.diagnose.modules.values.matching import vectors
from sumgrad.diagnose.modules.values.seen import Seen, State, constant
from sumgrad.diagnose.modules.values.whole import Whole
from sumgrad.record.trace import Traces
from torch import Tensor

SAME = 1e-6  # factors that are one


def with_sums_over_all(
    seen: Mapping[str, list[Seen]],
    traces: Traces,
    whole: Mapping[tuple[str, int], Whole],
    tolerance: float,
) -> dict[str, list[Seen]]:
    """Whether what reaches an output that all rows share adds up, over all ranks and calls, to what
    reaches it in one process, up to a factor.

    Only where every other gradient has one factor on all ranks, or all are parts that add up, and
    is there as often for each row: a sum that ranks weigh in their own ways, or of some rows, would
    say nothing.
    """
    out = dict(seen)
    told = [f for f in seen.values() if any(s.backward in ("right", "part") for s in f)]
    even = {_is_even(f, traces, whole) for f in told}
    if not _weighed_alike(seen) or True not in even or False in even:
        return out
    for module, found in seen.items():
        for part in {s.call.part for s in found if s.shared}:
            mine = [s for s in found if s.call.part == part]
            state = _sum_of(mine, traces, whole[module, part], tolerance)
            if state != "untold":
                out[module] = [
                    replace(s, over_all=state) if s.call.part == part else s for s in out[module]
                ]
    return out


def with_vectors_of_several_calls(
    seen: Mapping[str, list[Seen]],
    traces: Traces,
    whole: Mapping[tuple[str, int], Whole],
    tolerance: float,
) -> dict[str, list[Seen]]:
    """Where some vectors stand in more calls than others, as of items that the single process
    encodes once for all rows, what reaches them in a call is a part: only the sum over all ranks
    and calls is told of, where every other gradient has one factor."""
    out, odd = dict(seen), []
    for module, found in seen.items():
        for part in {s.call.part for s in found if s.backward == "wrong"}:
            mine = [s for s in found if s.call.part == part]
            wanted = whole.get((module, part))
            if wanted is not None and _is_even(mine, traces, whole) is False and all(
                s.wrong is not None or s.backward != "wrong" for s in mine
            ):  # fmt: skip
                odd.append((module, part, mine, wanted))
    others = {m: f for m, f in seen.items() if m not in {module for module, *_ in odd}}
    factor = _common_factor([s for found in others.values() for s in found])
    for module, part, mine, wanted in odd if factor else ():
        state = _sum_of(mine, traces, wanted, tolerance, factor)
        if state != "untold":
            out[module] = [
                replace(s, backward="untold", wrong=None, factors=None, over_all=state)
                if s.call.part == part
                else s
                for s in out[module]
            ]
    return out


def _common_factor(seen: Sequence[Seen]) -> float | None:
    """Of the gradients that are right, where they have one."""
    told = [constant(s.factors) for s in seen if s.backward == "right"]
    known = [f for f in told if f is not None]
    same = bool(known) and all(abs(f - known[0]) <= SAME * abs(known[0]) for f in known)
    return known[0] if same and len(known) == len(told) else None


def _weighed_alike(seen: Mapping[str, Sequence[Seen]]) -> bool:
    """Whether all gradients that could be compared are right, and have one factor; or are parts."""
    told = [s for found in seen.values() for s in found if s.backward != "untold"]
    if told and all(s.backward == "part" for s in told):
        return True
    factors = [constant(s.factors) for s in told if s.backward == "right"]
    known = [f for f in factors if f is not None]
    if not known or len(known) < len(told):
        return False
    return all(abs(f - known[0]) <= SAME * abs(known[0]) for f in known)


def _is_even(
    found: Sequence[Seen], traces: Traces, whole: Mapping[tuple[str, int], Whole]
) -> bool | None:
    """Whether each vector that the loss uses came back from as many calls as every other, those
    that are the same taken together; None where that is not known."""
    for part in {s.call.part for s in found}:
        wanted = whole.get((found[0].call.module, part))
        if wanted is None:
            return None  # its calls give vectors of several lengths
        times = torch.zeros(len(wanted.outputs), dtype=torch.float64)
        for s in found:
            gradient = traces.ranks[s.rank].gradient_of(s.call)
            if s.call.part != part or gradient is None:
                continue
            if s.forward != "right" or s.where is None:
                return None
            if len(s.where.picked) < len(vectors(gradient)):
                return None  # some of its vectors were drawn
            may_be = s.where.found.double()
            times += (may_be / may_be.sum(1, keepdim=True).clamp(min=1)).sum(0)
        used = times[wanted.gradients.any(1)]
        if len(used) and float(used.max() - used.min()) > SAME:
            return False
    return True


def _sum_of(
    mine: Sequence[Seen],
    traces: Traces,
    wanted: Whole,
    tolerance: float,
    factor: float | None = None,
) -> State:
    """factor: that the sum must have; where it is not given, the one that fits best."""
    if len(wanted.outputs) != wanted.each or not bool(wanted.gradients.any()):
        return "untold"
    total = torch.zeros_like(wanted.gradients)
    for s in mine:
        gradient = traces.ranks[s.rank].gradient_of(s.call)
        if gradient is None:
            continue
        at = _each_at(s, len(vectors(gradient)))
        if at is None or s.where is None:
            return "untold"
        total[:, slice(*s.where.columns)].index_add_(0, at, vectors(gradient))
    if factor is None:
        factor = float((total * wanted.gradients).sum() / wanted.gradients.square().sum())
    bound = tolerance * float(wanted.gradients.abs().max()) * max(1.0, abs(factor))
    return "right" if float((total - factor * wanted.gradients).abs().max()) <= bound else "wrong"


def _each_at(s: Seen, num: int) -> Tensor | None:
    """(n,) the single process's vector that each of a call's is; None where that is not told."""
    if s.forward != "right" or s.where is None or len(s.where.picked) != num:
        return None
    if s.where.found.shape == (num, num) and bool(s.where.found.diagonal().all()):
        return torch.arange(num)  # some of them may be the same, as those of one distance are
    if not bool((s.where.found.sum(1) == 1).all()):
        return None
    return s.where.found.long().argmax(1)
