"""A rank's own part of a tensor, and raw bits: compared and hashed."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


@contextlib.contextmanager
def own_arithmetic() -> Iterator[None]:
    """What is computed here belongs to no step: no mode of a user's, and none of ours, sees it."""
    with torch._C.DisableTorchFunction():
        guard = torch._C._DisableTorchDispatch()
        try:
            yield
        finally:
            del guard


def to_local(tensor: Any) -> Tensor:
    """A DTensor's own shard; any other tensor itself. What a functional collective gave is waited
    for, as by whatever computes with it."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    if type(local).__name__ == "AsyncCollectiveTensor":
        local = local.wait()  # type: ignore[attr-defined]
    return local


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal shape, dtype and raw bits; NaNs of equal bits are equal."""
    if a is b:
        return True
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(torch.equal(_words(a), _words(b)))


_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def _words(tensor: Tensor) -> Tensor:
    """Raw bits as integers, as wide as the elements are."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(_WORDS.get(flat.element_size(), torch.uint8))


def digest(flat: Tensor) -> str:
    """A hash of raw bits."""
    flat = flat.detach().cpu().contiguous()
    return hashlib.sha256(_raw(flat)).hexdigest()[:16]  # in hardware, twice as fast as others


def _raw(tensor: Tensor) -> memoryview:
    """Raw bits, without a copy; valid while the tensor lives.

    Not by numpy(): that would make a storage fixed in size, and FSDP1 frees its parameters by it.
    """
    size = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr() if size else 0))


def bits(tensors: Sequence[Tensor]) -> str:
    """A hash of the raw bits of several tensors."""
    total = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        total.update(digest(tensor.detach().reshape(-1)).encode())
    return total.hexdigest()


def hash_weights(params: Mapping[str, Tensor]) -> str:
    """A hash of all weights by name, shape and bits."""
    total = hashlib.sha256()
    for name in sorted(params):
        flat = params[name].detach().cpu().contiguous()
        total.update(f"{name}{tuple(flat.shape)}{flat.dtype}".encode())
        total.update(_raw(flat))
    return total.hexdigest()[:16]


def is_in_a_buffer(tensor: Tensor) -> bool:
    """Whether it is a part of a larger memory, as a gradient of a flat buffer that is reduced."""
    if type(tensor) is not Tensor or tensor.layout != torch.strided:
        return False
    return tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()


def overlapping(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, str]]:
    """Of each tensor that has memory in common with one before it, the name of that one and its
    own; of what does not lie side by side only the first element is looked at."""
    known: dict[int, list[tuple[int, int, str]]] = {}
    for name, tensor in named:
        start = tensor.data_ptr()
        end = start + (tensor.nbytes if tensor.is_contiguous() else tensor.element_size())
        held = known.setdefault(tensor.untyped_storage().data_ptr(), [])
        other = next((o for begin, stop, o in held if start < stop and begin < end), None)
        if other is not None:
            yield other, name
        held.append((start, end, name))


def in_a_transform() -> bool:
    """Whether one of torch.func's transforms runs: tensors in it have no values of their own."""
    return torch._C._functorch.peek_interpreter_stack() is not None
