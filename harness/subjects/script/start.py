"""Weights made equal: those of the single run, on every rank, before the first forward and after
every step; for a noise run each of them one rounding off."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from sumgrad.base.tensors import own_arithmetic, same_bits, to_local
from sumgrad.subjects.script.models import Held
from torch import Tensor


def take_over(held: Iterable[Held], whole: Mapping[str, Tensor], *, jitter: int = 0) -> list[str]:
    """Copy whole weights into the parts of them that are held here; returns which had others.

    jitter: a seed; every weight is then moved by one rounding of its dtype, up or down.
    """
    other = []
    with torch.no_grad(), own_arithmetic():
        for h in held:
            if h.name not in whole:
                continue
            local, wanted = h.local(), h.slice(whole[h.name])
            if local.shape != wanted.shape:
                continue
            is_other, wanted = _is_other(local, wanted), wanted.to(local.dtype).to(local.device)
            if is_other:
                other.append(h.name)
            # A graph that was made before may hold it: a rounding is no other weight to that.
            if jitter:
                local.data.copy_(_moved(wanted, jitter))
            elif is_other:
                local.copy_(wanted)
    return other


def take_over_buffers(buffers: Mapping[str, Tensor], whole: Mapping[str, Tensor]) -> list[str]:
    """The same of buffers."""
    other = []
    with torch.no_grad(), own_arithmetic():
        for name, buffer in buffers.items():
            local, wanted = to_local(buffer), whole.get(name)
            if wanted is not None and _is_other(local, wanted):
                other.append(name)
                local.copy_(wanted.to(local.dtype))
    return other


def _is_other(local: Tensor, wanted: Tensor) -> bool:
    if local.shape != wanted.shape:
        return False  # a part of it
    return not same_bits(local, wanted.to(local.dtype).to(local.device))


def _moved(value: Tensor, seed: int) -> Tensor:
    if not value.is_floating_point():
        return value
    generator = torch.Generator().manual_seed(seed)
    sign = 2 * torch.randint(0, 2, value.shape, generator=generator) - 1
    return value * (1 + torch.finfo(value.dtype).eps * sign.to(value))
