"""Point-to-point messages between ranks that cannot deadlock and cannot be misread.

Gloo is unforgiving: two ranks that both send first deadlock even for four floats, a receive buffer
longer than the message is filled in part without a word, a shorter one aborts the process. So every
exchange posts all receives, then all sends, then waits; first for headers that name the edge and
its size, then, only if all headers are right, for the payloads.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

Label = Callable[[str], AbstractContextManager[Any]]
_MAGIC = 0x53554D47  # "SUMG"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """One message: flat tensor to send, or flat buffer to fill. peer: global rank.

    edge: the Plan edge it belongs to; a, b: the global rows it covers.
    """

    edge: str
    peer: int
    a: int
    b: int
    tag: int
    payload: torch.Tensor

    @property
    def header(self) -> list[int]:
        return [_MAGIC, zlib.crc32(self.edge.encode()), self.a, self.b, self.payload.numel()]


class MessageError(RuntimeError):
    """A header that is not the expected one: the two ranks do not execute the same plan."""


def exchange(
    sends: Sequence[Parcel], receives: Sequence[Parcel], *, label: Label = nullcontext
) -> None:
    """Deliver all parcels; returns when every receive buffer is filled. Raises MessageError.

    label: entered with a parcel's edge around each of its operations, so that a ledger can name it.
    """
    headers = [torch.zeros(5, dtype=torch.int64) for _ in receives]
    works = [
        _post(dist.irecv, header, parcel, label, odd=0)
        for header, parcel in zip(headers, receives, strict=True)
    ]
    works += [_post(dist.isend, torch.tensor(p.header), p, label, odd=0) for p in sends]
    for work in works:
        work.wait()
    for header, parcel in zip(headers, receives, strict=True):
        if header.tolist() != parcel.header:
            raise MessageError(
                f"{parcel.edge}: rank {parcel.peer} sent the header {header.tolist()[1:]} "
                f"(edge, first row, end, elements), expected {parcel.header[1:]}"
            )
    works = [_post(dist.irecv, p.payload, p, label, odd=1) for p in receives]
    works += [_post(dist.isend, p.payload, p, label, odd=1) for p in sends]
    for work in works:
        work.wait()


def _post(
    call: Callable[..., Any], tensor: torch.Tensor, parcel: Parcel, label: Label, *, odd: int
) -> Any:
    with label(parcel.edge):
        return call(tensor, parcel.peer, tag=2 * parcel.tag + odd)
