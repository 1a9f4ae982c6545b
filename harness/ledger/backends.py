"""What carries an operation out below the recording group: Gloo, or NCCL for tensors on GPUs.

NCCL where every rank of a machine has a GPU of its own; it refuses two ranks on one. Else Gloo,
which takes CUDA tensors through host memory by itself, except in send and receive: there it would
read the address as one of the host's, and end the process. Those are copied here. Waiting is the
backend's: NCCL's makes the current stream wait, not the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from sumgrad.base.devices import has_gpu_each
from sumgrad.ledger.delegation import carry_out
from torch import Tensor

POINT_TO_POINT = ("send", "recv", "recv_anysource")


class Backends:
    """Gloo of one group, and NCCL of the same ranks once a CUDA tensor asks for it."""

    def __init__(self, gloo: Any, options: Any = None) -> None:
        """options: what torch gives a backend's creator; NCCL is made from it."""
        self.gloo, self._options = gloo, options
        self._gpus: Any = None

    def carry_out(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operation on the backend that its tensors need. Returns its work; None where it has
        none."""
        held = _first_tensor(args)
        if held is None or not held.is_cuda:
            return carry_out(self.gloo, op, args, kwargs)
        if has_gpu_each() and dist.is_nccl_available():
            return carry_out(self._nccl(), op, args, kwargs)
        if op in POINT_TO_POINT:
            return self._through_host(op, args, kwargs)
        return carry_out(self.gloo, op, args, kwargs)

    def _nccl(self) -> Any:
        """Made by all ranks at the same operation, as every collective is."""
        if self._gpus is None:
            given = self._options
            store = dist.PrefixStore("sumgrad/nccl", given.store)  # type: ignore[attr-defined]
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = given.timeout
            self._gpus = dist.ProcessGroupNCCL(store, given.group_rank, given.group_size, options)
        return self._gpus

    def _through_host(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors, *rest = args
        copies = [torch.empty_like(t, device="cpu") if op != "send" else t.cpu() for t in tensors]
        work = carry_out(self.gloo, op, (copies, *rest), kwargs)
        return _CopiedBack(work, tensors, copies) if op != "send" else _Kept(work, copies)


class _Kept:
    """A work, and what it reads until it is done."""

    def __init__(self, inner: Any, copies: Sequence[Tensor]) -> None:
        self._inner, self._copies = inner, copies

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _CopiedBack(_Kept):
    """A receive into host memory; its tensors have what came once it has been waited for."""

    def __init__(self, inner: Any, tensors: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
        super().__init__(inner, copies)
        self._tensors: Sequence[Tensor] = tensors

    def wait(self, *timeout: Any) -> bool:
        ok = bool(self._inner.wait(*timeout))
        self._copy()
        return ok

    def is_completed(self) -> bool:
        completed = bool(self._inner.is_completed())
        if completed:
            self._copy()
        return completed

    def synchronize(self) -> None:
        self._inner.synchronize()
        self._copy()

    def result(self) -> list[Tensor]:
        return list(self._tensors)

    def _copy(self) -> None:
        for tensor, copy in zip(self._tensors, self._copies, strict=True):
            tensor.detach().copy_(copy)  # a leaf that requires a gradient may be received into
        self._tensors = self._copies = ()


def _first_tensor(value: Any) -> Tensor | None:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, list | tuple):
        return next((t for t in map(_first_tensor, value) if t is not None), None)
    return None
