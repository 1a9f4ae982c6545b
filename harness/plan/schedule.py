"""What the ledger of a planned step must read, operation by operation, and where it does not.

The Plan says what a rank sends, receives and reduces, and in which order. The ledger is what the
process group saw. Both must be equal, in both directions: nothing missing, nothing more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sumgrad.plan.edges import Count, Handoff, Norm, Plan, Reduction, Statistic, Transfer, messages
from sumgrad.plan.tree import Tree, by_rows, nodes_brought, share, trees_of

HEADER_NUMEL = 5
# What an exchange of nodes is called, whichever of torch's methods carried it out.
_TREE_OPS = {
    "alltoall_base": "all_to_all", "all_to_all_single": "all_to_all",
    "_allgather_base": "all_gather", "all_gather_single": "all_gather",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One collective or message of one rank. dtype: a torch dtype's name. peer: global rank."""

    edge: str
    op: str
    reduce: str | None
    group: tuple[int, ...]
    dtype: str
    numel: int
    peer: int | None = None
    tag: int | None = None

    def __str__(self) -> str:
        what = f"{self.op}({self.reduce})" if self.reduce else self.op
        peer = f" peer {self.peer} tag {self.tag}" if self.peer is not None else ""
        return f"{what} of {self.numel} {self.dtype}{peer} over ranks {_short(self.group)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """First difference between a rank's ledger and its Plan in one step. number: of what was seen,
    in the rank's ledger."""

    rank: int
    label: str
    edge: str
    planned: Operation | None
    seen: Operation | None
    site: str | None
    number: int | None = None

    @property
    def text(self) -> str:
        """Everything but the rank."""
        site = f" at {self.site}" if self.site else ""
        return (
            f"{self.label}, {self.edge}: planned {self.planned or 'nothing'}, "
            f"seen {self.seen or 'nothing'}{site}"
        )

    def __str__(self) -> str:
        return f"rank {self.rank}, {self.text}"


def edge_tag(plan: Plan, edge: str) -> int:
    """The message tag of a transfer or handoff: its place among the plan's edges."""
    return next(i for i, e in enumerate(plan.edges) if e.name == edge)


def value_transfers(plan: Plan, pool: str) -> list[Transfer]:
    """Transfers of values that start or end in a pool."""
    return [t for t in plan.select(Transfer) if t.kind == "value" and pool in (t.src, t.dst)]


def cotangent_transfers(plan: Plan, pool: str) -> list[Transfer]:
    """Transfers of derivatives that start or end in a pool."""
    return [t for t in plan.select(Transfer) if t.kind == "cotangent" and pool in (t.src, t.dst)]


def schedule(plan: Plan, rank: int, dtype: str, *, by_trees: bool = False) -> list[Operation]:
    """Every operation of one step of one rank, in order, in the working dtype.

    by_trees: sums of values are exchanges of nodes, two collectives each (plan/tree.py).
    """
    pool = plan.topology.pool_of(rank)
    members = tuple(sorted(pool.ranks))  # torch sorts the members of a group
    world = tuple(range(plan.topology.world_size))
    wide = "float64" if dtype == "float64" else "float32"
    out: list[Operation] = []

    def reduce(edge: str, numel: int, kind: str, *, op: str = "SUM", group: Any = members) -> None:
        out.append(
            Operation(edge=edge, op="allreduce", reduce=op, group=group, dtype=kind, numel=numel)
        )

    def total(edge: str, numel: int, kind: str, trees: Sequence[Tree], op: str = "SUM") -> None:
        if by_trees:
            out.extend(_by_trees(edge, numel, kind, members, trees))
        else:
            reduce(edge, numel, kind, op=op)

    for count in plan.select(Count, pool=pool.name):
        reduce(count.name, len(count.terms), "int64")
    out += _exchange(plan, rank, value_transfers(plan, pool.name), dtype)
    for statistic in plan.select(Statistic, pool=pool.name):
        numel = plan.declaration.term(statistic.term).statistic_numel
        if statistic.mode != "local":
            tree = by_rows(plan, pool.name, statistic.term, edge=statistic.name)
            total(statistic.name, numel, wide, [tree])
        if statistic.mode == "differentiable":
            reduce(statistic.name, numel, wide)
    out += _exchange(plan, rank, cotangent_transfers(plan, pool.name), dtype)
    handoffs = [h for h in plan.select(Handoff) if rank in (h.src_rank, h.dst_rank)]
    out += _handoffs(plan, rank, [h for h in handoffs if h.dst_rank == rank], dtype)
    for reduction in plan.select(Reduction, pool=pool.name):
        if reduction.op != "none":
            numel = plan.declaration.numel_of(reduction.unit)
            trees = trees_of(plan, pool.name, reduction.unit) if by_trees else ()
            total(reduction.name, numel, dtype, trees, reduction.op.upper())
    out += _handoffs(plan, rank, [h for h in handoffs if h.src_rank == rank], dtype)
    units = len({param.unit for param in plan.declaration.params})
    for norm in plan.select(Norm):
        for _ in ("before clipping", "after it"):
            if by_trees:
                out.append(_gather(norm.name, len(world) * units, "float64", world))
            else:
                reduce(norm.name, 1, "float64", group=world)
    return out


