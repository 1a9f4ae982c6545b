"""What is wrong where it stands and right in another place: other vectors', another order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from sumgrad.diagnose.modules.values.matching import MAX_PAIRS, vectors
from sumgrad.diagnose.modules.values.seen import TOLERANCES, Seen
from sumgrad.diagnose.modules.values.whole import Whole, by_module
from sumgrad.diagnose.modules.where.look import Look
from sumgrad.record.trace import Trace, Traces
from torch import Tensor

FEWEST = 6  # different numbers: fewer are found by chance
FEWEST_LEFT = 2  # numbers of a vector that tell which it is
EXACT = 1e-9  # of a number


@dataclass(frozen=True, slots=True, kw_only=True)
class Elsewhere:
    """What the wrong vectors of a rank's calls are in the single process.

    level: whole vectors of other places, only the same numbers in another order, or sums over calls
    of the same rank. added: the right ones with such ones added. holders: the ranks whose own these
    vectors are. calls: number of a call, and of the one of these ranks whose vectors' gradients it
    gets; or of each that is in its sum.
    """

    rank: int
    level: Literal["vectors", "numbers", "sums"]
    added: bool = False
    holders: tuple[int, ...] = ()
    calls: tuple[tuple[int, int], ...] = ()


def gradients_elsewhere(
    traces: Traces, look: Look, seen: Sequence[Seen], dtype: str, factor: float = 1.0
) -> list[Elsewhere]:
    """Of each rank with wrong gradients at a module, where all of its wrong vectors are that.

    factor: that all gradients have there which are right.
    """
    if not seen or not factor or dtype != "float64":
        return []
    module = seen[0].call.module
    whole = by_module(traces.single, module.__eq__)
    out = []
    for rank in sorted({s.rank for s in seen}):
        own = [s for s in seen if s.rank == rank and s.call.operation_back is not None]
        if any(not _is_finite(traces.ranks[rank].gradient_of(s.call)) for s in own):
            continue
        summed = _sums_of_calls(traces.ranks[rank], own, whole, look, factor)
        if summed is not None:
            out.append(summed)
            continue
        told = {_of_call(traces.ranks[rank], s, whole, look, factor) for s in own}
        if len(told) == 1 and (one := told.pop()) is not None:
            out.append(one)
        elif told and None not in told and len({(t.level, t.added) for t in told if t}) == 1:
            held = {r for t in told if t is not None for r in t.holders}
            calls = tuple(sorted(pair for t in told if t is not None for pair in t.calls))
            first = next(t for t in told if t is not None)
            out.append(replace(first, holders=tuple(sorted(held)), calls=calls))
    return out


def _is_finite(gradient: Tensor | None) -> bool:
    return gradient is None or bool(gradient.isfinite().all())


def numbers_elsewhere(traces: Traces, seen: Sequence[Seen], dtype: str) -> bool:
    """Whether all numbers of wrong outputs are the single process's of this module, and no zeros
    among them where that has none."""
    if not seen or dtype != "float64":
        return False
    whole = by_module(traces.single, seen[0].call.module.__eq__)
    for s in seen:
        wanted = whole.get((s.call.module, s.call.part))
        if wanted is None or s.wrong is None:
            return False
        trace = traces.ranks[s.rank]
        got = vectors(trace.output_of(s.call))[s.wrong]
        if not _are_there(got, wanted.outputs):
            return False
    return True


def zeroed(traces: Traces, seen: Sequence[Seen], dtype: str) -> bool:
    """Whether every wrong vector is one of the single process's of this module with zeros in some
    places, where that has none."""
    if not seen or dtype != "float64":
        return False
    whole = by_module(traces.single, seen[0].call.module.__eq__)
    for s in seen:
        wanted = whole.get((s.call.module, s.call.part))
        if wanted is None or s.wrong is None or wanted.outputs.shape[1] < FEWEST_LEFT:
            return False
        trace = traces.ranks[s.rank]
        got = vectors(trace.output_of(s.call))[s.wrong]
        if got.shape[1] != wanted.outputs.shape[1] or not bool((got == 0).any(1).all()):
            return False
        told = [row for row in got if int((row != 0).sum()) >= FEWEST_LEFT]
        if not told or not all(_is_one_with_zeros(row, wanted.outputs) for row in told):
            return False
    return True


def _is_one_with_zeros(row: Tensor, wanted: Tensor) -> bool:
    live = row != 0
    off = (wanted[:, live] - row[live]).abs() <= EXACT * row[live].abs()
    return bool((off.all(1) & (wanted[:, ~live] != 0).all(1)).any())


def _of_call(
    trace: Trace, s: Seen, whole: dict[tuple[str, int], Whole], look: Look, factor: float
) -> Elsewhere | None:
    wanted, at = whole.get((s.call.module, s.call.part)), trace.calls.index(s.call)
    given = trace.gradients[at]
    if wanted is None or given is None or s.wrong is None or s.where is None:
        return None
    places = {int(v): i for i, v in enumerate(s.where.picked)}
    start, end = s.where.columns
    got, there = vectors(given)[s.wrong] / factor, wanted.gradients[:, start:end]
    live = got.any(1)
    if not bool(live.any()):
        return None
    mine = s.where.found[[places[int(v)] for v in s.wrong]]
    bound = TOLERANCES["float64"] * float(there.abs().max())
    found = _near(got[live], there, bound)
    if bool(found.any(1).all()):
        holders = _holders(look, s, found)
        calls = _calls(look, s, found) if len(_own_calls(look, s)) > 1 else ()
        return Elsewhere(rank=s.rank, level="vectors", holders=holders, calls=calls)
    if bool((mine.sum(1) == 1).all()):
        rest = got - there[mine.int().argmax(1)]
        live = rest.abs().amax(1) > bound
        found = _near(rest[live], there, bound)
        if bool(live.any()) and bool(found.any(1).all()):
            held = _holders(look, s, found)
            return Elsewhere(rank=s.rank, level="vectors", added=True, holders=held)
    if _are_there(got, wanted.gradients):
        return Elsewhere(rank=s.rank, level="numbers")
    return None


def _sums_of_calls(
    trace: Trace, wrong: Sequence[Seen], whole: dict[tuple[str, int], Whole], look: Look, f: float
) -> Elsewhere | None:
    """Each wrong call's gradient as that of several calls of its rank, added up."""
    pairs: list[tuple[int, int]] = []
    for s in wrong:
        wanted = whole.get((s.call.module, s.call.part))
        given = trace.gradient_of(s.call)
        alike = [
            o
            for o in _own_calls(look, s)
            if o.shape == s.shape
            and o.where is not None
            and bool((o.where.found.sum(1) == 1).all())
        ]
        if wanted is None or given is None or s not in alike or len(alike) < 2:
            return None
        right = torch.stack([_right_of(o, wanted).reshape(-1) for o in alike], 1) * f
        got = vectors(given).reshape(-1)
        if right.shape[0] != len(got) or len(got) < 2 * len(alike):
            return None
        if not bool(torch.isfinite(got).all()) or not bool(torch.isfinite(right).all()):
            return None
        often = torch.linalg.lstsq(right, got[:, None], driver="gelsd").solution[:, 0]
        bound = TOLERANCES["float64"] * float(right.abs().max()) * len(alike)
        there = often.round()
        once = bool(((there == 0) | (there == 1)).all())
        if not once or float((got - right @ there).abs().max()) > bound:
            return None
        numbers = [o.call.number for o, n in zip(alike, there.tolist(), strict=True) if n]
        if len(numbers) < 2:
            return None
        pairs += [(s.call.number, number) for number in numbers]
    return Elsewhere(rank=wrong[0].rank, level="sums", calls=tuple(pairs)) if pairs else None


