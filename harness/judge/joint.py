"""Collectives as all their members issued them, and the gradients that they carry."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sumgrad.base.outcome import spans
from sumgrad.ledger.operations import FAMILIES, POINT_TO_POINT, REDUCTIONS, group_name, members
from sumgrad.record.directory import Record
from sumgrad.record.ranks import events_by_step

UNITY = 1e-6  # a factor closer to 1 than this is 1
Event = Mapping[str, Any]
Names = Mapping[tuple[int, int], tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Joint:
    """One collective as its members issued it: rank -> event. number: its place on the group."""

    ranks: tuple[int, ...]
    number: int
    events: dict[int, Event]

    @property
    def first(self) -> Event:
        return next(iter(self.events.values()))

    @property
    def family(self) -> str:
        return FAMILIES.get(self.first["op"], str(self.first["op"]))

    @property
    def site(self) -> str:
        return str(self.first["site"])

    def gradients(self) -> dict[str, dict[int, float]]:
        """Parameter -> rank -> the factor with which its own gradient enters here."""
        out: dict[str, dict[int, float]] = {}
        for rank, event in self.events.items():
            for name, factor in event.get("grads") or ():
                out.setdefault(name, {})[rank] = float(factor)
        return out


def unrecorded(record: Record) -> Iterator[str]:
    """Calls of methods that this version does not know: what they moved is in no ledger."""
    found: dict[tuple[str, str], list[int]] = {}
    for rank, events in record.started.items():
        for event in events:
            if "op" in event and str(event["op"]) not in FAMILIES:
                where = (str(event["op"]), str(event.get("site")))
                found.setdefault(where, []).append(rank)
    for (op, site), ranks in found.items():
        yield (
            f"rank {spans(sorted(set(ranks)))} calls {op} at {site}: this version of sumgrad does "
            f"not record it (torch {record.spec.versions.get('torch')})"
        )


def joint_operations(record: Record, tier: str, step: int) -> list[Joint]:
    """Every collective of a step, by group and order, from all ranks that wrote a ledger."""
    found: dict[tuple[str, tuple[int, ...]], dict[int, list[Event]]] = {}
    for rank, events in record.started.items():
        for event in events_by_step(events).get((tier, step), []):
            if FAMILIES.get(event["op"]) in POINT_TO_POINT:
                continue
            key = (str(event.get("pg", "")), members(event))
            found.setdefault(key, {}).setdefault(rank, []).append(event)
    out = []
    for (_, ranks), by_rank in found.items():
        longest = max(len(events) for events in by_rank.values())
        for number in range(longest):
            issued = {r: e[number] for r, e in by_rank.items() if number < len(e)}
            out.append(Joint(ranks=ranks, number=number, events=issued))
    return out


def fed(record: Record, tier: str, step: int) -> dict[tuple[int, int], dict[str, float]]:
    """(rank, ledger number) -> the parameters whose final gradient is that operation's result."""
    out = {}
    for rank, held in record.ranks.items():
        info = held.info.get((tier, step))
        by_call = {e.get("call"): e["n"] for e in held.events.get((tier, step), [])}
        for item in info["feeds"] if info else ():
            number = by_call.get(item["call"])
            if number is not None:
                out[rank, number] = {name: float(c) for name, c in item["grads"]}
    return out


def entering(record: Record, tier: str, step: int) -> Names:
    """(rank, ledger number) of a reduction -> the parameters whose gradient goes into it.

    By its values, or because it takes what another reduction of gradients gave, bit for bit.
    """
    feeds = fed(record, tier, step)
    out: dict[tuple[int, int], dict[str, None]] = {}
    for rank, before, event in _reductions_in_order(record, tier, step):
        own = out.setdefault((rank, event["n"]), {})
        own |= dict.fromkeys(name for name, _ in event.get("grads") or ())
        for other in before:
            if takes(event, other):
                own |= dict.fromkeys((*out[rank, other["n"]], *feeds.get((rank, other["n"]), ())))
    return {key: tuple(names) for key, names in out.items()}


