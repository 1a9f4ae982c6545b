"""Over which keys a query would have to attend for its output to be what is wanted.

Scores and values stay as they are. Sets that are tried: what there is with one key more or less,
and every stretch of keys. Where just one gives what is wanted, it is that one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sumgrad.diagnose.modules.wanted.inverses import ROUNDINGS
from torch import Tensor

MOST_KEYS = 48
MOST_QUERIES = 512
TINY = 1e-300


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeysNeeded:
    """now, needed: (n, K) bool, over which keys each query attends and would have to; told: (n,)
    bool, the queries of which that is known. shape: that of the queries, as (rows, heads, n)."""

    now: Tensor
    needed: Tensor
    told: Tensor
    shape: torch.Size

    @property
    def wrong(self) -> Tensor:
        return self.told & (self.now != self.needed).any(1)


def keys_needed(
    scores: Tensor, shares: Tensor, values: Tensor, wanted: Tensor
) -> KeysNeeded | None:
    """scores: (..., n, K) before any mask; shares: (..., n, K) of the softmax; values: (..., K, d);
    wanted: (..., n, d). None where some query needs anything else."""
    size = scores.shape[-1]
    if scores.shape != shares.shape or size > MOST_KEYS or shares[..., 0].numel() > MOST_QUERIES:
        return None
    if wanted.shape[:-1] != shares.shape[:-1] or values.shape[-2] != size:
        return None
    values = values.expand(*shares.shape[:-2], *values.shape[-2:])
    lines = values.unsqueeze(-3).expand(*shares.shape[:-1], *values.shape[-2:])
    flat, rows = lines.reshape(-1, size, values.shape[-1]), scores.reshape(-1, size)
    now, aims = shares.reshape(-1, size) > TINY, wanted.reshape(-1, wanted.shape[-1])
    near = ROUNDINGS * float(wanted.abs().max())
    needed, told = now.clone(), torch.ones(len(now), dtype=torch.bool)
    stretches = _stretches(size)
    for i, (row, own, held, aim) in enumerate(zip(rows, now, flat, aims, strict=True)):
        if bool(aim.isnan().any()) or not bool(own.any()):
            told[i] = False
            continue
        sets = torch.cat([own[None], own ^ torch.eye(size, dtype=torch.bool), stretches])
        sets = sets[sets.any(1)]
        right = (_attended(row, sets, held) - aim).abs().amax(1) <= near
        if bool(right[0]):
            continue
        fits = sets[right].unique(dim=0)
        if not len(fits):
            return None
        told[i] = len(fits) == 1
        needed[i] = fits[0]
    return KeysNeeded(now=now, needed=needed, told=told, shape=shares.shape[:-1])


def _attended(scores: Tensor, sets: Tensor, values: Tensor) -> Tensor:
    """(S, d) what a query gets over each set of keys. scores: (K,), sets: (S, K)."""
    masked = torch.where(sets, scores, -torch.inf)
    return torch.nan_to_num(masked.softmax(-1)) @ values


def _stretches(size: int) -> Tensor:
    """(size * (size + 1) / 2, size) bool."""
    at = torch.arange(size)
    found = [(at >= a) & (at <= b) for a in range(size) for b in range(a, size)]
    return torch.stack(found)
