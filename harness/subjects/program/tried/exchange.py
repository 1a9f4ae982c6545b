"""What ranks of one machine give each other in a trial, through memory that all of them see.

A trial is a step of a small model, run hundreds of times: most of it is waiting for Gloo. Where all
ranks of a group have come to an operation, and each has put there what it brings, every rank takes
what is its own from there. What is too large for it, or of another kind, goes as ever; so does all
in the run that confirms what was found.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sumgrad.ledger.backends import tensors_in
from sumgrad.ledger.process_group import Call
from torch import Tensor

SLOT, SLOTS = 1 << 18, 16  # bytes of one operation; groups of one rank
TURNS = 2  # who writes what comes next leaves what others may still read
SENT, PART = 1 << 21, 64  # bytes of what one rank sends others in a round; where each part begins
OF_A_RANK = SLOTS * TURNS * SLOT + SENT
HEAD = 64  # of a slot: how many numbers go to each rank
HEAD_BYTES = 8 * HEAD
SUMMED = (torch.float32, torch.float64, torch.int64, torch.int32)
REDUCES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "SUM": lambda every: every.sum(0), "MAX": lambda every: every.amax(0),
    "MIN": lambda every: every.amin(0), "PRODUCT": lambda every: every.prod(0),
}  # fmt: skip
REDUCING = ("allreduce", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single")
GATHERED = ("_allgather_base", "all_gather_single")
SPLIT = ("alltoall_base", "all_to_all_single")


class Exchange:
    """path: a file that all ranks open; there is none before. Of one rank."""

    def __init__(self, path: Path, rank: int, num_ranks: int) -> None:
        size = num_ranks * OF_A_RANK
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(descriptor, size)  # with zeros, and what is there stays
            self._bytes = torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
        finally:
            os.close(descriptor)
        self._rank, self._slots = rank, dict[int, int]()
        self._sent = 0  # bytes of what this rank has sent in a round

    def begin(self) -> None:
        """A round, in which nobody reads any more what was sent in those before."""
        self._sent = 0

    def send(self, call: Call) -> int:
        """Put what one rank sends another where that one finds it. Which part it is of what this
        rank sends in a round, from 1; 0 where it goes as ever."""
        held = [*tensors_in(call.args[:1])]
        if len(held) != 1 or not _is_plain(held[0]) or not held[0].is_contiguous():
            return 0
        size = held[0].nbytes
        if self._sent + size > SENT:
            return 0
        begin, self._sent = self._sent, -(-(self._sent + size) // PART) * PART
        start = self._start_of_sent(self._rank) + begin
        if size:
            self._bytes[start : start + size].copy_(held[0].detach().view(-1).view(torch.uint8))
        return begin // PART + 1

    def receive(self, peer: int, part: int, size: int, args: tuple[Any, ...]) -> dist.Work:
        """What a rank has sent there, of so many bytes, into the tensor of `args`."""
        out = [*tensors_in(args[:1])]
        if len(out) != 1 or not out[0].is_contiguous() or out[0].nbytes < size:
            raise RuntimeError("what is sent fits in no tensor that is taken")
        start = self._start_of_sent(peer) + (part - 1) * PART
        if size:
            given = self._bytes[start : start + size]
            out[0].data.view(-1).view(torch.uint8)[:size].copy_(given)
        return _Done(out)

    def bring(self, key: int, number: int, call: Call) -> int:
        """Put what an operation takes where the others find it. The slot, from 1; 0 for none.

        key, number: of the group, and which of its operations it is: as on the other ranks.
        """
        brought = _brought(call)
        if (
            brought is None
            or sum(t.numel() * t.element_size() for t in brought) > SLOT - HEAD_BYTES
        ):
            return 0
        slot = self._slots.setdefault(key, len(self._slots) + 1)
        if slot > SLOTS:
            return 0
        start = self._start(self._rank, slot, number)
        parts = [t.numel() for t in brought]
        head = self._bytes[start : start + HEAD_BYTES].view(torch.int64)
        head.zero_()[: len(parts)] = torch.tensor(parts, dtype=torch.int64)
        at = start + HEAD_BYTES
        for tensor in brought:
            end = at + tensor.nbytes
            self._bytes[at:end].view(tensor.dtype).copy_(tensor.reshape(-1))
            at = end
        return slot

    def carry_out(
        self, call: Call, slots: Sequence[int], number: int, args: tuple[Any, ...]
    ) -> dist.Work:
        """What all have brought, into `args`, which are those of the call or copies. slots: of the
        group's ranks, in its order."""
        ranks, mine = call.group.ranks, call.group.ranks.index(self._rank)
        out = [*tensors_in(args[:1])]
        dtype = next((t.dtype for t in tensors_in(args)), torch.uint8)
        every = [
            self._of(self._start(rank, slot, number), dtype, len(ranks))
            for rank, slot in zip(ranks, slots, strict=True)
        ]
        for tensor, value in zip(out, _given(call, every, mine), strict=True):
            if tensor.numel() != value.numel():
                raise RuntimeError(f"{call.op} brings {value.numel()} numbers for {tensor.numel()}")
            tensor.data.copy_(value.view(tensor.shape))  # as Gloo does it: autograd counts no write
        return _Done(out)

    def _of(self, start: int, dtype: torch.dtype, num_parts: int) -> list[Tensor]:
        """What lies in a slot, by part."""
        sizes = self._bytes[start : start + HEAD_BYTES].view(torch.int64)[:num_parts].tolist()
        sizes = [max(size, 0) for size in sizes]
        total = sum(sizes) * dtype.itemsize
        if total > SLOT - HEAD_BYTES:  # another's, of another dtype
            raise RuntimeError("what was brought is no such thing")
        at = start + HEAD_BYTES
        return [*self._bytes[at : at + total].view(dtype).split(sizes)]

    def _start(self, rank: int, slot: int, number: int) -> int:
        return rank * OF_A_RANK + ((slot - 1) * TURNS + number % TURNS) * SLOT

    def _start_of_sent(self, rank: int) -> int:
        return rank * OF_A_RANK + SLOTS * TURNS * SLOT


