"""No slice of the single process by itself, and one together with other ranks, or other calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from sumgrad.diagnose.modules.values.matching import add_up, match, vectors
from sumgrad.diagnose.modules.values.seen import Seen
from sumgrad.diagnose.modules.values.whole import Whole
from sumgrad.record.trace import Traces

Groups = Sequence[tuple[str, list[tuple[int, ...]]]]


def with_parts(
    found: list[Seen],
    traces: Traces,
    whole: Mapping[tuple[str, int], Whole],
    groups: Groups,
    tolerance: float,
) -> list[Seen]:
    """What is wrong by itself and right summed over the ranks of an axis is a part."""
    out = list(found)
    place = {_key(s.rank, s): i for i, s in enumerate(found)}
    for axis, sets in groups:
        for ranks in sets:
            for s in found:
                mine = [place.get(_key(rank, s), -1) for rank in ranks]
                if s.rank != ranks[0] or -1 in mine:
                    continue
                for held in ([found[j] for j in mine], *_same_slices([found[j] for j in mine])):
                    if not any(_may_be_part(x) for x in held):
                        continue
                    if all(out[place[_key(x.rank, x)]] is not x for x in held):
                        continue  # it is whole over a smaller axis already
                    if _adds_up(held, traces, whole, tolerance):
                        few = (
                            "" if len(held) == len(mine) else ", of ranks with the same part of it"
                        )
                        for x in held:
                            out[place[_key(x.rank, x)]] = _as_part(x, f"{axis}{few}")
                        if len(held) == len(mine):
                            break
    return out


def _same_slices(found: Sequence[Seen]) -> list[list[Seen]]:
    """Those of an axis that hold the same vectors, as ranks that share a head do; of several."""
    alike: list[list[Seen]] = []
    for s in found:
        for others in alike:
            known = others[0].where
            if (
                s.where is not None
                and known is not None
                and s.where.columns == known.columns
                and (torch.equal(s.where.found, known.found))
            ):
                others.append(s)
                break
        else:
            alike.append([s])
    return [held for held in alike if 1 < len(held) < len(found)]


def _may_be_part(s: Seen) -> bool:
    """What is wrong by itself, or right in some of its vectors and nothing in others."""
    if "wrong" in (s.forward, s.backward):
        return True
    told = None if s.factors is None else s.factors[~s.factors.isnan()]
    return s.backward == "right" and told is not None and bool((told == 0).any() & told.any())


def _key(rank: int, s: Seen) -> tuple[int, int, int, bool]:
    return rank, s.call.number, s.call.part, s.call.recomputed


def _as_part(s: Seen, axis: str) -> Seen:
    if s.forward == "wrong":
        return replace(s, forward="part", axis=axis)
    return replace(s, backward="part", axis=axis)


def _adds_up(
    mine: Sequence[Seen], traces: Traces, whole: Mapping[tuple[str, int], Whole], tolerance: float
) -> bool:
    wanted = whole.get((mine[0].call.module, mine[0].call.part))
    if wanted is None or len({s.shape for s in mine}) != 1:
        return False
    held = [(traces.ranks[s.rank], traces.ranks[s.rank].calls.index(s.call)) for s in mine]
    if any(s.forward == "wrong" for s in mine):
        total = torch.stack([vectors(t.outputs[i]) for t, i in held]).sum(0)
        found = match(total, wanted.outputs, tolerance)
        return found is not None and bool(found.here.all()) and bool(found.found.any())
    parts = [t.gradients[i] for t, i in held]
    if any(p is None for p in parts) or any(s.where is None for s in mine):
        return False
    first = mine[0].where
    assert first is not None
    same = all(s.where is not None and torch.equal(s.where.found, first.found) for s in mine)
    if not any(s.backward == "wrong" for s in mine) and len({str(s.factors) for s in mine}) < 2:
        return False  # the same lack on all of them
    known = [vectors(p) for p in parts if p is not None]
    return same and add_up(known, wanted.gradients, first, tolerance)


def without_sums_over_rows(
    found: list[Seen], traces: Traces, whole: Mapping[tuple[str, int], Whole], tolerance: float
) -> list[Seen]:
    """An output that sums over the rows of a call is none of the single process's: together the
    calls of all ranks are, some of them perhaps several times."""
    out = list(found)
    for part in {s.call.part for s in found if s.forward == "wrong"}:
        mine = [i for i, s in enumerate(found) if s.forward == "wrong" and s.call.part == part]
        wanted = whole[found[mine[0]].call.module, part]
        given = [traces.ranks[found[i].rank].output_of(found[i].call) for i in mine]
        if wanted.rows is not None or len(mine) < 2 or len({g.shape for g in given}) > 1:
            continue
        total = vectors(torch.stack(given).sum(0))
        for times in range(1, len(mine) + 1):
            where = match(total / times, wanted.outputs, tolerance)
            if where is not None and bool(where.found.any(1).all()):
                for i in mine:
                    out[i] = replace(found[i], forward="untold", backward="untold", wrong=None)
                break
    return out
