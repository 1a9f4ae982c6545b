"""Was everything there to be compared? Whatever was not makes the run UNKNOWN."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from sumgrad.base.tolerances import noise_floor, threshold
from sumgrad.judge.finding import Compared, Finding
from sumgrad.judge.joint import unrecorded
from sumgrad.record.directory import Record

HALF = 0.5  # what a lost half of all gradients changes, in parts of them
IN_NO_TIER = "the step as it is written ran in no tier"
HALF_OF_THE_DIGITS = ("float16", "bfloat16", "float8", "float4")  # of float32's, or fewer
MOST_CASTS = 3  # that are written out


def nothing_left_out(compared: Compared) -> Iterator[Finding]:
    """Ranks, ledgers, references and parameters that were not compared."""
    record = compared.record
    problems = record.spec.problems  # nothing was started: nothing else is missing
    for text in dict.fromkeys(problems or _reasons(record)):
        yield Finding(level="unknown", text=text)


def every_tier(compared: Compared) -> Iterator[Finding]:
    """Each tier needs a sound reference of every step, and every rank's gradients."""
    record = compared.record
    wanted = list(range(record.spec.steps))
    for tier in record.spec.tiers:
        references = record.references.get(tier, [])
        sound = [r.step for r in references if not r.problems]
        ats = [(tier, step) for step in wanted]
        whole = [h for h in record.ranks.values() if all(a in h.grads and a in h.info for a in ats)]
        if sound != wanted or len(whole) < record.spec.topology.world_size:
            yield Finding(level="unknown", text="", tier=tier, aside=True)


def as_it_is_written(compared: Compared) -> Iterator[Finding]:
    """A Program's casts to few digits, computed in float64 in every tier there is: what they alone
    do, as an overflow, or a counter that sticks at 256, was not to be seen."""
    spec = compared.record.spec
    if spec.fault is None and (casts := casts_never_made(compared.record)):
        more = f" and {len(casts) - MOST_CASTS} more" if len(casts) > MOST_CASTS else ""
        yield Finding(
            level="unknown",
            text=f"{IN_NO_TIER}: {', '.join(casts[:MOST_CASTS])}{more} "
            f"computed in float64 in each: take the precision tier, too (--tiers "
            f"structure,precision, --dtype float32)",
        )


def casts_never_made(record: Record) -> list[str]:
    """Of a Program, `bfloat16 at model.py:9`, where it is lifted in every tier, and where a block
    under autocast begins, which leaves float64 as it is."""
    spec = record.spec
    in_float64 = all(dtype == "float64" for dtype in spec.tiers.values())
    if not (spec.opaque and spec.script is None and spec.lift and in_float64):
        return []
    infos = [info for held in record.ranks.values() for info in held.info.values()]
    told = [info.get(key) or {} for info in infos for key in ("lifted", "autocast")]
    places = {place for held in told for place in held}
    return sorted(place for place in places if place.startswith(HALF_OF_THE_DIGITS))


def something_to_see(compared: Compared) -> Iterator[Finding]:
    """A tier that passes although no gradient in it is other than zero by mathematics: no factor
    on any of them would have been noticed."""
    for tier in compared.record.spec.tiers:
        statuses = {d.status for d in compared.diffs if d.tier == tier}
        scales = [s for r in compared.record.references.get(tier, ()) for s in r.scale.values()]
        if statuses == {"pass"} and not any(scales):
            yield Finding(
                level="unknown",
                text=f"{tier}: every gradient is zero, in the reference and on the ranks, so "
                f"nothing was compared",
                tier=tier,
            )


def nothing_hidden_by_a_clip(compared: Compared) -> Iterator[Finding]:
    """A factor that all gradients share is gone behind a clip, but for the clip's eps.

    It shows in a step whose norm stays below the limit, or where the eps is above the noise.
    """
    record, facts = compared.record, compared.record.spec.facts
    after = None if facts is None else facts.after
    if after is None or after.kind != "clip" or not any(record.references.values()):
        return
    told = [r for references in record.references.values() for r in references]
    if all(r.factor == 1 for r in told):
        yield Finding(
            level="warning",
            text=f"no step clips, its norm stays below max_norm ({after.value:g}): how the norm is "
            f"taken over the ranks was not seen",
        )
        return
    for tier, references in record.references.items():
        dtype = record.spec.tiers[tier]
        for r in references:
            moved = HALF * after.eps / (r.norm + after.eps) if r.norm + after.eps > 0 else 0.0
            if r.factor == 1 or any(
                grad.numel()
                and moved * float(grad.abs().max())
                > threshold(noise_floor(r.floor[n], r.scale[n], dtype), r.scale[n], tier=tier)
                for n, grad in r.grads.items()
            ):
                return
    yield Finding(
        level="unknown",
        text="every step clips, and a factor that all gradients share is gone behind a clip: end "
        "the step before it, or have a step whose norm stays below max_norm",
    )


def _reasons(record: Record) -> Iterator[str]:
    spec, place = record.spec, record.spec.topology.place
    complete = record.complete_ranks()
    if not spec.tiers and not spec.skipped and not spec.bitwise:
        yield "no tier was asked for, so nothing was compared"
    yield from (f"the {tier} tier was not run: {why}" for tier, why in spec.skipped.items())
    for o in record.outcomes:
        if not o.ok:
            yield f"{place(o.rank)}: {o.status}" + (f", {o.detail}" if o.detail else "")
        elif o.rank not in complete and not _took_fewer_steps(record, o.rank):
            yield f"{place(o.rank)}: ended well, but its record is missing or incomplete"
    for rank, held in record.ranks.items():
        yield from (f"{place(rank)}: {text}" for text in held.unknown)
        if not held.ledger_whole and rank in complete:
            yield (
                f"{place(rank)}: its ledger is missing, cut short, or has operations nobody "
                f"waited for"
            )
    yield from unrecorded(record)
    yield from record.damage
    if record.ranks and spec.opaque:
        yield from _uncovered(record)


def _took_fewer_steps(record: Record, rank: int) -> bool:
    """Whether a rank of a script left a record of fewer steps, which as_many_steps says."""
    held = record.ranks.get(rank)
    if record.spec.script is None or held is None:
        return False
    return len({step for _, step in held.info}) < record.spec.steps


def _uncovered(record: Record) -> Iterator[str]:
    """Parameters, or parts of one, that no rank holds: their gradients were not compared."""
    facts = record.spec.facts
    for name, shape in (facts.params if facts else {}).items():
        numel = torch.Size(shape).numel()
        lost = max((_lost(record, tier, name, numel) for tier in record.spec.tiers), default=numel)
        if lost:
            part = "" if lost == numel else f"{lost} of {numel} elements of "
            yield f"no rank holds {part}{name}, so its gradient was not compared"


def _lost(record: Record, tier: str, name: str, numel: int) -> int:
    """How many elements of a parameter no rank holds in a tier."""
    seen = torch.zeros(numel, dtype=torch.bool)
    for held in record.ranks.values():
        if name in held.params:
            index = held.index_of(tier, name)
            if index is None:
                return 0
            seen[index.reshape(-1)] = True
    return numel - int(seen.sum())