def carried(record: Record, tier: str, step: int) -> Names:
    """The same of those whose gradient enters a reduction, or leaves it."""
    feeds = fed(record, tier, step)
    out = {k: dict.fromkeys((*v, *feeds.get(k, ())))
           for k, v in entering(record, tier, step).items()}  # fmt: skip
    for rank, before, event in reversed(list(_reductions_in_order(record, tier, step))):
        for other in before:
            if takes(event, other):
                out[rank, other["n"]] |= out[rank, event["n"]]
    return {key: tuple(names) for key, names in out.items()}


def carries(joint: Joint, names: Names) -> list[str]:
    """Parameters whose gradients this reduction has, by `entering` or by `carried`."""
    found = (names.get((rank, event["n"]), ()) for rank, event in joint.events.items())
    return list(dict.fromkeys(name for own in found for name in own))


def _reductions_in_order(
    record: Record, tier: str, step: int
) -> Iterator[tuple[int, Sequence[Event], Event]]:
    """Every rank's reductions of a step: the rank, those before it, the reduction."""
    for rank, held in record.ranks.items():
        events = held.events.get((tier, step), [])
        mine = [e for e in events if FAMILIES.get(e["op"]) in REDUCTIONS]
        for i, event in enumerate(mine):
            yield rank, mine[:i], event


def takes(event: Event, other: Event) -> bool:
    """Whether what goes into a reduction is what another gave. Zeros and single numbers tell
    nothing."""
    given = other.get("output")
    telling = bool(event.get("nonzero")) and int(event.get("numel") or 0) > 1
    return telling and given is not None and event.get("input") == given


def describe(record: Record, joint: Joint) -> str:
    """`the all-reduce over dp (ranks 0-2) at train.py:31`."""
    return collective_in_words(record, joint.family, joint.ranks, joint.site)


def collective_in_words(record: Record, family: str, ranks: Sequence[int], site: str) -> str:
    """The same of a collective that is known by its parts."""
    name = family.replace("allreduce", "all-reduce").replace("_", "-")
    axes = group_name(record.spec.topology, ranks)
    return f"the {name} over {axes} (ranks {spans(ranks)}) at {site}"


def identical(joint: Joint) -> bool:
    """Whether every member put the same non-zero bits into a reduction."""
    digests = {event.get("input") for event in joint.events.values()}
    whole = set(joint.events) == set(joint.ranks) and len(joint.ranks) > 1
    return whole and len(digests) == 1 and None not in digests and bool(joint.first.get("nonzero"))


def counts_again(joint: Joint) -> bool:
    """Whether a sum of the same bits from every member counts what is whole once for each.

    Not where each put in its part by number, whole / size; of one single number that is not known.
    """
    factors = [c for by_rank in joint.gradients().values() for c in by_rank.values()]
    shared = bool(factors) and all(abs(c * len(joint.ranks) - 1) <= UNITY for c in factors)
    return identical(joint) and int(joint.first.get("numel", 0)) > 1 and not shared


def prescaled(joint: Joint, sizes: Mapping[str, int]) -> tuple[float, str] | None:
    """One factor 1/size with which every gradient enters on every rank."""
    found = [c for by_rank in joint.gradients().values() for c in by_rank.values()]
    if not found or max(found) - min(found) > UNITY or abs(found[0] - 1) <= UNITY:
        return None
    for name, size in sizes.items():
        if size > 1 and abs(found[0] * size - 1) <= UNITY:
            return found[0], name
    return None


def sizes_of(record: Record) -> dict[str, int]:
    """Names of sizes of the topology: axes, products within a pool, the world."""
    topology = record.spec.topology
    several = len(topology.pools) > 1
    out: dict[str, int] = {}
    for pool in topology.pools:
        head = f"{pool.name}." if several else ""
        for axis, size in pool.axes:
            out.setdefault(f"{head}{axis}", size)
        if len(pool.axes) > 1:
            out.setdefault("*".join(f"{head}{axis}" for axis, _ in pool.axes), pool.size)
    out.setdefault("world", topology.world_size)
    return out
