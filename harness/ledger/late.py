"""Operations whose results arrive when they are waited for, and not before.

Between its issue and its wait an operation may have read and written its tensors at any time. A
step that reads them in between, or writes them, is right or wrong by chance. Here nothing is left
to it: an operation has copies, made at its issue, and what it gives comes into the tensors at the
wait. Who reads them earlier finds what was there before, or nothing that could be right where it
takes nothing from there: a buffer that is kept has from the step before what it is about to get.
And who writes them is noticed.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from sumgrad.base.outcome import describe_operation
from sumgrad.base.tensors import own_arithmetic, same_bits
from sumgrad.ledger.backends import Work, copied, tensors_in
from sumgrad.ledger.call_site import users_call
from torch import Tensor

_C10D = dist.distributed_c10d.__file__
_WAIT_AT_ONCE = ("send", "recv")  # of torch's functions that have no `async_op`
# Operations whose first argument is only written, under all their names.
_GIVES_INTO_THE_FIRST = {
    "allgather", "_allgather_base", "all_gather_single", "allgather_coalesced",
    "allgather_into_tensor_coalesced", "all_gather_single_coalesced", "reduce_scatter",
    "_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_tensor_coalesced",
    "reduce_scatter_single_coalesced", "alltoall", "alltoall_base", "all_to_all_single", "gather",
    "gather_single", "gather_into_tensor", "scatter", "recv", "recv_anysource",
}  # fmt: skip
SOON_S, PAUSE_S = 5.0, 1e-3
MOST_FRAMES = 16  # between an operation and torch's function that asks for it


def may_be_late(args: tuple[Any, ...]) -> bool:
    """Whether an operation can be carried out on copies: of tensors in host memory alone."""
    held = [*tensors_in(args)]
    return bool(held) and all(t.device.type == "cpu" and t.layout is torch.strided for t in held)


def is_waited_for_later() -> bool:
    """Whether somebody else waits for an operation than torch's function that asks for it, by the
    frames that lead to it."""
    frame = sys._getframe(1)
    for _ in range(MOST_FRAMES):
        if frame.f_code.co_filename == _C10D:
            if "async_op" in frame.f_locals:
                return bool(frame.f_locals["async_op"])
            if frame.f_code.co_name in _WAIT_AT_ONCE:
                return False
        if frame.f_back is None:
            break
        frame = frame.f_back
    return True


def only_written(op: str, args: tuple[Any, ...]) -> list[Tensor]:
    """Tensors of an operation of which it takes nothing."""
    return [*tensors_in(args[:1])] if op in _GIVES_INTO_THE_FIRST else []


class LateWork(Work):
    """Of an operation on copies."""

    def __init__(
        self,
        carry_out: Callable[..., Any],
        args: tuple[Any, ...],
        *,
        given: Sequence[Tensor] = (),
        later: Callable[[], object],
        written: Callable[[], object],
    ) -> None:
        """carry_out: of the operation's arguments. given: those that it only writes. later: called
        where another call of a user's than that which asked for it waits; written: at the wait,
        where a tensor is no more what it was at the issue."""
        self._lock, self._has_come = threading.Lock(), False
        self._later, self._written, self._issued_in = later, written, users_call()
        with own_arithmetic():
            self._tensors = {id(t): t for t in tensors_in(args)}
            self._copies = {key: _copy(t) for key, t in self._tensors.items()}
            self._empty(given)
            self._before = {key: _copy(t) for key, t in self._tensors.items()}
            self._of_copies = {c.data_ptr(): self._tensors[key] for key, c in self._copies.items()}
        super().__init__(carry_out(*copied(args, self._copies)))

    def _empty(self, given: Sequence[Tensor]) -> None:
        """Nothing in them, but for what is a part of what the operation takes."""
        own = {id(t) for t in given}
        for t in given:
            t.data.fill_(float("nan") if t.is_floating_point() or t.is_complex() else 0)
        for key, t in self._tensors.items():
            if key not in own and any(_overlap(t, one) for one in given):
                t.data.copy_(self._copies[key])

    @property
    def has_come(self) -> bool:
        return self._has_come

    def let_come(self, read: Sequence[Tensor]) -> None:
        """What it gives into any of these, before somebody reads them who is no part of a step; if
        it ends soon, as who waits here may hold up others."""
        if not any(_overlap(mine, t) for mine in self._tensors.values() for t in read):
            return
        until = time.monotonic() + SOON_S
        while not super().is_completed() and time.monotonic() < until:
            time.sleep(PAUSE_S)

    def wait(self, *timeout: Any) -> bool:
        self._look_who_waits()
        return super().wait(*timeout)

    def is_completed(self) -> bool:
        self._look_who_waits()
        return super().is_completed()

    def _look_who_waits(self) -> None:
        if not self._has_come and users_call() != self._issued_in:
            self._later()

    def result(self) -> Any:
        self._end()
        return self._in_place(self._inner.result())

    def get_future(self) -> Any:
        return self._inner.get_future().then(self._of_a_future)

    def _of_a_future(self, future: Any) -> Any:
        value = future.value()
        self._end()
        return self._in_place(value)

    def _in_place(self, value: Any) -> Any:
        """The tensors, for what an operation gives of their copies."""
        own = self._of_copies
        return copied(value, {id(t): own.get(t.data_ptr(), t) for t in tensors_in(value)})

    def _end(self) -> None:
        with self._lock, torch.no_grad(), own_arithmetic():
            if self._has_come:
                return
            self._has_come = True
            # All of them first: what is given may be a part of what is taken.
            if not all(same_bits(t, self._before[key]) for key, t in self._tensors.items()):
                self._written()
            for key, copy in self._copies.items():
                if not same_bits(copy, self._before[key]):
                    self._tensors[key].data.copy_(copy)  # by an operation no version goes up
            self._before, self._copies = {}, {}  # a work may be kept for long


@dataclass(slots=True)
class Late:
    """Operations whose results come when they are waited for: events of those that another call of
    a user's has waited for, and of those whose tensors were written before that."""

    under_way: list[LateWork] = field(default_factory=list)
    waited: list[dict[str, Any]] = field(default_factory=list)
    written: list[dict[str, Any]] = field(default_factory=list)

    def let_come(self, read: Sequence[Tensor]) -> None:
        """What goes into these, before somebody reads or writes them who is no part of a step."""
        for work in self.under_way:
            if not work.has_come:
                work.let_come(read)

    def taken(self) -> dict[str, list[str]]:
        """Both in words, since they were taken last."""
        out = {}
        for key, events in (("late", self.waited), ("written", self.written)):
            out[key] = list(dict.fromkeys(filter(None, map(describe_operation, events))))
            events.clear()
        return out


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _overlap(one: Tensor, other: Tensor) -> bool:
    a, b = _extent(one), _extent(other)
    return a[0] < b[1] and b[0] < a[1]


def _extent(tensor: Tensor) -> tuple[int, int]:
    """From which byte of memory to which."""
    start = tensor.data_ptr()
    spread = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (tensor.element_size() * (spread + 1) if tensor.numel() else 0)
