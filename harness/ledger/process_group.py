"""A process group that records: put under torch.distributed, it writes every operation down.

Registered as the backend "sumgrad", it delegates to Gloo, or to NCCL for tensors on GPUs. Raw
collectives, DDP, DTensor and FSDP call it without knowing. Each operation is appended to the rank's
ledger file before it starts and again when it is done, so that a rank which hangs or dies in C++
still tells where it was.
"""

from __future__ import annotations

import functools
import json
import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from sumgrad.base.outcome import SETUP
from sumgrad.base.tensors import own_arithmetic
from sumgrad.ledger.backends import Backends, CarriesOut, tensors_in
from sumgrad.ledger.call_site import JOIN, call_site, own_issuer
from sumgrad.ledger.delegation import DELEGATED, REDUCING, unrecorded_operations
from sumgrad.ledger.late import Late, LateWork, is_waited_for_later, may_be_late, only_written
from torch._C._dynamo import eval_frame as _eval_frame

BACKEND = "sumgrad"

Function = TypeVar("Function", bound=Callable[..., Any])


def step_aside(function: Function) -> Function:
    """Keep Dynamo out of a function and of what it calls: a compiled region breaks around it.

    What torch.compiler.disable does, without importing Dynamo, which takes seconds.
    """
    skip = _eval_frame._FrameAction.SKIP
    strategy = _eval_frame._FrameExecStrategy(skip, skip)
    _eval_frame.set_code_exec_strategy(function.__code__, strategy)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One operation that was asked for and is not carried out yet.

    event: what the ledger will say of it, unless it is changed. issue: carry it out on these
    arguments and write it down; quietly: the same, and the ledger does not see it.
    """

    op: str
    group: RecordingProcessGroup
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    event: dict[str, Any]

    def issue(self, *args: Any, seen: tuple[Any, ...] = (), **change: Any) -> Any:
        """Carry it out and record it. args: in place of its own; seen: what is observed in place of
        these; change: of the ledger's event."""
        event = {**self.event, **change}
        return self.group.issue(self.op, args or self.args, self.kwargs, event, seen=seen)

    def quietly(self, *args: Any) -> None:
        """Carry it out to its end without a word in the ledger."""
        self.group.delegate(self.op, args or self.args, self.kwargs).wait()


Interposer = Callable[[Call], dist.Work]
Observer = Callable[[str, tuple[Any, ...]], tuple[dict[str, Any], Callable[[], Any] | None]]


class Ledger:
    """Writes one JSON line when an operation starts and one when it is done.

    interpose: called in place of every operation of a step, if it is set; it may do anything.
    as_in_a_step: whether what runs now counts as one, whatever it is labelled.
    observe: called with name and arguments of every operation of a step that is carried out; gives
    what goes into the event, and what to call for the result's digest once it is waited for.
    late: where results are to come when they are waited for, what is seen of it.
    """

    def __init__(self, path: Path | None) -> None:
        self._fd, self._next, self._label = -1, 0, ""
        self.open_ops: dict[int, dict[str, Any]] = {}
        self.open_works: dict[int, Any] = {}
        self.handed_over: deque[RecordedWork] = deque(maxlen=64)
        self.asked: set[int] = set()
        self.waited_for: set[int] = set()
        self.interpose: Interposer | None = None
        self.as_in_a_step = False
        self.observe: Observer | None = None
        self.late: Late | None = None
        self.redirect(path)

    def redirect(self, path: Path | None) -> None:
        """Go on in another file, from the number 0."""
        if self._fd >= 0:
            os.close(self._fd)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._fd = os.open(path, flags, 0o644) if path else -1
        self._next = 0
        self.open_ops.clear()
        self.open_works.clear()
        self.asked.clear()
        self.waited_for.clear()

    def nobody_waits_for(self) -> list[int]:
        """Operations that are neither waited for nor handed on as a future."""
        return [number for number in self.open_works if number not in self.asked]

    def settle(self) -> None:
        """Say `done` of what has ended without anybody's asking, as under DDP's futures.

        Gloo completes a work's future first, and who waits for that may run before the rest of it.
        """
        for number, work in list(self.open_works.items()):
            if work.is_completed() or (number in self.asked and work.get_future().done()):
                self.done(number)

    @contextmanager
    def label(self, text: str) -> Iterator[None]:
        """Name what runs now: a step, a tier, an edge of the Plan."""
        before, self._label = self._label, text
        try:
            yield
        finally:
            self._label = before

    @contextmanager
    def unwritten(self) -> Iterator[None]:
        """What is done now goes into no file."""
        written, self._fd = self._fd, -1
        try:
            yield
        finally:
            self._fd = written

    def begin(self, event: dict[str, Any]) -> int:
        number, self._next = self._next, self._next + 1
        event = {"n": number, "label": self._label, **event}
        self.open_ops[number] = event
        self._write(event)
        return number

    def done(self, number: int, **more: Any) -> None:
        self.open_works.pop(number, None)
        if self.open_ops.pop(number, None) is not None:
            self._write({"done": number, **more})

    def waits(self, number: int) -> None:
        """Of an operation that was asked for without waiting: from here on a rank stands in it."""
        self.waited_for.add(number)
        if self.open_ops.get(number, {}).get("async"):
            self._write({"waits": number})

    def ends(self, number: int, event: dict[str, Any] | None) -> None:
        """Of one whose future somebody has: nobody stands in it any more. event: as it began."""
        if event is not None and self.open_ops.get(number) is event and event.get("async"):
            self._write({"ends": number})

    @property
    def in_step(self) -> bool:
        """Whether what runs now belongs to a step, not to the launcher or to `distribute`."""
        labelled = bool(self._label) and not self._label.startswith(SETUP)
        return labelled or self.as_in_a_step

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

    def __init__(
        self, inner: Any, ledger: Ledger, number: int, result: Callable[[], Any] | None = None
    ) -> None:
        super().__init__()
        self._inner, self._ledger, self._number = inner, ledger, number
        self._result = result
        ledger.open_works[number] = inner

    @step_aside
    def wait(self, timeout: timedelta | None = None) -> bool:
        self._ledger.waits(self._number)
        ok = self._inner.wait(timeout) if timeout is not None else self._inner.wait()
        self._done()
        return bool(ok)

    def _done(self) -> None:
        if self._number in self._ledger.open_ops:
            with own_arithmetic():
                more = {} if self._result is None else {"output": self._result()}
            self._ledger.done(self._number, **more)

    @step_aside
    def is_completed(self) -> bool:
        completed = bool(self._inner.is_completed())
        if completed:
            self._done()  # who polls until then has waited
        return completed

    @step_aside
    def is_success(self) -> bool:
        return bool(self._inner.is_success())

    @step_aside
    def exception(self) -> Any:
        return self._inner.exception()

    @step_aside
    def result(self) -> Any:
        return self._inner.result()

    @step_aside
    def synchronize(self) -> None:
        self._inner.synchronize()
        self._done()

    @step_aside
    def get_future(self) -> Any:
        ledger, number = self._ledger, self._number
        ledger.asked.add(number)
        ledger.waits(number)  # who has it may wait from now on, and does not say so
        ledger.waited_for.discard(number)
        event, future = ledger.open_ops.get(number), self._inner.get_future()
        future.add_done_callback(lambda _: ledger.ends(number, event))
        return future


