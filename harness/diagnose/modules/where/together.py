"""Outputs that belong together, row by row: one tells by its values which rows they are of.

A number for each row, or a vector of positions, is soon found by its value in some row of the
single process. Whether it is that row's, is told by what stands beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from sumgrad.diagnose.modules.values.matching import vectors
from sumgrad.diagnose.modules.values.seen import FEWEST_LIVE, Seen
from sumgrad.diagnose.modules.values.whole import Whole
from sumgrad.diagnose.modules.where.paths import Paths
from sumgrad.record.trace import Traces
from torch import Tensor

Outputs = Mapping[tuple[str, int], Whole]


def with_rows_of_others(
    seen: Mapping[str, list[Seen]], traces: Traces, whole: Outputs, paths: Paths
) -> dict[str, list[Seen]]:
    """Right outputs as wrong where they are another row's than what stands beside them: another
    output of the same call, or what the same wrong module is made from, vector by vector."""
    out = dict(seen)
    for module, teller in [*((m, m) for m in seen), *_made_into_one(seen, paths)]:
        found = {id(s): odd for s, odd in _odd(out[module], out[teller], traces, whole)}
        if found and _are_the_lesser_part(found, out[module]):
            out[module] = [found.get(id(s), s) for s in out[module]]
    return out


def _made_into_one(seen: Mapping[str, list[Seen]], paths: Paths) -> list[tuple[str, str]]:
    """Pairs of modules that a wrong one is made from, which are right, call by call."""

    def right(module: str) -> bool:
        return all(s.forward == "right" for s in seen[module] if not s.call.recomputed)

    out: dict[tuple[str, str], None] = {}
    for module, found in seen.items():
        if any(s.forward == "wrong" for s in found):
            below = [m for m in paths.next_below(module, seen.__contains__) if right(m)]
            out |= {(a, b): None for a in below for b in below
                    if a != b and _calls(seen[a]) == _calls(seen[b])}  # fmt: skip
    return list(out)


def _calls(found: Sequence[Seen]) -> set[tuple[int, int]]:
    return {(s.rank, s.call.number) for s in found if not s.call.recomputed}


def _odd(
    mine: Sequence[Seen], others: Sequence[Seen], traces: Traces, whole: Outputs
) -> Iterator[tuple[Seen, Seen]]:
    """What is another row's, as it is and as wrong."""
    tellers = {(s.rank, s.call.number): s for s in others if _tells_rows(s)}
    for s in mine:
        teller = tellers.get((s.rank, s.call.number))
        wanted = whole.get((s.call.module, s.call.part))
        if teller is None or wanted is None or s.where is None or s.forward != "right":
            continue
        if s.call.recomputed or wanted.rows is None or teller.shape[0] != s.shape[0]:
            continue
        if not _tells_more(teller, s):
            continue
        strange = _strange(s, teller, wanted, whole[teller.call.module, teller.call.part])
        strange &= _counts(s, traces)
        if bool(strange.any()):
            odd = replace(s, forward="wrong", backward="untold", wrong=s.where.picked[strange],
                          factors=None, terms=None, told_by=teller.call)  # fmt: skip
            yield s, odd


def _tells_rows(s: Seen) -> bool:
    """By vectors: one number soon stands in another row, too."""
    if s.forward != "right" or s.rows is None or s.call.recomputed or s.shape[-1] < FEWEST_LIVE:
        return False
    return s.in_order and bool((s.rows >= 0).any())


def _tells_more(teller: Seen, s: Seen) -> bool:
    """By fewer vectors that each may be, or else by more numbers, or as the first of several."""

    def key(one: Seen) -> tuple[float, int, int]:
        assert one.where is not None
        own = one.where.found[one.where.found.any(1)].sum(1)
        return float(own.double().mean()), -one.shape[-1], one.call.part

    return key(teller) < key(s)


def _strange(s: Seen, teller: Seen, wanted: Whole, others: Whole) -> Tensor:
    """(n,) bool: vectors that stand in a row, or beside a vector, that they do not belong to."""
    assert s.where is not None
    assert teller.where is not None
    assert teller.rows is not None
    assert wanted.rows is not None
    each = max(1, math.prod(teller.shape[1:-1]))
    row_of = torch.full((s.shape[0],), -1)
    row_of[teller.where.picked // each] = teller.rows
    own = row_of[s.where.picked // max(1, math.prod(s.shape[1:-1]))]
    fits = s.where.found & (wanted.rows[None] == own[:, None])
    same = s.where.picked.shape == teller.where.picked.shape and bool(
        (s.where.picked == teller.where.picked).all()
    )
    if same and len(wanted.outputs) == len(others.outputs) and s.shape[:-1] == teller.shape[:-1]:
        fits &= teller.where.found | ~teller.where.found.any(1, keepdim=True)
    return (own >= 0) & s.where.found.any(1) & ~fits.any(1)


def _counts(s: Seen, traces: Traces) -> Tensor:
    """(n,) bool: the vectors with which the rank's loss changes; none where that is not known."""
    assert s.where is not None
    gradient = traces.ranks[s.rank].gradient_of(s.call)
    if gradient is None:
        return torch.zeros(len(s.where.picked), dtype=torch.bool)
    return vectors(gradient)[s.where.picked].any(1)


def _are_the_lesser_part(found: Mapping[int, Seen], mine: Sequence[Seen]) -> bool:
    """Whether more vectors are where they belong: else rows may stand in an order of their own."""
    odd = sum(len(s.wrong) for s in found.values() if s.wrong is not None)
    every = sum(len(s.where.picked) for s in mine if s.where is not None and s.forward == "right")
    return 2 * odd < every
