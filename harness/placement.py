"""Which elements of a full parameter a rank holds, whatever wrapped or sharded the model.

A DTensor says so itself. A parameter of the full shape is the full one. One of another shape, cut
by hand, is found by its values: weights are drawn, so a shard occurs in the full weight once. What
is found is checked against the weights bit by bit before anything is compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from sumgrad.program import trained
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.", "module.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """One parameter of a rank. name: as build() has it. index: its elements in the flat full
    parameter, of the local shape (int64), or None where it holds all of it."""

    name: str
    param: nn.Parameter
    index: Tensor | None

    def local(self) -> Tensor:
        """The elements this rank holds, without a copy."""
        return to_local(self.param)

    def slice(self, full: Tensor) -> Tensor:
        """The same elements of a full tensor."""
        return full if self.index is None else full.reshape(-1)[self.index]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """All of a rank's parameters. unknown: those without a place, and why."""

    placed: tuple[Placed, ...]
    unknown: tuple[str, ...]


def to_local(tensor: Tensor) -> Tensor:
    """A DTensor's own shard; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def place(model: nn.Module, known: Mapping[int, str], full: Mapping[str, Tensor]) -> Placement:
    """Find every trained parameter of a distributed model in the full one.

    known: id of a parameter of build()'s model -> its name; identity survives most wrappers.
    full: name -> the full weights that the model was built with, in its dtype.
    """
    placed: list[Placed] = []
    unknown: list[str] = []
    for shown, param in trained(model).items():
        name = known.get(id(param)) or _by_name(shown, full)
        candidates = [name] if name else _by_value(param, full, [p.name for p in placed])
        if len(candidates) != 1:
            what = "no parameter" if not candidates else "several parameters"
            unknown.append(
                f"{shown} {tuple(param.shape)} is {what} of build()'s model by name, identity or "
                f"value, so its gradient has no reference"
            )
            continue
        index, problem = _index(param, full[candidates[0]])
        if problem:
            unknown.append(f"{shown}: {problem}")
        else:
            placed.append(Placed(name=candidates[0], param=param, index=index))
    return Placement(placed=tuple(placed), unknown=tuple(unknown))


def _by_name(shown: str, full: Mapping[str, Tensor]) -> str | None:
    name = shown
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return next((n for n in (shown, name) if n in full), None)


def _by_value(param: Tensor, full: Mapping[str, Tensor], taken: list[str]) -> list[str]:
    """Full parameters that hold exactly these values, or have them as a shard."""
    local = to_local(param).detach()
    if not local.numel():
        return []
    return [
        name
        for name, value in full.items()
        if name not in taken
        and value.dim() == local.dim()
        and value.dtype == local.dtype
        and len(_offsets(local, value)) == 1
    ]


def _index(param: Tensor, full: Tensor) -> tuple[Tensor | None, str | None]:
    """The elements of `full` that a parameter holds, or why that cannot be said."""
    if isinstance(param, DTensor):
        if tuple(param.shape) != tuple(full.shape):
            return None, f"a DTensor of shape {tuple(param.shape)}; build() has {tuple(full.shape)}"
        everything = torch.arange(full.numel()).view(full.shape)
        try:
            index = distribute_tensor(
                everything, param.device_mesh, param.placements, src_data_rank=None
            ).to_local()
        except (RuntimeError, ValueError, NotImplementedError) as error:
            return None, f"placements {param.placements} cannot be read: {error}"
        local = param.to_local()
        found, problem = _found(local, full)
        if local.shape != index.shape:
            return found, problem
        if problem is None and not _equal(local, full.reshape(-1)[index]):
            return found, None
        return (None if index.shape == full.shape else index), None
    if param.shape == full.shape:
        return None, None
    return _found(param, full)


def _found(local: Tensor, full: Tensor) -> tuple[Tensor | None, str | None]:
    shape = tuple(local.shape)
    if local.dim() != full.dim():
        return None, f"has shape {shape}; build() has {tuple(full.shape)}"
    if not local.numel():
        return torch.empty(local.shape, dtype=torch.int64), None
    offsets = _offsets(local.detach(), full)
    if len(offsets) != 1:
        often = "nowhere" if not offsets else f"{len(offsets)} times"
        return None, f"has shape {shape}, and its values occur {often} in the full weight"
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
        if _equal(block, local):
            found.append(tuple(start))
        if len(found) > 1:
            break
    return found


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(torch.equal(a.detach(), b.detach().to(a.dtype)))