class RecordingProcessGroup(dist.ProcessGroup):
    """Records and delegates. `ranks`: the group's members as global ranks, in group order."""

    def __init__(self, below: Backends, ranks: list[int], ledger: Ledger) -> None:
        self._inner = below.gloo
        super().__init__(self._inner.rank(), self._inner.size())  # type: ignore[call-arg]
        self._below: CarriesOut = below
        self._ranks, self._ledger = ranks, ledger

    @property
    def ranks(self) -> list[int]:
        """The members as global ranks, in group order."""
        return self._ranks

    @contextmanager
    def carried_out_by(self, below: CarriesOut) -> Iterator[None]:
        """By something else than the backend."""
        before, self._below = self._below, below
        try:
            yield
        finally:
            self._below = before

    def delegate(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Carry an operation out on the backend below, unrecorded. Returns its work."""
        return self._below.carry_out(op, args, kwargs)

    def issue(
        self,
        op: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        event: dict[str, Any],
        *,
        seen: tuple[Any, ...] = (),
    ) -> RecordedWork | None:
        """Record an operation and carry it out. None where it has no work to wait for."""
        result = None
        if self._ledger.in_step and self._ledger.observe is not None:
            more, result = self._ledger.observe(op, seen or args)
            event = {**event, **more}
        if op != "monitored_barrier" and is_waited_for_later():
            event = {**event, "async": True}
        number = self._ledger.begin(event)
        late = self._late(op, args, kwargs, event) if "async" in event else None
        inner = late or self.delegate(op, args, kwargs)
        if inner is None:  # monitored_barrier has ended when it returns
            self._ledger.done(number)
            return None
        work = RecordedWork(inner, self._ledger, number, result)
        if event.get("by") == JOIN:
            # DDP's reducer keeps the C++ half and waits for it; without this one it waits forever.
            self._ledger.handed_over.append(work)
        return work

    def _late(
        self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any], event: dict[str, Any]
    ) -> LateWork | None:
        """The operation's work, where its result is to come no sooner than it is waited for."""
        late = self._ledger.late
        if late is None or not self._ledger.in_step or not may_be_late(args):
            return None
        found = LateWork(
            lambda *copies: self.delegate(op, copies, kwargs),
            args,
            given=only_written(op, args),
            later=lambda: late.waited.append(event),
            written=lambda: late.written.append(event),
        )
        late.under_way = [*(work for work in late.under_way if not work.has_come), found]
        return found

    def _set_group_name(self, name: Any) -> None:
        self._name = name

    @property
    def group_name(self) -> Any:
        """The name torch registered the group under; DeviceMesh looks groups up by it."""
        return self._name

    def getBackendName(self) -> str:
        return BACKEND

    def _get_backend(self, device: Any) -> Any:
        """Its own backend, as torch asks of groups written in Python: nothing goes around it."""
        return self

    get_backend = _get_backend  # as torch 2.14 calls it

    @property
    def options(self) -> Any:
        """Of the backend below: torch reads the timeout from it."""
        return self._inner.options

    @property
    def supports_coalescing(self) -> bool:
        """No: every operation is carried out, and written down, by itself."""
        return False

    @property
    def supports_splitting(self) -> bool:
        """No: groups are made by new_group, so that each of them records."""
        return False

    def supports_tensor_alloc(self, device: Any) -> bool:
        """No: torch allocates the buffers."""
        return False

    def _event(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        tensors = list(tensors_in(args[:1]))
        event: dict[str, Any] = {
            "op": op,
            "group": self._ranks if len(self._ranks) <= 8 else _span(self._ranks),
            "dtype": str(tensors[0].dtype).removeprefix("torch.") if tensors else None,
            "numel": sum(t.numel() for t in tensors),
            "site": call_site(),
            "pg": str(getattr(self, "_name", "")),
        }
        issuer = own_issuer()
        if issuer is not None:
            event["by"] = issuer
        options = [getattr(arg, "reduceOp", None) for arg in (*args[1:], *kwargs.values())]
        reduce_op = next((op for op in options if op is not None), None)
        if reduce_op is not None:
            event["reduce"] = _reduce_name(reduce_op)
        elif op in REDUCING:  # as a group's own method is called, without options
            event["reduce"] = "SUM"
        if op in ("send", "recv"):
            event["peer"], event["tag"] = self._ranks[args[1]], args[2] if len(args) > 2 else 0
        return event


def _method(name: str) -> Callable[..., Any]:
    def call(self: RecordingProcessGroup, *args: Any, **kwargs: Any) -> Any:
        ledger, event = self._ledger, self._event(name, args, kwargs)
        with own_arithmetic():
            if not ledger.in_step or ledger.interpose is None:
                return self.issue(name, args, kwargs, event)
            asked = Call(op=name, group=self, args=args, kwargs=kwargs, event=event)
            return ledger.interpose(asked)

    call.__name__ = name
    return step_aside(call)


def _unrecorded(name: str) -> Callable[..., Any]:
    """A method that we do not know: the ledger says that it was called, the verdict is UNKNOWN."""

    def call(self: RecordingProcessGroup, *args: Any, **kwargs: Any) -> Any:
        number = self._ledger.begin(self._event(name, args, kwargs))
        known_below = getattr(self._inner, name, None)
        method = known_below or getattr(super(RecordingProcessGroup, self), name)
        try:
            return method(*args, **kwargs)
        finally:
            self._ledger.done(number)

    call.__name__ = name
    return step_aside(call)


for _name in DELEGATED:
    setattr(RecordingProcessGroup, _name, _method(_name))
for _name in unrecorded_operations():
    setattr(RecordingProcessGroup, _name, _unrecorded(_name))


def register_backend(ledger: Ledger, *, nccl: bool = False) -> None:
    """Make `init_process_group("sumgrad")` and every later group record into this ledger.

    nccl: CUDA tensors may go over NCCL, where every rank has a GPU of its own; else over Gloo.
    """

    def create(options: Any, _: Any = None) -> RecordingProcessGroup:
        size = options.group_size
        gloo = dist.ProcessGroupGloo(options.store, options.group_rank, size, options.timeout)
        ranks = list(options.global_ranks_in_group) or list(range(size))
        return RecordingProcessGroup(Backends(gloo, options, nccl=nccl), ranks, ledger)

    dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu", "cuda"])
    _go_by_the_name_below()


def _go_by_the_name_below() -> None:
    """Let `get_backend` say gloo, and `new_group(backend="gloo")` give a group that records.

    torch and its users choose by that name how a collective is carried out, and what gloo refuses.
    """
    c10d: Any = dist.distributed_c10d
    if getattr(c10d.get_backend, "below", False):
        return
    own_name, own_group = c10d.get_backend, c10d.new_group

    @functools.wraps(own_name)
    def get_backend(group: Any = None) -> Any:
        found = own_name(group)
        return dist.Backend.GLOO if found == BACKEND else found

    @functools.wraps(own_group)
    def new_group(
        ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        below = backend in ("gloo", "cpu:gloo") and own_name() == BACKEND
        return own_group(ranks, timeout, BACKEND if below else backend, *args, **kwargs)

    get_backend.below = True  # type: ignore[attr-defined]
    modules: tuple[Any, ...] = (dist, c10d)
    for module in modules:
        module.get_backend, module.new_group = get_backend, new_group


def _reduce_name(op: Any) -> str:
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "PREMUL_SUM", "BAND", "BOR", "BXOR"):
        if op == getattr(dist.ReduceOp, name, None):
            return name
    return str(op)


def _span(ranks: list[int]) -> list[int] | str:
    step_one = ranks == list(range(ranks[0], ranks[-1] + 1))
    return f"{ranks[0]}-{ranks[-1]}" if step_one else ranks