def _is_plain(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout is torch.strided


def _brought(call: Call) -> list[Tensor] | None:
    """What a rank brings to an operation, for each rank or once, (HEAD,) at most; None where it is
    carried out as ever."""
    op, args, size = call.op, call.args, call.group.size()
    if op == "barrier":
        return []
    if call.kwargs:  # as a torch may call it that we do not know
        return None
    held = [*tensors_in(args)]
    if (
        not held
        or not all(map(_is_plain, held))
        or size > HEAD
        or len({t.dtype for t in held}) != 1
    ):
        return None
    if op in REDUCING and (call.event.get("reduce") not in REDUCES or held[0].dtype not in SUMMED):
        return None
    if op in ("allreduce", "broadcast") and len(args[0]) == 1:
        return [args[0][0]]
    if op == "allgather" and len(args[1]) == 1 and len(args[0][0]) == size:
        return [args[1][0]]
    if op in GATHERED:
        return [args[1]] if args[0].is_contiguous() else None
    if op == "reduce_scatter" and len(args[0]) == 1 and len(args[1][0]) == size:
        return [*args[1][0]]
    if op in REDUCING[2:]:
        return [*args[1].reshape(size, -1)] if args[1].numel() % size == 0 else None
    if op == "alltoall":
        return [*args[1]] if len(args[1]) == size else None
    if op in SPLIT and args[0].is_contiguous() and args[1].dim():
        splits = [*args[3]] or [len(args[1]) // size] * size
        return [*args[1].split(splits)] if sum(splits) == len(args[1]) else None
    return None


def _given(call: Call, every: Sequence[Sequence[Tensor]], mine: int) -> list[Tensor]:
    """What each of the tensors gets that are given to. every: by rank, by part."""
    op = call.op
    if op == "barrier":
        return []
    if op == "broadcast":
        return [every[call.args[1].rootRank][0]]
    if op in REDUCING:
        part = 0 if op == "allreduce" else mine
        return [REDUCES[call.event["reduce"]](torch.stack([parts[part] for parts in every]))]
    if op == "allgather":
        return [parts[0] for parts in every]
    if op in GATHERED:
        return [torch.cat([parts[0] for parts in every])]
    parts_for_me = [parts[mine] for parts in every]
    if op in SPLIT and [part.numel() for part in parts_for_me] != _taken(call, len(every)):
        raise RuntimeError(f"{op}: other sizes are sent than taken")
    return parts_for_me if op == "alltoall" else [torch.cat(parts_for_me)]


def _taken(call: Call, size: int) -> list[int]:
    """How many numbers of each rank's an alltoall with one tensor has room for."""
    out, splits = call.args[0], call.args[2]
    rows = [*splits] or [len(out) // size] * size
    return [num * (out.numel() // max(len(out), 1)) for num in rows]


class ByMemory:
    """In place of what is below a group, for one operation that all have brought something to."""

    def __init__(self, exchange: Exchange, call: Call, slots: Sequence[int], number: int) -> None:
        self._exchange, self._call = exchange, call
        self._slots, self._number = slots, number

    def carry_out(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dist.Work:
        assert op == self._call.op
        return self._exchange.carry_out(self._call, self._slots, self._number, args)


class SentByMemory:
    """The same for what one rank sends another. taken: of what is received, the rank that sends it,
    the part and its bytes."""

    def __init__(self, exchange: Exchange, taken: tuple[int, int, int] | None) -> None:
        self._exchange, self._taken = exchange, taken

    def carry_out(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dist.Work:
        return _Done([]) if self._taken is None else self._exchange.receive(*self._taken, args)


class _Done(dist.Work):
    """Of an operation that is over when it is asked for."""

    def __init__(self, out: Sequence[Tensor]) -> None:
        super().__init__()
        self._out = [*out]

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> Any:
        return None

    def result(self) -> list[Tensor]:
        return self._out

    def synchronize(self) -> None:
        """Nothing is left to be done."""

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(self._out)
        return future
