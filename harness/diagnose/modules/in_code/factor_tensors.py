"""What a line gives for each row or token that is the factor with which these enter the loss."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from sumgrad.diagnose.modules.in_code.followed import is_users
from sumgrad.diagnose.modules.where.loss_weights import LOST, Share
from sumgrad.record.computed import Computation, Computed
from sumgrad.record.trace import Traces
from torch import Tensor

FIT = 1e-6  # a part of each factor
FEWEST, FEWEST_UNLIKE = 4, 3  # factors, and different ones among them
MOST = 48  # lines of the ranks, and of the single process
ROOT, ALL, SQUARE = 0.5, 1.0, 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FactorsOf:
    """The factors are `power` of what `mine` gives on the ranks, times what `theirs` gives in the
    single process, but for one number that all have; `up` and `theirs_up`: else they are one by it.
    """

    mine: Computation | None = None
    theirs: Computation | None = None
    up: bool = True
    theirs_up: bool = True
    power: float = ALL


def lines_with_these_factors(traces: Traces, shares: Sequence[Share]) -> FactorsOf | None:
    """The simplest that there is: one line of the ranks, one of the single process, then one of
    each. None where too few factors differ, or those of some row are not known."""
    told = [(s, at, f) for s in shares for at, f in s.vectors.items()]
    factors = torch.tensor([f for *_, f in told], dtype=torch.float64)
    if not len(factors) or bool((factors.abs() < LOST).any()) or bool((factors < 0).any()):
        return None
    if not all(at in s.row_of for s, at, _ in told):
        return None
    unlike = {float(f"{f:.6g}") for f in factors.tolist()}
    if len(factors) < FEWEST or len(unlike) < FEWEST_UNLIKE:
        return None
    logs = factors.log()
    mine = {c.site: (c, v) for c, v in _of_the_ranks(traces, shares)}
    theirs = [*_of_the_single_process(traces.single.computed, shares)][:MOST]
    ones = [*mine.values()][:MOST]
    for power in (ALL, ROOT, SQUARE):
        for up, (c, v) in product((True, False), ones):
            if _is_one_number(logs - power * (v if up else -v)):
                return FactorsOf(mine=c, up=up, power=power)
        for up, (c, v) in product((True, False), theirs):
            if _is_one_number(logs - power * (v if up else -v)):
                return FactorsOf(theirs=c, theirs_up=up, power=power)
    for power in (ALL, ROOT, SQUARE):
        for (c, v), (w, u) in product(ones, theirs):
            for up, theirs_up in product((True, False), repeat=2):
                if _is_one_number(logs - power * ((v if up else -v) + (u if theirs_up else -u))):
                    return FactorsOf(mine=c, theirs=w, up=up, theirs_up=theirs_up, power=power)
    return None


def _is_one_number(logs: Tensor) -> bool:
    return float(logs.max() - logs.min()) <= FIT


def _of_the_ranks(traces: Traces, shares: Sequence[Share]) -> Iterator[tuple[Computation, Tensor]]:
    """Lines that give a number for each row, or token, on all ranks that have factors, and their
    logarithms at the vectors that are told, in order."""
    by_rank: dict[int, list[Share]] = {}
    for s in shares:
        by_rank.setdefault(s.rank, []).append(s)
    held = {rank: _by_site(traces.ranks[rank].computed) for rank in by_rank if rank in traces.ranks}
    if len(held) < len(by_rank):
        return
    for site, calls in next(iter(held.values())).items():
        values: dict[tuple[int, int], Tensor | None] = {}
        for rank, own in by_rank.items():
            there = held[rank].get(site, [])
            numbers = sorted({s.number for s in own})
            for s in own:
                at = numbers.index(s.number)
                one = there[at][1] if len(there) == len(numbers) else None
                values[rank, s.number] = None if one is None else _at_vectors(one, s)
        joined = [values[s.rank, s.number] for s in shares]
        if all(v is not None for v in joined):
            yield from _told(calls[0][0], torch.cat([v for v in joined if v is not None]))


def _of_the_single_process(
    single: Computed, shares: Sequence[Share]
) -> Iterator[tuple[Computation, Tensor]]:
    """The same of what it computes for all rows at once, or for one after the other."""
    rows = 1 + max(row for s in shares for row in s.row_of.values())
    for calls in _by_site(single).values():
        c, first = calls[0]
        if len(calls) >= rows and all(v.numel() == 1 for _, v in calls[:rows]):
            first = torch.cat([v.reshape(1) for _, v in calls[:rows]])
        elif not first.dim() or len(first) < rows:
            continue
        of_rows = [_at_rows(first, s) for s in shares]
        if all(v is not None for v in of_rows):
            yield from _told(c, torch.cat([v for v in of_rows if v is not None]))


def _told(c: Computation, values: Tensor) -> Iterator[tuple[Computation, Tensor]]:
    """With the logarithms, where there are such and not all are one."""
    if bool((values > 0).all()) and bool(values.isfinite().all()):
        logs = values.log()
        if not _is_one_number(logs):
            yield c, logs


def _by_site(computed: Computed) -> Mapping[str, list[tuple[Computation, Tensor]]]:
    """What each of the user's lines gives, every time that it runs."""
    found: dict[str, list[tuple[Computation, Tensor]]] = {}
    for c in computed.computations:
        if is_users(c) and len(c.gives) == 1 and not computed.values[c.gives[0]].is_complex():
            found.setdefault(c.site, []).append((c, computed.values[c.gives[0]].double()))
    return found


def _at_vectors(value: Tensor, share: Share) -> Tensor | None:
    """Of a value for each row, or each vector, of a call those that are told."""
    shape = share.shape[:-1]
    each = math.prod(shape[1:])
    if value.numel() == math.prod(shape):
        at = [*share.vectors]
    elif value.numel() == shape[0]:
        at = [n // each for n in share.vectors]
    else:
        return None
    return value.reshape(-1)[torch.tensor(at)]


def _at_rows(value: Tensor, share: Share) -> Tensor | None:
    """The same of what is there for all rows."""
    each, flat = math.prod(share.shape[1:-1]), value.reshape(len(value), -1)
    if flat.shape[1] not in (1, each):
        return None
    rows = torch.tensor([share.row_of[n] for n in share.vectors])
    at = torch.tensor([n % each if flat.shape[1] == each else 0 for n in share.vectors])
    return flat[rows, at]
