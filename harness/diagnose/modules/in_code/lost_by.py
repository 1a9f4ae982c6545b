"""The line that chooses what enters the loss, where gradients of tokens, or numbers, are lost."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from sumgrad.diagnose.modules.in_code.followed import is_users
from sumgrad.diagnose.modules.where.loss_weights import LOST, Share
from sumgrad.record.computed import Computation, Computed
from sumgrad.record.trace import Traces
from torch import Tensor

FEWEST = 2  # vectors without a gradient, and with one, in all


def line_that_leaves_out(traces: Traces, shares: Sequence[Share]) -> Computation | None:
    """The first of the user's that gives zero, or False, for those vectors alone that have no
    gradient where they have one in the single process, in every call on every rank. None where none
    does, or where only one would be told from the others."""
    told = [(s, *_lost_and_kept(s)) for s in shares]
    odd = [(s, lost, kept) for s, lost, kept in told if lost]
    kept_in_all = sum(len(kept) for _, _, kept in told)
    if sum(len(lost) for _, lost, _ in odd) < FEWEST or kept_in_all < FEWEST:
        return None
    sites: dict[str, Computation] | None = None
    for s, lost, kept in odd:
        trace = traces.ranks.get(s.rank)
        here = {} if trace is None else {
            c.site: c for c in _that_give(trace.computed, s.shape[:-1], lost, kept)
        }  # fmt: skip
        sites = here if sites is None else {site: c for site, c in sites.items() if site in here}
    return next(iter((sites or {}).values()), None)


def _lost_and_kept(share: Share) -> tuple[list[int], list[int]]:
    """Numbers of its vectors."""
    lost = [at for at, f in share.vectors.items() if abs(f) < LOST]
    return lost, [at for at, f in share.vectors.items() if abs(f) >= LOST]


def _that_give(
    mine: Computed, shape: Sequence[int], lost: Sequence[int], kept: Sequence[int]
) -> Iterator[Computation]:
    """In order: those that give one number for each vector, which is zero for the lost alone."""
    known: dict[int, bool] = {}
    for c, n in _given(mine):
        if n not in known:
            known[n] = _is_zero_for(mine.values[n], shape, lost, kept)
        if known[n]:
            yield c


def line_that_is_zero_with(mine: Computed, gradient: Tensor) -> Computation | None:
    """The first of the user's of which what it gives, for each number or for several together, is
    zero where a gradient is, and nowhere else."""
    there = gradient != 0
    if bool(there.all()) or not bool(there.any()):
        return None
    return next((c for c, n in _given(mine) if _is_like(mine.values[n], there)), None)


def _is_like(value: Tensor, there: Tensor) -> bool:
    own = [1] * (there.dim() - value.dim()) + [*value.shape]
    fits = len(own) == there.dim() and all(
        a in (1, b) for a, b in zip(own, there.shape, strict=True)
    )
    return fits and torch.equal((value != 0).expand_as(there), there)


def _given(mine: Computed) -> Iterator[tuple[Computation, int]]:
    """The user's lines in order, each with the numbers of what it gives."""
    for c in mine.computations:
        if is_users(c):
            yield from ((c, n) for n in c.gives)


def _is_zero_for(
    value: Tensor, shape: Sequence[int], lost: Sequence[int], kept: Sequence[int]
) -> bool:
    if value.numel() != math.prod(shape) or value.is_complex():
        return False
    flat = value.reshape(-1) != 0
    zero = not bool(flat[torch.tensor(lost)].any())
    return zero and (not kept or bool(flat[torch.tensor(kept)].all()))
