"""Which elements of a full parameter a rank's tensor is, by its placements or by its values."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from sumgrad.base.tensors import to_local
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def index_by_placement(param: DTensor) -> Tensor:
    """The elements of the whole that a DTensor holds, as its placements say; its values are not
    read. RuntimeError, ValueError or NotImplementedError where they cannot be followed."""
    everything = torch.arange(param.numel()).view(param.shape)
    placed = distribute_tensor(everything, param.device_mesh, param.placements, src_data_rank=None)
    return placed.to_local().cpu()


def agrees(param: Tensor, full: Tensor, index: Tensor | None) -> bool:
    local = to_local(param).detach()
    return equal(local, full if index is None else full.reshape(-1)[index])


def is_permuted(param: Tensor, full: Tensor, index: Tensor | None) -> bool:
    local = to_local(param).detach().cpu().reshape(-1)
    whole = (full if index is None else full.reshape(-1)[index]).reshape(-1)
    same = len(local) == len(whole) and torch.equal(local.sort().values, whole.sort().values)
    return bool(same) and not torch.equal(local, whole)


def by_value(param: Tensor, full: Mapping[str, Tensor], named: Sequence[str] = ()) -> list[str]:
    """Full parameters that hold exactly these values, or have them as a block: twice one that has
    several such blocks, as zeros are found in any bias that starts at zero. named: names that it
    may have; of a DTensor that has one, those that differ from it in numbers alone, as of layers,
    and have these values where its placements say: what a rank draws for its own shards may be a
    part of anything."""
    local = to_local(param).detach().cpu()
    if not local.numel():
        return []
    return [
        name
        for name, value in full.items()
        if value.dim() == local.dim() and value.dtype == local.dtype
        if not isinstance(param, DTensor)
        or not named
        or (_is_numbered_like(name, named) and _is_placed_in(param, value))
        for _ in _offsets(local, value)
    ]


def _is_numbered_like(name: str, named: Sequence[str]) -> bool:
    bare = re.sub(r"\d+", "*", name)
    return any(re.sub(r"\d+", "*", own) == bare for own in named)


def _is_placed_in(param: DTensor, full: Tensor) -> bool:
    if param.shape != full.shape:
        return False
    try:
        index = index_by_placement(param)
    except (RuntimeError, ValueError, NotImplementedError):
        return True  # it may be
    local = param.to_local().detach().cpu()
    return local.shape != index.shape or equal(local, full.reshape(-1)[index])


def index_of(param: Tensor, full: Tensor) -> tuple[Tensor | None, str | None]:
    """The elements of `full` that a parameter holds, or why that cannot be said."""
    if isinstance(param, DTensor):
        if tuple(param.shape) != tuple(full.shape):
            return None, f"a DTensor of shape {tuple(param.shape)}; build() has {tuple(full.shape)}"
        try:
            index = index_by_placement(param)
        except (RuntimeError, ValueError, NotImplementedError) as error:
            return None, f"placements {param.placements} cannot be read: {error}"
        local = param.to_local().cpu()
        found, problem = _found(local, full)
        if local.shape != index.shape:
            return found, problem
        if problem is None and not equal(local, full.reshape(-1)[index]):
            return found, None
        return (None if index.shape == full.shape else index), None
    if param.shape == full.shape:
        return None, None
    return _found(param, full)


def _found(local: Tensor, full: Tensor) -> tuple[Tensor | None, str | None]:
    local, shape = local.detach().cpu(), tuple(local.shape)
    if local.dim() != full.dim():
        return None, f"has shape {shape}; build() has {tuple(full.shape)}"
    if not local.numel():
        return torch.empty(local.shape, dtype=torch.int64), None
    offsets = _offsets(local, full)
    if len(offsets) != 1:
        often = "nowhere" if not offsets else f"{len(offsets)} times"
        return None, (
            f"has shape {shape}, and its values occur {often} in the full weight: which part it "
            f"is can be said by shard_of"
        )
    index = torch.arange(full.numel()).view(full.shape)
    for dim, start in enumerate(offsets[0]):
        index = index.narrow(dim, start, local.shape[dim])
    return index.contiguous(), None


def _offsets(local: Tensor, full: Tensor) -> list[tuple[int, ...]]:
    """Where a block of this shape and these values begins in the full tensor; at most two."""
    if any(a > b for a, b in zip(local.shape, full.shape, strict=True)):
        return []
    hits = torch.nonzero(full == local.reshape(-1)[0]).tolist()
    found = []
    for start in hits:
        block = full
        if any(s + n > m for s, n, m in zip(start, local.shape, full.shape, strict=True)):
            continue
        for dim, offset in enumerate(start):
            block = block.narrow(dim, offset, local.shape[dim])
        if equal(block, local):
            found.append(tuple(start))
        if len(found) > 1:
            break
    return found


def equal(a: Tensor, b: Tensor) -> bool:
    return bool(
        torch.equal(a.detach().cpu(), b.detach().cpu().to(a.dtype))
    )  # False for other shapes
