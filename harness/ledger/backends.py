"""What carries an operation out below the recording group: Gloo, or NCCL for tensors on GPUs.

NCCL where every rank of the group has a GPU of its own; it refuses two ranks on one. Else Gloo,
which takes CUDA tensors through host memory by itself, but for what is in THROUGH_HOST: there it
would read the address as one of the host's, and end the process, or refuse. Those are copied here.
Sends and receives go that way in any case: NCCL knows no tags, and ungrouped it lets two ranks that
send to each other wait for ever.

What is waited for has ended when the wait returns, under NCCL too, so that the ledger says `done`
of nothing that is still under way.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
from sumgrad.base.devices import has_gpu_each
from sumgrad.ledger.delegation import carry_out
from torch import Tensor

THROUGH_HOST = ("send", "recv", "recv_anysource", "allreduce_coalesced", "allgather_coalesced")


class CarriesOut(Protocol):
    """What is below a group."""

    def carry_out(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Its work; None where it has none."""


class Backends:
    """Gloo of one group, and NCCL of the same ranks once a CUDA tensor asks for it."""

    def __init__(self, gloo: Any, options: Any = None, *, nccl: bool = False) -> None:
        """options: what torch gives a backend's creator. nccl: whether NCCL may be taken."""
        self.gloo, self._options, self._may = gloo, options, nccl
        self._gpus: Any = None

    def carry_out(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operation on the backend that its tensors need. Returns its work; None where it has
        none."""
        held = next(tensors_in(args), None)
        if held is None or not held.is_cuda:
            return carry_out(self.gloo, op, args, kwargs)
        if op in THROUGH_HOST:
            return self._through_host(op, args, kwargs)
        if self._may and self._has_gpus():
            return _Ended(carry_out(self._gpus, op, args, kwargs))
        return carry_out(self.gloo, op, args, kwargs)

    def _has_gpus(self) -> bool:
        """Whether NCCL is there; made where every member can have it, by all at one operation."""
        if self._gpus is None:
            given = self._options
            store = dist.PrefixStore("sumgrad/gpus", given.store)  # type: ignore[attr-defined]
            able = has_gpu_each() and dist.is_nccl_available()
            store.set(str(given.group_rank), "1" if able else "0")
            members = [bytes(store.get(str(rank))) for rank in range(given.group_size)]
            self._may = all(said == b"1" for said in members)
            if self._may:
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = given.timeout
                self._gpus = dist.ProcessGroupNCCL(
                    store, given.group_rank, given.group_size, options
                )
        return self._may

    def _through_host(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """On copies in host memory; what comes back is in args[0]."""
        copies = {id(t): t.cpu() for t in tensors_in(args)}
        work = carry_out(self.gloo, op, copied(args, copies), kwargs)
        back = [] if op == "send" else [(t, copies[id(t)]) for t in tensors_in(args[:1])]
        return _CopiedBack(work, list(copies.values()), back)


class Work:
    """A backend's work, and what has to happen once it was waited for."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def wait(self, *timeout: Any) -> bool:
        ok = bool(self._inner.wait(*timeout))
        self._end()
        return ok

    def is_completed(self) -> bool:
        completed = bool(self._inner.is_completed())
        if completed:
            self._end()
        return completed

    def synchronize(self) -> None:
        self._inner.synchronize()
        self._end()

    def _end(self) -> None:
        raise NotImplementedError


class _Ended(Work):
    """Of NCCL, whose own wait holds the current stream and not the host."""

    def _end(self) -> None:
        torch.cuda.current_stream().synchronize()


class _CopiedBack(Work):
    """On copies in host memory, which live as long; the tensors have what came after the wait."""

    def __init__(self, inner: Any, held: list[Tensor], back: list[tuple[Tensor, Tensor]]) -> None:
        super().__init__(inner)
        self._held, self._back = held, back
        self._tensors = [tensor for tensor, _ in back]

    def result(self) -> list[Tensor]:
        return self._tensors

    def _end(self) -> None:
        for tensor, copy in self._back:
            tensor.detach().copy_(copy)  # a leaf that requires a gradient may be received into
        self._back = []


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested lists, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def copied(value: Any, copies: dict[int, Tensor]) -> Any:
    """The same nest, with its copies in the tensors' places."""
    if isinstance(value, Tensor):
        return copies[id(value)]
    if isinstance(value, list | tuple):
        return type(value)(copied(item, copies) for item in value)
    return value
