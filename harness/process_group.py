"""A process group that records: put under torch.distributed, it writes every operation down.

Registered as the backend "sumgrad", it delegates to Gloo. Raw collectives, DDP, DTensor and FSDP
call it without knowing. Each operation is appended to the rank's ledger file before it starts and
again when it is done, so that a rank which hangs or dies in C++ still tells where it was.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

BACKEND = "sumgrad"
_HERE = os.path.dirname(os.path.abspath(__file__))
_TRANSPORT = tuple(
    os.path.join(_HERE, name) for name in ("process_group.py", "exchange.py", "convention.py")
)
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep

# What our subclass overrides -> the backend's method of the same meaning.
_DELEGATED = {
    "allreduce": "allreduce",
    "allreduce_coalesced": "allreduce_coalesced",
    "allgather": "allgather",
    "_allgather_base": "_allgather_base",
    "all_gather_single": "_allgather_base",
    "allgather_coalesced": "allgather_coalesced",
    "reduce": "reduce",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "_reduce_scatter_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "alltoall": "alltoall",
    "alltoall_base": "alltoall_base",
    "all_to_all_single": "alltoall_base",
    "broadcast": "broadcast",
    "gather": "gather",
    "scatter": "scatter",
    "barrier": "barrier",
    "send": "send",
    "recv": "recv",
}


class Ledger:
    """Writes one JSON line when an operation starts and one when it is done."""

    def __init__(self, path: Path | None) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644) if path else -1
        self._next = 0
        self._label = ""
        self.open_ops: dict[int, dict[str, Any]] = {}

    @contextmanager
    def label(self, text: str) -> Iterator[None]:
        """Name what runs now: a step, a tier, an edge of the Plan."""
        before, self._label = self._label, text
        try:
            yield
        finally:
            self._label = before

    def begin(self, event: dict[str, Any]) -> int:
        number, self._next = self._next, self._next + 1
        event = {"n": number, "label": self._label, **event}
        self.open_ops[number] = event
        self._write(event)
        return number

    def done(self, number: int) -> None:
        if self.open_ops.pop(number, None) is not None:
            self._write({"done": number})

    @property
    def num_operations(self) -> int:
        """How many operations were started, so that a ledger cut short is noticed."""
        return self._next

    def waiting_for(self) -> dict[str, Any] | None:
        """The oldest operation that started and is not done."""
        return next(iter(list(self.open_ops.values())), None)

    def _write(self, event: dict[str, Any]) -> None:
        if self._fd >= 0:
            os.write(self._fd, (json.dumps(event, separators=(",", ":")) + "\n").encode())


class RecordedWork(dist.Work):
    """The inner work; says `done` to the ledger when it has been waited for."""

    def __init__(self, inner: Any, ledger: Ledger, number: int) -> None:
        super().__init__()
        self._inner, self._ledger, self._number = inner, ledger, number

    def wait(self, timeout: timedelta | None = None) -> bool:
        ok = self._inner.wait(timeout) if timeout is not None else self._inner.wait()
        self._ledger.done(self._number)
        return bool(ok)

    def is_completed(self) -> bool:
        return bool(self._inner.is_completed())

    def is_success(self) -> bool:
        return bool(self._inner.is_success())

    def exception(self) -> Any:
        return self._inner.exception()

    def result(self) -> Any:
        return self._inner.result()

    def synchronize(self) -> None:
        self._inner.synchronize()
        self._ledger.done(self._number)

    def get_future(self) -> Any:
        return self._inner.get_future()


class RecordingProcessGroup(dist.ProcessGroup):
    """Records and delegates. `ranks`: the group's members as global ranks, in group order."""

    def __init__(self, inner: Any, ranks: list[int], ledger: Ledger) -> None:
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]
        self._inner, self._ranks, self._ledger = inner, ranks, ledger

    def _set_group_name(self, name: Any) -> None:
        self._name = name

    @property
    def group_name(self) -> Any:
        """The name torch registered the group under; DeviceMesh looks groups up by it."""
        return self._name

    def getBackendName(self) -> str:
        return BACKEND

    def _event(self, op: str, args: tuple[Any, ...]) -> dict[str, Any]:
        tensors = list(_tensors(args[:1]))
        event: dict[str, Any] = {
            "op": op,
            "group": self._ranks if len(self._ranks) <= 8 else _span(self._ranks),
            "dtype": str(tensors[0].dtype).removeprefix("torch.") if tensors else None,
            "numel": sum(t.numel() for t in tensors),
            "site": _call_site(),
        }
        reduce_op = next((getattr(arg, "reduceOp", None) for arg in args[1:]), None)
        if reduce_op is not None:
            event["reduce"] = _reduce_name(reduce_op)
        if op in ("send", "recv"):
            event["peer"], event["tag"] = self._ranks[args[1]], args[2] if len(args) > 2 else 0
        return event


def _method(name: str, delegate: str) -> Callable[..., RecordedWork]:
    def call(self: RecordingProcessGroup, *args: Any, **kwargs: Any) -> RecordedWork:
        number = self._ledger.begin(self._event(name, args))
        inner = getattr(self._inner, delegate)(*args, **kwargs)
        return RecordedWork(inner, self._ledger, number)

    call.__name__ = name
    return call


for _name, _delegate in _DELEGATED.items():
    setattr(RecordingProcessGroup, _name, _method(_name, _delegate))


def register_backend(ledger: Ledger) -> None:
    """Make `init_process_group("sumgrad")` and every later group record into this ledger."""

    def create(options: Any, _: Any = None) -> RecordingProcessGroup:
        size = options.group_size
        inner = dist.ProcessGroupGloo(options.store, options.group_rank, size, options.timeout)
        ranks = list(options.global_ranks_in_group) or list(range(size))
        return RecordingProcessGroup(inner, ranks, ledger)

    dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu", "cuda"])


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _reduce_name(op: Any) -> str:
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "PREMUL_SUM", "BAND", "BOR", "BXOR"):
        if op == getattr(dist.ReduceOp, name, None):
            return name
    return str(op)


def _span(ranks: list[int]) -> list[int] | str:
    step_one = ranks == list(range(ranks[0], ranks[-1] + 1))
    return f"{ranks[0]}-{ranks[-1]}" if step_one else ranks


def _call_site() -> str:
    frame = sys._getframe(2)
    while frame.f_back is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_TORCH) and name not in _TRANSPORT and "contextlib" not in name:
            break
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