def _right_of(s: Seen, wanted: Whole) -> Tensor:
    assert s.where is not None
    start, end = s.where.columns
    return wanted.gradients[s.where.found.int().argmax(1), start:end]


def _near(got: Tensor, there: Tensor, bound: float) -> Tensor:
    """(n, N) bool; none where they are too many, or too short to tell."""
    if len(got) * len(there) > MAX_PAIRS or got.shape[1] < 2:
        return torch.zeros(len(got), len(there), dtype=torch.bool)
    live = there.abs().amax(1) > 1e3 * bound
    return (torch.cdist(got, there, p=float("inf")) <= bound) & live


def _holders(look: Look, mine: Seen, found: Tensor) -> tuple[int, ...]:
    """The ranks that have the outputs of these vectors; none where that is not told."""
    ranks: set[int] = set()
    for i in range(len(found)):
        of = {
            s.rank
            for s in look.seen[mine.call.module]
            if s.where is not None
            and s.call.part == mine.call.part
            and bool(s.where.found[:, found[i]].any())
        }
        if len(of) != 1:
            return ()
        ranks |= of
    return tuple(sorted(ranks))


def _own_calls(look: Look, s: Seen) -> list[Seen]:
    """The calls of the same module on its rank."""
    return [o for o in look.seen[s.call.module] if o.rank == s.rank and o.call.part == s.call.part]


def _calls(look: Look, mine: Seen, found: Tensor) -> tuple[tuple[int, int], ...]:
    """The one call of a rank that gave all vectors, where it is one."""
    numbers = {
        s.call.number
        for s in look.seen[mine.call.module]
        if s.where is not None
        and s.call.part == mine.call.part
        and bool((found & s.where.found.any(0)).any(1).all())
    }
    return ((mine.call.number, numbers.pop()),) if len(numbers) == 1 else ()


def _are_there(got: Tensor, wanted: Tensor) -> bool:
    """Whether every number of one is found in the other."""
    flat = got.reshape(-1)
    if bool((flat == 0).any()) and not bool((wanted == 0).any()):
        return False
    flat = flat[flat != 0]
    if len(flat.unique()) < FEWEST or not bool(flat.isfinite().all()):
        return False
    numbers = wanted.reshape(-1).sort().values
    width = EXACT * flat.abs()
    low = torch.searchsorted(numbers, flat - width)
    return bool((torch.searchsorted(numbers, flat + width, right=True) > low).all())
