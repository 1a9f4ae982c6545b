"""What the ledgers show: against the plan where there is one, else one rank against the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from sumgrad.base.outcome import describe_operation, some_of, spans
from sumgrad.judge.cells import steps_of
from sumgrad.judge.finding import Compared, Finding
from sumgrad.judge.joint import (
    Joint,
    carried,
    carries,
    counts_again,
    describe,
    joint_operations,
    prescaled,
    sizes_of,
)
from sumgrad.judge.knowledge import plan_of
from sumgrad.ledger.operations import (
    REDUCTIONS,
    Disagreement,
    disagreement_of,
    number_operations,
    signature,
)
from sumgrad.plan.schedule import Mismatch, compare_ledger, outside_steps
from sumgrad.record.bits import BITS
from sumgrad.record.directory import Record


def as_planned(compared: Compared) -> Iterator[Finding]:
    """Every ledger must equal the plan, operation by operation."""
    merged: dict[str, list[int]] = {}
    for m in compared.mismatches:
        merged.setdefault(m.text, []).append(m.rank)
    for text, ranks in merged.items():
        yield Finding(level="law", text=f"ledger, rank {spans(ranks)}: {text}")


def ledger_mismatches(record: Record) -> list[Mismatch]:
    """Every difference between what ranks that finished issued and what the plan says."""
    plan, planned = plan_of(record), list(steps_of(record))
    if record.spec.bitwise:
        planned += [(BITS, step) for step in range(record.spec.steps)]
    if plan is None or not planned:
        return []
    out: list[Mismatch] = []
    for rank, held in record.complete_ranks().items():
        if not held.ledger_whole:
            continue  # not compared: UNKNOWN, see complete.py
        for tier, step in planned:
            by_trees, events = tier == BITS, held.events.get((tier, step), [])
            dtype = record.spec.bitwise if by_trees else record.spec.tiers[tier]
            out += compare_ledger(
                plan, rank, dtype, f"{tier}, step {step}", events, by_trees=by_trees
            )
        foreign = [e for key, events in held.events.items() if key not in planned for e in events]
        out += [outside_steps(rank, event) for event in [*held.stray, *foreign]]
    return out


def ranks_agree(compared: Compared) -> Iterator[Finding]:
    """The first operation of a group on which its members differ; one a run.

    A rank that raised or died issues less than the others for that reason alone. One that was
    ended while it computed, or slept, might have come to it: that is not known. Under a plan each
    rank's ledger is held against the plan instead.
    """
    record = compared.record
    if not record.spec.opaque:
        return
    ended = {o.rank for o in record.outcomes if o.status in ("raised", "killed", "missing")}
    if record.spec.script is not None:  # it is ended when enough was seen of it
        ended |= {o.rank for o in record.outcomes if o.ok}
    late = {o.rank for o in record.outcomes if o.status == "timed_out" and o.waiting_in is None}
    found = sorted(disagreement_of(record.started), key=lambda d: (not d.mismatch, d.number))
    for d in found:
        if not d.mismatch and (set(d.absent) & ended or not d.events):
            continue
        if not d.mismatch and set(d.absent) & late:
            yield Finding(level="unknown", text=_not_yet(d, sorted(set(d.absent) & late)))
            return
        yield Finding(level="fail", text=f"ranks disagree: {_words(d)}")
        return


def _not_yet(d: Disagreement, late: Sequence[int]) -> str:
    first = next(iter(d.events.values()))
    return (
        f"rank {spans(late)} had not come to operation {d.number + 1} over ranks {spans(d.ranks)} "
        f"when the run was ended, and rank {spans(list(d.events))} waits in it: "
        f"{describe_operation(first)}; it hangs where its stack shows, or needs more time "
        f"(--timeout)"
    )


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


def everybody_waits(compared: Compared) -> Iterator[Finding]:
    """Operations that a step started and left: what it reads may be half done."""
    for text, ranks in list(_said_of_operations(compared, "races").items())[:3]:
        yield Finding(
            level="fail",
            text=f"nobody waits for {text}, on rank {spans(ranks)}: what it gives may not be "
            f"there yet",
        )


def waits_before_it_touches(compared: Compared) -> Iterator[Finding]:
    """Operations whose tensors a step writes, or reads, before it waits for them."""
    for text, ranks in list(_said_of_operations(compared, "written").items())[:3]:
        yield Finding(
            level="fail",
            text=f"what is written on rank {spans(ranks)} is a tensor of {text}, which is not "
            f"waited for yet: what it reads and gives by then is left to chance",
        )
    early = _said_of_operations(compared, "read_early")
    if early and compared.failed_again and not _said_of_operations(compared, "races"):
        ranks = sorted({rank for found in early.values() for rank in found})
        yield Finding(
            level="fail",
            text=f"something is read before it is waited for, of {some_of(list(early))}, on rank "
            f"{spans(ranks)}: where what they give comes at the wait, gradients are others",
        )


def comes_at_the_wait(compared: Compared) -> Iterator[Finding]:
    """Of a script that fails: operations that it waits for later than it issues them, whose results
    came no sooner, so that who reads them before has what was there."""
    fails = any(diff.status == "fail" for diff in compared.diffs)
    late = _said_of_operations(compared, "late")
    if compared.record.spec.script is not None and fails and late:
        yield Finding(
            level="warning",
            text=f"what {some_of(list(late))} gives came when it was waited for, and no sooner: "
            f"what is read before the wait is as it was before the operation",
        )


def _said_of_operations(compared: Compared, key: str) -> dict[str, list[int]]:
    """Operations in words -> ranks."""
    found: dict[str, list[int]] = {}
    for rank, held in compared.record.ranks.items():
        for text in dict.fromkeys(t for info in held.info.values() for t in info.get(key, ())):
            found.setdefault(text, []).append(rank)
    return found


def sums_only(compared: Compared) -> Iterator[Finding]:
    """What breaks the law although it may pass the comparison, merged over steps."""
    record = compared.record
    if not record.spec.opaque or record.spec.script is not None:
        return  # a script never said that it sums
    texts = [
        text
        for tier, step in steps_of(record)
        for names in [carried(record, tier, step)]
        for joint in joint_operations(record, tier, step)
        for text in _law(record, joint, carries(joint, names))
    ]
    for text in dict.fromkeys(texts):
        yield Finding(level="law", text=f"law: {text}")


def _law(record: Record, joint: Joint, names: Sequence[str]) -> Iterator[str]:
    size = len(joint.ranks)
    if joint.family not in REDUCTIONS or size < 2 or not names:
        return
    what = describe(record, joint)
    op = joint.first.get("reduce")
    if op != "SUM":
        article = "an" if str(op)[:1] in "AEIOU" else "a"
        yield f"{what} is {article} {op}, not a SUM, of the gradients of {some_of(names)}"
    factors = prescaled(joint, sizes_of(record))
    if factors:
        factor, size_name = factors
        facts = record.spec.facts
        order = {name: i for i, name in enumerate(facts.params if facts else ())}
        own = sorted(joint.gradients(), key=lambda name: order.get(name, len(order)))
        yield (
            f"the gradients of {some_of(own)} are multiplied by {factor:.6g} = "
            f"1/{size_name} before {what}: an average"
        )
    if counts_again(joint):
        yield (
            f"{what} sums inputs that are the same bits on all {size} ranks: what is already "
            f"whole is counted {size} times, unless it is divided again"
        )


def the_fault_struck(compared: Compared) -> Iterator[Finding]:
    """A planted misbehaviour of a collective that the step never issues: nothing was planted."""
    record = compared.record
    infos = [info.get("fault") for held in record.ranks.values() for info in held.info.values()]
    told = [info for info in infos if info]
    if record.spec.fault is None or not told or any(info["calls"] for info in told):
        return
    topology, tier = record.spec.topology, next(iter(record.spec.tiers))
    streams: dict[str, int] = {}
    for rank, held in record.ranks.items():
        for one in number_operations(topology, rank, held.events.get((tier, 0), ())):
            streams[one.stream] = max(streams.get(one.stream, 0), one.number)
    issued = ", ".join(
        f"{stream}#0{f' to #{last}' if last else ''}" for stream, last in sorted(streams.items())
    )
    yield Finding(
        level="unknown",
        text=f"the fault {record.spec.fault} struck nothing: the step issues "
        f"{issued or 'no collective'}",
    )
