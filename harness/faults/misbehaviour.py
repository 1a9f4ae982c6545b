"""Carries a CollectiveFault out: an interposer for the recording process group.

Put under any torch.distributed program without changing it. Every hit first learns, on copies and
unseen by the ledger, what the honest operation would have given, so that it can say afterwards
whether the fault changed a single bit. Operations that are not hit pass through untouched.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from sumgrad.faults.collective import CollectiveFault
from sumgrad.ledger.backends import tensors_in
from sumgrad.ledger.operations import FAMILIES, stream_of
from sumgrad.ledger.process_group import Call
from sumgrad.topology.pools import Topology
from torch import Tensor

SCALE_ONE = 1.001


class Misbehaviour:
    """An interposer. calls: operations hit; changed: whether a bit differs from the honest result.

    begin_step() resets the counting of operations; remembered buffers stay.
    """

    def __init__(self, fault: CollectiveFault, topology: Topology) -> None:
        self.fault, self.topology = fault, topology
        self.calls, self.changed = 0, False
        self._seen: dict[str, int] = {}
        self._before: dict[str, list[Tensor]] = {}
        store = dist.HashStore()  # type: ignore[attr-defined]
        self._alone: Any = dist.ProcessGroupGloo(store, 0, 1, timedelta(seconds=60))

    def begin_step(self) -> None:
        """Count operations from 0 again."""
        self._seen.clear()

    def __call__(self, call: Call) -> dist.Work:
        stream = stream_of(self.topology, call.op, call.group.ranks)
        number = self._seen.get(stream, 0)
        self._seen[stream] = number + 1
        if not self.fault.hits(stream, number):
            return call.issue()
        with torch.no_grad():
            return self._misbehave(call, f"{stream}#{number}")

    def _misbehave(self, call: Call, key: str) -> dist.Work:
        self.calls += 1
        buffers = Buffers(call)
        honest = buffers.honest()
        ACTIONS[self.fault.kind](self, call, buffers, key)
        if honest is not None:
            self.changed |= any(
                not torch.equal(a, b) for a, b in zip(honest, buffers.outputs, strict=True)
            )
        return self._finished(buffers.outputs)

    def remember(self, key: str, tensors: list[Tensor]) -> list[Tensor] | None:
        """Keep copies of these; returns those kept under the key before."""
        before = self._before.get(key)
        self._before[key] = [t.clone() for t in tensors]
        return before

    def _finished(self, outputs: list[Tensor]) -> dist.Work:
        """Real, ended work on these tensors: DDP asks for its future."""
        several = len(outputs) > 1
        if len({t.dtype for t in outputs}) != 1 or (several and outputs[0].is_cuda):
            return self._alone.barrier()
        if several:  # at once they would be added up
            return self._alone.allreduce_coalesced(outputs)
        return self._alone.allreduce(outputs)


class Buffers:
    """The tensors of a call: what goes in, what comes out, whether they are the same ones."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.in_place = FAMILIES[call.op] in ("allreduce", "reduce", "broadcast", "send", "recv")
        self.outputs = list(tensors_in(call.args[:1]))
        self.inputs = self.outputs if self.in_place else list(tensors_in(call.args[1:2]))
        self.rank, self.size = call.group.rank(), call.group.size()

    @property
    def last(self) -> bool:
        """Whether this is the group's last member, which the one-rank faults choose."""
        return self.rank == self.size - 1

    def copied(self, *, dtype: torch.dtype | None = None) -> tuple[Any, ...]:
        """The call's arguments with every tensor replaced by a copy."""
        return tuple(
            _mapped(arg, lambda t: t.detach().to(dtype, copy=True)) for arg in self.call.args
        )

    def honest(self) -> list[Tensor] | None:
        """What the operation gives, computed on copies; None for messages."""
        if FAMILIES[self.call.op] in ("send", "recv"):
            return None
        args = self.copied()
        self.call.quietly(*args)
        return list(tensors_in(args[:1]))

    def keep_local(self) -> None:
        """Outputs as if nothing had been exchanged: one's own part, and zeros."""
        if self.in_place:
            return
        for out in self.outputs:
            out.zero_()
        family, flat = FAMILIES[self.call.op], torch.cat([t.reshape(-1) for t in self.inputs])
        if family == "reduce_scatter":
            start = self.rank * self.outputs[0].numel()
            self.outputs[0].view(-1).copy_(flat[start : start + self.outputs[0].numel()])
        elif family == "all_gather" and len(self.outputs) == self.size:
            self.outputs[self.rank].view(-1).copy_(flat)
        elif family == "all_gather":
            start = self.rank * flat.numel()
            self.outputs[0].view(-1)[start : start + flat.numel()].copy_(flat)
        elif family == "all_to_all" and len(self.outputs) == 1:
            room = min(flat.numel(), self.outputs[0].numel())
            self.outputs[0].view(-1)[:room].copy_(flat[:room])


