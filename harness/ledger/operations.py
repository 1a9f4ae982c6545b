"""Names for the operations of a step: `allreduce@dp#1` is the second all-reduce over axis dp.

What it is: how a collective is found again, on every rank and in every run, without the user's
code: by what it does, over which axes of the topology, and how many such came before it in the
step. What it is not: it touches no tensor and no process group.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

from sumgrad.base.outcome import spans
from sumgrad.topology.pools import Pool, Topology

# Ledger name -> what it is, whatever method carried it out.
FAMILIES = {
    "allreduce": "allreduce",
    "allreduce_coalesced": "allreduce",
    "reduce": "reduce",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "reduce_scatter_single_coalesced": "reduce_scatter",
    "allgather": "all_gather",
    "_allgather_base": "all_gather",
    "all_gather_single": "all_gather",
    "allgather_coalesced": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "all_gather_single_coalesced": "all_gather",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "scatter": "scatter",
    "gather": "gather",
    "gather_single": "gather",
    "gather_into_tensor": "gather",
    "barrier": "barrier",
    "monitored_barrier": "barrier",
    "send": "send",
    "recv": "recv",
    "recv_anysource": "recv",
}
REDUCTIONS = ("allreduce", "reduce", "reduce_scatter")
POINT_TO_POINT = ("send", "recv")


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation of one rank's step. stream: `allreduce@dp`; number: its place in the stream."""

    rank: int
    stream: str
    number: int
    event: Mapping[str, Any]

    @property
    def name(self) -> str:
        return f"{self.stream}#{self.number}"

    @property
    def family(self) -> str:
        return self.stream.partition("@")[0]


def group_name(topology: Topology, ranks: Sequence[int]) -> str:
    """The axes that a group spans: `dp`, `dp.tp`, `world`, `ci.dp` where there are several pools,
    else the ranks."""
    return _group_name(_frozen(topology), tuple(ranks))


def stream_of(topology: Topology, op: str, ranks: Sequence[int]) -> str:
    """`FAMILY@GROUP`; a message is named by the group it is sent in."""
    return f"{FAMILIES.get(op, op)}@{group_name(topology, ranks)}"


def number_operations(
    topology: Topology, rank: int, events: Iterable[Mapping[str, Any]]
) -> list[Operation]:
    """A step's operations in order, each with its name."""
    seen: dict[str, int] = {}
    out = []
    for event in events:
        stream = stream_of(topology, event["op"], members(event))
        number = seen.get(stream, 0)
        seen[stream] = number + 1
        out.append(Operation(rank=rank, stream=stream, number=number, event=event))
    return out


def members(event: Mapping[str, Any]) -> tuple[int, ...]:
    """The global ranks of an event's group; the ledger shortens long ones to `a-b`."""
    group = event["group"]
    if isinstance(group, str):
        first, _, last = group.partition("-")
        return tuple(range(int(first), int(last) + 1))
    return tuple(group)


def _frozen(
    topology: Topology,
) -> tuple[tuple[str, tuple[tuple[str, int], ...], tuple[int, ...]], ...]:
    return tuple((pool.name, pool.axes, tuple(pool.ranks)) for pool in topology.pools)


@lru_cache(maxsize=4096)
def _group_name(
    pools: tuple[tuple[str, tuple[tuple[str, int], ...], tuple[int, ...]], ...],
    ranks: tuple[int, ...],
) -> str:
    members_set = set(ranks)
    world = {rank for _, _, own in pools for rank in own}
    for name, axes, own in pools:
        if not members_set <= set(own) or len(members_set) != len(ranks):
            continue
        pool = Pool(name=name, role=name, axes=axes, ranks=own)
        text = _axes(pool, ranks)
        if text is not None:
            return text if len(pools) == 1 else f"{name}.{text}"
    if members_set == world:
        return "world"
    return spans(ranks).replace(" ", "")


def _axes(pool: Pool, ranks: tuple[int, ...]) -> str | None:
    """Axes along which exactly these ranks of a pool lie; None if they are no such block."""
    coords = [pool.coords(rank) for rank in ranks]
    varying = [i for i in range(len(pool.axes)) if len({c[i] for c in coords}) > 1]
    block = set(product(*({c[i] for c in coords} for i in range(len(pool.axes)))))
    whole = all(len({c[i] for c in coords}) == pool.axes[i][1] for i in varying)
    if set(coords) != block or not whole:
        return None
    if not varying:  # a group of one: axes of size one, if there are any
        varying = [i for i, (_, size) in enumerate(pool.axes) if size == 1]
        if not varying:
            return "self"
    return "+".join(pool.axes[i][0] for i in varying)


UNEVEN = ("all_to_all", "gather", "scatter")  # their members may hold other sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Disagreement:
    """The first collective of a group on which its members differ.

    events: rank -> what it issued there; absent: members that issued less than `number` + 1.
    mismatch: two members issued different operations, which can never be right.
    """

    ranks: tuple[int, ...]
    number: int
    events: dict[int, Mapping[str, Any]]
    absent: tuple[int, ...]
    mismatch: bool


def disagreement_of(ledgers: Mapping[int, Iterable[Mapping[str, Any]]]) -> Iterable[Disagreement]:
    """The first disagreement of every group. ledgers: rank -> its events in order."""
    groups: dict[tuple[str, tuple[int, ...]], dict[int, list[Mapping[str, Any]]]] = {}
    for rank, events in ledgers.items():
        for event in events:
            if "n" in event and FAMILIES.get(event["op"]) not in POINT_TO_POINT:
                key = (str(event.get("pg", "")), members(event))
                groups.setdefault(key, {}).setdefault(rank, []).append(event)
    for (_, ranks), by_rank in groups.items():
        longest = max(len(events) for events in by_rank.values())
        for number in range(longest if len(ranks) > 1 else 0):
            held = {r: e[number] for r, e in by_rank.items() if number < len(e)}
            absent = tuple(r for r in ranks if r in ledgers and r not in held)
            mismatch = len({signature(event) for event in held.values()}) > 1
            if mismatch or absent:
                yield Disagreement(
                    ranks=ranks, number=number, events=held, absent=absent, mismatch=mismatch
                )
                break


def signature(event: Mapping[str, Any]) -> tuple[Any, ...]:
    """What all members of a collective must have in common."""
    family = FAMILIES.get(event["op"], event["op"])
    if family in UNEVEN:  # only the root of a gather has tensors to receive into
        return (family, None, None, event.get("reduce"))
    return (family, event["numel"], event["dtype"], event.get("reduce"))
