"""Do ranks that must hold the same gradient hold the same bits, and the same each time?"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from sumgrad.base.outcome import some_of, spans
from sumgrad.base.tensors import bits, same_bits
from sumgrad.judge.finding import Compared, Finding
from sumgrad.judge.joint import fed, joint_operations
from sumgrad.judge.knowledge import plan_of
from sumgrad.record.bits import BITS
from sumgrad.record.directory import Record
from sumgrad.record.ranks import RankRecord


def replicas_of_a_pool(compared: Compared) -> Iterator[Finding]:
    """By plan, one all-reduce gives every rank of a pool its gradient: the bits are the same."""
    record = compared.record
    for pool in record.spec.topology.pools if plan_of(record) else ():
        held = [record.ranks[r] for r in pool.ranks if r in record.ranks]
        for first in held[:1]:
            for other in held[1:]:
                for (tier, step), grads in first.grads.items():
                    if tier == BITS:
                        continue  # rows of its own beside what is reduced
                    theirs = other.grads.get((tier, step), {})
                    names = [
                        n for n, g in grads.items() if n in theirs and not same_bits(g, theirs[n])
                    ]
                    if names:
                        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
                        yield Finding(
                            level="fail",
                            text=f"replicas, {tier}, step {step}, rank {other.rank}: rank "
                            f"{first.rank} and rank {other.rank} hold other bits of "
                            f"{names[0]}{more} after the reduction",
                            tier=tier,
                        )


def replicas_of_a_collective(compared: Compared) -> Iterator[Finding]:
    """Ranks that hold other bits of a gradient which one and the same collective gave to both.

    Replicas whose gradients were summed by different operations may differ by roundings.
    """
    record = compared.record
    for tier, references in record.references.items() if record.spec.opaque else ():
        for reference in references:
            step = reference.step
            found = _other_bits(record, tier, step)
            if not found:
                continue
            shared = _shared_results(record, tier, step)
            for name, (rank, other) in found:
                if (name, rank, other) in shared:
                    yield Finding(
                        level="law",
                        text=f"replicas, {tier}, step {step}: rank {rank} and rank {other} hold "
                        f"other bits of {name}'s gradient, which one collective gave to both",
                    )
                    break


def _other_bits(record: Record, tier: str, step: int) -> list[tuple[str, tuple[int, int]]]:
    """Parameters, each with two ranks that hold the same elements of it and other bits."""
    out, first = [], dict[tuple[str, str], RankRecord]()
    for held in record.ranks.values():
        grads = held.grads.get((tier, step), {})
        for name in held.params:
            index = held.index_of(tier, name)
            key = (name, "" if index is None else bits([index]))
            other = first.setdefault(key, held)
            mine, theirs = grads.get(name), other.grads.get((tier, step), {}).get(name)
            if mine is not None and theirs is not None and not same_bits(mine, theirs):
                out.append((name, (other.rank, held.rank)))
    return out


def _shared_results(record: Record, tier: str, step: int) -> set[tuple[str, int, int]]:
    """(parameter, rank, rank) where one all-reduce gave both ranks their final gradient."""
    feeds = fed(record, tier, step)
    out = set()
    for joint in joint_operations(record, tier, step):
        if joint.family != "allreduce":
            continue
        given = {r: set(feeds.get((r, e["n"]), ())) for r, e in joint.events.items()}
        for a, b in combinations(sorted(given), 2):
            out |= {(name, a, b) for name in given[a] & given[b]}
    return out


def frozen_alike(compared: Compared) -> Iterator[Finding]:
    """Parameters that nobody trains and a step changes: they were equal on these ranks before."""
    changed: dict[str, None] = {}
    stays = {
        name
        for held in compared.record.ranks.values()
        for info in held.info.values()
        for name in info.get("frozen_left", ())
    }
    if stays:
        yield Finding(
            level="unknown",
            text=f"step() changes {some_of(sorted(stays))}, which is not trained and too large to "
            f"be put back: steps after the first began with other values than the single process's",
        )
    for tier in compared.record.spec.tiers:
        for step in range(compared.record.spec.steps):
            after: dict[tuple[str, str], dict[str, int]] = {}
            for rank, held in compared.record.ranks.items():
                for name, (old, new) in held.info.get((tier, step), {}).get("frozen", {}).items():
                    after.setdefault((name, old), {}).setdefault(new, rank)
                    if old != new:
                        changed[name] = None
            for (name, _), ranks in after.items():
                if len(ranks) > 1:
                    first, other = sorted(ranks.values())[:2]
                    yield Finding(
                        level="fail",
                        text=f"step {step} of {tier} changes {name}, which is not trained, on rank "
                        f"{other} otherwise than on rank {first}: replicas drift apart",
                    )
                    return
    if changed:
        yield Finding(
            level="warning",
            text=f"step() changes {some_of(list(changed))}, which is not trained; it was put back "
            f"before every step, as buffers are",
        )


def the_same_again(compared: Compared) -> Iterator[Finding]:
    """The repeated step failed where the first one passed, or has other bits."""
    new = compared.failed_again
    if new:
        ranks = spans([d.rank for d in new])
        yield Finding(
            level="fail",
            text=f"the same step on the same weights gave another gradient of {new[0].name} the "
            f"second time, on rank {ranks}: something is drawn unseeded or carried over",
        )
        return
    for rank, held in compared.record.ranks.items():
        first = held.grads.get((held.again_tier, compared.record.spec.steps - 1), {})
        other = [
            n
            for n, g in held.again.items()
            if n in first
            and not same_bits(g, first[n])
            and (held.again_tier, rank, n) not in compared.not_passed
        ]
        if other:
            yield Finding(
                level="warning",
                text=f"the same step on the same weights gave other bits of {some_of(other)} the "
                f"second time, on rank {rank}, within the noise of {held.again_tier}",
            )
            return
