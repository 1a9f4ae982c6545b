"""The messages of a step between pools: packed by rows and units, delivered, and laid out again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from sumgrad.plan.edges import Message, Transfer, messages
from sumgrad.plan.schedule import edge_tag
from sumgrad.subjects.planned.context import RankContext
from sumgrad.subjects.planned.exchange import Parcel
from sumgrad.subjects.planned.exchange import exchange as exchange_parcels
from torch import Tensor


class Messages:
    """What one rank sends and receives in one step."""

    def __init__(self, ctx: RankContext, step: int) -> None:
        self.ctx, self.plan, self.step = ctx, ctx.plan, step
        self.a, self.b = ctx.plan.rows(ctx.rank)

    def exchange(
        self, transfers: Sequence[Transfer], outgoing: Mapping[str, Mapping[str, Tensor]]
    ) -> dict[str, dict[str, Tensor]]:
        """Deliver all messages of these transfers; returns edge -> unit -> (n, ...) received."""
        quantity = self.plan.declaration.quantity
        sends: list[Parcel] = []
        receives: list[tuple[Transfer, Message, Parcel]] = []
        for transfer in transfers:
            assert quantity is not None
            per_row = sum(quantity.numel_per_row[unit] for unit in transfer.units)
            for m in messages(self.plan, transfer, rank=self.ctx.rank):
                if m.src == self.ctx.rank:
                    payload = self._pack(transfer, m, outgoing[transfer.name])
                    sends.append(self.parcel(transfer.name, m.dst, m.a, m.b, payload))
                else:
                    payload = self.empty((m.b - m.a) * per_row)
                    parcel = self.parcel(transfer.name, m.src, m.a, m.b, payload)
                    receives.append((transfer, m, parcel))
        names = ", ".join(transfer.name for transfer in transfers)
        with self.ctx.edge(self.step, names):
            exchange_parcels(sends, [parcel for _, _, parcel in receives], label=self.label)
        out: dict[str, dict[str, Tensor]] = {}
        for transfer, m, parcel in receives:
            self._unpack(transfer, m, parcel.payload, out.setdefault(transfer.name, {}))
        return out

    @contextmanager
    def label(self, edge: str) -> Iterator[None]:
        with self.ctx.edge(self.step, edge):
            yield

    def _pack(self, transfer: Transfer, m: Message, values: Mapping[str, Tensor]) -> Tensor:
        rows = slice(m.a - self.a, m.b - self.a)
        flat = torch.cat([values[unit][rows].reshape(-1) for unit in transfer.units])
        return flat if m.weight == 1 else flat * float(m.weight)

    def _unpack(
        self, transfer: Transfer, m: Message, payload: Tensor, out: dict[str, Tensor]
    ) -> None:
        quantity = self.plan.declaration.quantity
        assert quantity is not None
        num = m.b - m.a
        sizes = [num * quantity.numel_per_row[unit] for unit in transfer.units]
        for unit, part in zip(transfer.units, payload.split(sizes), strict=True):
            if unit not in out:
                shape = quantity.shapes[unit]
                out[unit] = torch.zeros(
                    self.b - self.a, *shape, dtype=self.ctx.dtype, device=self.ctx.device
                )
            out[unit][m.a - self.a : m.b - self.a] = part.view(num, *out[unit].shape[1:])

    def parcel(self, edge: str, peer: int, a: int, b: int, payload: Tensor) -> Parcel:
        tag = edge_tag(self.plan, edge)
        return Parcel(edge=edge, peer=peer, a=a, b=b, tag=tag, payload=payload)

    def empty(self, numel: int) -> Tensor:
        """A receive buffer full of NaN: what a message does not fill is seen."""
        return torch.full((numel,), float("nan"), dtype=self.ctx.dtype, device=self.ctx.device)
