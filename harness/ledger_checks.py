"""What the ledgers show by themselves, without any reference.

Disagreement is always a fault: ranks that issue different operations on one group. The law's
findings are about reductions that carry gradients: an average, a division before a SUM, a SUM of
inputs that are the same everywhere, a reduction whose result no gradient is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sumgrad.operations import (
    FAMILIES,
    POINT_TO_POINT,
    REDUCTIONS,
    Disagreement,
    disagreement_of,
    group_name,
    members,
    signature,
)
from sumgrad.outcome import describe_operation, some_of, spans
from sumgrad.program_record import ProgramRecord, events_by_step

UNITY = 1e-6  # a factor closer to 1 than this is 1
Event = Mapping[str, Any]


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


def unrecorded(record: ProgramRecord) -> Iterator[str]:
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


def joint_operations(record: ProgramRecord, tier: str, step: int) -> list[Joint]:
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


def labels(record: ProgramRecord) -> Iterator[tuple[str, int]]:
    """The steps that were run, in order."""
    for tier in record.spec.tiers:
        for step in range(record.spec.steps):
            yield tier, step


def disagreements(record: ProgramRecord) -> Iterator[str]:
    """The first operation of a group on which its members differ; one a run.

    A rank that raised or died issues less than the others for that reason alone.
    """
    ended = {o.rank for o in record.outcomes if o.status in ("raised", "killed", "missing")}
    found = sorted(disagreement_of(record.started), key=lambda d: (not d.mismatch, d.number))
    for d in found:
        if not d.mismatch and (set(d.absent) & ended or not d.events):
            continue
        yield f"ranks disagree: {_words(d)}"
        return


def _words(d: Disagreement) -> str:
    over = f"operation {d.number + 1} over ranks {spans(d.ranks)}"
    if d.mismatch:
        kinds: dict[tuple[Any, ...], list[int]] = {}
        for rank, event in d.events.items():
            kinds.setdefault(signature(event), []).append(rank)
        shown = [
            f"on rank {spans(ranks)} {describe_operation(d.events[ranks[0]])}"
            for ranks in kinds.values()
        ]
        return f"{over} is " + ", but ".join(shown[:3])
    first = next(iter(d.events.values()))
    return (
        f"rank {spans(d.absent)} never issues {over}, which rank {spans(list(d.events))} issues: "
        f"{describe_operation(first)}"
    )


def law_findings(record: ProgramRecord) -> Iterator[str]:
    """What breaks the law although it may pass the comparison, merged over steps."""
    seen = set()
    for tier, step in labels(record):
        feeds = fed(record, tier, step)
        for joint in joint_operations(record, tier, step):
            for text in _law(record, joint, feeds):
                if text not in seen:
                    seen.add(text)
                    yield f"law: {text}"


def fed(record: ProgramRecord, tier: str, step: int) -> dict[tuple[int, int], dict[str, float]]:
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


def carries(joint: Joint, feeds: Mapping[tuple[int, int], Mapping[str, float]]) -> list[str]:
    """Parameters whose gradients enter or leave this reduction."""
    names = dict.fromkeys(joint.gradients())
    for rank, event in joint.events.items():
        names |= dict.fromkeys(feeds.get((rank, event["n"]), {}))
    return list(names)


def _law(
    record: ProgramRecord, joint: Joint, feeds: Mapping[tuple[int, int], Mapping[str, float]]
) -> Iterator[str]:
    size = len(joint.ranks)
    names = carries(joint, feeds)
    if joint.family not in REDUCTIONS or size < 2 or not names:
        return
    what = describe(record, joint)
    op = joint.first.get("reduce")
    if op != "SUM":
        yield f"{what} is a {op}, not a SUM, of the gradients of {some_of(names)}"
    factors = prescaled(joint, sizes_of(record))
    if factors:
        factor, size_name = factors
        yield (
            f"the gradients of {some_of(list(joint.gradients()))} are multiplied by {factor:.6g} = "
            f"1/{size_name} before {what}: an average"
        )
    if identical(joint):
        yield (
            f"{what} sums inputs that are the same bits on all {size} ranks: what is already "
            f"whole is counted {size} times"
        )


def describe(record: ProgramRecord, joint: Joint) -> str:
    """`the all-reduce over dp (ranks 0-2) at train.py:31`."""
    family = joint.family.replace("allreduce", "all-reduce").replace("_", "-")
    axes = group_name(record.spec.topology, joint.ranks)
    return f"the {family} over {axes} (ranks {spans(joint.ranks)}) at {joint.site}"


def identical(joint: Joint) -> bool:
    """Whether every member put the same non-zero bits into a reduction."""
    digests = {event.get("input") for event in joint.events.values()}
    whole = set(joint.events) == set(joint.ranks) and len(joint.ranks) > 1
    return whole and len(digests) == 1 and None not in digests and bool(joint.first.get("nonzero"))


def prescaled(joint: Joint, sizes: Mapping[str, int]) -> tuple[float, str] | None:
    """One factor 1/size with which every gradient enters on every rank."""
    found = [c for by_rank in joint.gradients().values() for c in by_rank.values()]
    if not found or max(found) - min(found) > UNITY or abs(found[0] - 1) <= UNITY:
        return None
    for name, size in sizes.items():
        if size > 1 and abs(found[0] * size - 1) <= UNITY:
            return found[0], name
    return None


def sizes_of(record: ProgramRecord) -> dict[str, int]:
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