def _avg(self: Misbehaviour, call: Call, buffers: Buffers, key: str) -> None:
    args = buffers.copied()
    call.quietly(*args)
    means = [total / buffers.size for total in tensors_in(args[:1])]
    work = call.issue(*args, seen=call.args, reduce="AVG")  # on the copies, which nobody reads
    _restore(buffers.outputs, means)
    work.wait()  # what is observed is the average


def _skip(self: Misbehaviour, call: Call, buffers: Buffers, key: str) -> None:
    buffers.keep_local()


def _double(self: Misbehaviour, call: Call, buffers: Buffers, key: str) -> None:
    call.issue().wait()
    call.issue().wait()
    if not buffers.in_place:
        for out in buffers.outputs:
            out.mul_(buffers.size)


def _subgroup(self: Misbehaviour, call: Call, buffers: Buffers, key: str) -> None:
    ranks = call.group.ranks
    if not buffers.last:
        call.issue(group=ranks[:-1]).wait()
        return
    nothing = buffers.copied()
    for out in tensors_in(nothing[:1]):
        out.zero_()
    call.issue(*nothing, seen=call.args, group=ranks[-1:]).wait()


def _copy(self: Misbehaviour, call: Call, buffers: Buffers, key: str) -> None:
    call.issue(*buffers.copied()).wait()
    buffers.keep_local()


def _missing_wait(self: Misbehaviour, call: Call, buffers: Buffers, key: str) -> None:
    args = buffers.copied()
    call.issue(*args).wait()
    buffers.keep_local()
    total = sum(t.numel() for t in buffers.outputs)
    done, position = total // 2, 0
    for out, result in zip(buffers.outputs, tensors_in(args[:1]), strict=True):
        share = max(0, min(out.numel(), done - position))
        flat = out.reshape(-1)
        flat[:share] = result.reshape(-1)[:share]
        out.copy_(flat.view(out.shape))
        position += out.numel()


def _stale(self: Misbehaviour, call: Call, buffers: Buffers, key: str) -> None:
    before = self.remember(key, buffers.inputs)

    def leftover(i: int, tensor: Tensor) -> Tensor:
        """What is in the buffer, on top of the start of what was: DDP's buckets change size."""
        if before is None or i >= len(before):
            return tensor
        flat, old = tensor.reshape(-1).clone(), before[i].reshape(-1)
        room = min(len(flat), len(old))
        flat[:room] += old[:room]
        return flat.view(tensor.shape)

    _on_last(call, buffers, leftover)


def _early(self: Misbehaviour, call: Call, buffers: Buffers, key: str) -> None:
    _on_last(call, buffers, lambda i, t: torch.zeros_like(t))


def _scale_one(self: Misbehaviour, call: Call, buffers: Buffers, key: str) -> None:
    first = FAMILIES[call.op] == "broadcast"
    _on_last(call, buffers, lambda i, t: t * SCALE_ONE, everyone=first)


def _low_precision(self: Misbehaviour, call: Call, buffers: Buffers, key: str) -> None:
    args = buffers.copied(dtype=torch.bfloat16)
    call.issue(*args, dtype="bfloat16").wait()
    _restore(buffers.outputs, list(tensors_in(args[:1])))


def _drop(self: Misbehaviour, call: Call, buffers: Buffers, key: str) -> None:
    call.issue().wait()
    for out in buffers.outputs:
        self.changed |= bool(out.count_nonzero())
        out.zero_()


ACTIONS: dict[str, Callable[[Misbehaviour, Call, Buffers, str], None]] = {
    "avg": _avg,
    "skip": _skip,
    "double": _double,
    "subgroup": _subgroup,
    "copy": _copy,
    "missing_wait": _missing_wait,
    "stale": _stale,
    "early": _early,
    "scale_one": _scale_one,
    "low_precision": _low_precision,
    "drop": _drop,
}


def _on_last(
    call: Call, buffers: Buffers, change: Callable[[int, Tensor], Tensor], *, everyone: bool = False
) -> None:
    """Carry it out with the last member's inputs changed; the tensors themselves stay."""
    own = [t.clone() for t in buffers.inputs]
    if buffers.last or everyone:
        _restore(buffers.inputs, [change(i, t) for i, t in enumerate(own)])
    call.issue().wait()
    if not buffers.in_place:
        _restore(buffers.inputs, own)


def _restore(tensors: list[Tensor], values: list[Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)(_mapped(item, change) for item in value)
    return value