def _by_trees(
    edge: str, numel: int, dtype: str, group: tuple[int, ...], trees: Sequence[Tree]
) -> Iterator[Operation]:
    """Every member's nodes, cut into shares, to all; then the roots' shares to all."""
    width = share(numel, len(group))
    brought = sum(nodes_brought(tuple(trees))) * width
    yield Operation(
        edge=edge, op="all_to_all", reduce=None, group=group, dtype=dtype, numel=brought
    )
    yield _gather(edge, len(group) * len(trees) * width, dtype, group)


def _gather(edge: str, numel: int, dtype: str, group: tuple[int, ...]) -> Operation:
    return Operation(edge=edge, op="all_gather", reduce=None, group=group, dtype=dtype, numel=numel)


def _exchange(
    plan: Plan, rank: int, transfers: Sequence[Transfer], dtype: str
) -> Iterator[Operation]:
    """All receives, then all sends; headers first, then payloads."""
    quantity = plan.declaration.quantity
    parcels = []
    for transfer in transfers:
        assert quantity is not None
        per_row = sum(quantity.numel_per_row[unit] for unit in transfer.units)
        for message in messages(plan, transfer, rank=rank):
            peer = message.src if message.dst == rank else message.dst
            op = "recv" if message.dst == rank else "send"
            parcels.append((op, transfer.name, peer, (message.b - message.a) * per_row))
    return _parcel_operations(plan, parcels, dtype)


def _handoffs(
    plan: Plan, rank: int, handoffs: Sequence[Handoff], dtype: str
) -> Iterator[Operation]:
    parcels = []
    for handoff in handoffs:
        numel = sum(plan.declaration.numel_of(unit) for unit in handoff.units)
        receiving = handoff.dst_rank == rank
        peer = handoff.src_rank if receiving else handoff.dst_rank
        parcels.append(("recv" if receiving else "send", handoff.name, peer, numel))
    return _parcel_operations(plan, parcels, dtype)


def _parcel_operations(
    plan: Plan, parcels: Sequence[tuple[str, str, int, int]], dtype: str
) -> Iterator[Operation]:
    world = tuple(range(plan.topology.world_size))
    for odd in (0, 1):
        for wanted in ("recv", "send"):
            for op, edge, peer, numel in parcels:
                if op == wanted:
                    yield Operation(
                        edge=edge,
                        op=op,
                        reduce=None,
                        group=world,
                        dtype=dtype if odd else "int64",
                        numel=numel if odd else HEADER_NUMEL,
                        peer=peer,
                        tag=2 * edge_tag(plan, edge) + odd,
                    )


def operation_of(event: dict[str, Any]) -> Operation:
    """A ledger event as an Operation; its label ends with the edge's name."""
    group = event["group"]
    if isinstance(group, str):
        first, last = group.split("-")
        group = range(int(first), int(last) + 1)
    return Operation(
        edge=event["label"].split("/", 2)[-1],
        op=_TREE_OPS.get(event["op"], event["op"]),
        reduce=event.get("reduce"),
        group=tuple(sorted(group)),
        dtype=str(event["dtype"]),
        numel=event["numel"],
        peer=event.get("peer"),
        tag=event.get("tag"),
    )


def outside_steps(rank: int, event: dict[str, Any]) -> Mismatch:
    """An operation that belongs to no step of the plan."""
    return Mismatch(
        rank=rank,
        label="outside every planned step",
        edge=str(event["label"]) or "unlabelled",
        planned=None,
        seen=operation_of(event),
        site=event.get("site"),
        number=event.get("n"),
    )


def compare_ledger(
    plan: Plan,
    rank: int,
    dtype: str,
    label: str,
    events: Sequence[dict[str, Any]],
    *,
    alone_too: bool = False,
    by_trees: bool = False,
) -> list[Mismatch]:
    """Planned against seen, edge by edge in both directions; order within the step counts too.

    A collective of a group of one does nothing, whatever its op; it is compared only with
    `alone_too`.
    """
    planned = schedule(plan, rank, dtype, by_trees=by_trees)
    planned = [o for o in planned if alone_too or len(o.group) > 1]
    paired = [(operation_of(event), event) for event in events]
    paired = [(o, e) for o, e in paired if alone_too or len(o.group) > 1]
    seen, events = [o for o, _ in paired], [e for _, e in paired]
    if planned == seen:
        return []
    edges = dict.fromkeys([o.edge for o in planned] + [o.edge for o in seen])
    out = []
    for edge in edges:
        mine = [o for o in planned if o.edge == edge]
        theirs = [(o, e) for o, e in zip(seen, events, strict=True) if o.edge == edge]
        for i in range(max(len(mine), len(theirs))):
            want = mine[i] if i < len(mine) else None
            got, event = theirs[i] if i < len(theirs) else (None, {})
            if want != got:
                out.append(
                    Mismatch(
                        rank=rank,
                        label=label,
                        edge=edge,
                        planned=want,
                        seen=got,
                        site=event.get("site"),
                        number=event.get("n"),
                    )
                )
    if not out:
        i = next(i for i, (p, s) in enumerate(zip(planned, seen, strict=True)) if p != s)
        out.append(
            Mismatch(
                rank=rank,
                label=label,
                edge=planned[i].edge,
                planned=planned[i],
                seen=seen[i],
                site=events[i].get("site"),
                number=events[i].get("n"),
            )
        )
    return out


def _short(group: tuple[int, ...]) -> str:
    if len(group) > 2 and group == tuple(range(group[0], group[-1] + 1)):
        return f"{group[0]}-{group[-1]}"
    return ", ".join(map(str, group))
