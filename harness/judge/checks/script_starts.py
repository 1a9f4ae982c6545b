"""With which weights and buffers a script's ranks begin: alike, or made so before they train."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sumgrad.base.outcome import some_of
from sumgrad.judge.finding import Compared, Finding
from sumgrad.record.directory import Record
from sumgrad.record.ranks import BUFFER_NAMED, RankRecord

FLOATS = ("float", "bfloat")
FEWEST = 2  # parameters: of one the first numbers that are drawn may be the single run's by chance


@dataclass(frozen=True, slots=True, kw_only=True)
class Unlike:
    """Something that a rank has otherwise than it must."""

    rank: int
    text: str
    names: tuple[str, ...] = ()


def the_same_start(compared: Compared) -> Iterator[Finding]:
    """Ranks that held other weights than each other before the first forward.

    The comparison gives all of them the single run's, so the gradients do not show it.
    """
    record = compared.record
    start = unlike_starts(record)
    shards = unlike_shards(record) if start is None else None
    if shards is not None:
        yield Finding(level="fail", text=f"{shards.text}: together they are neither's")
        return
    if start is not None and are_made_equal(record, start):
        text = (f"{start.text}, where a model is called first (a dry run); what one of them "
                f"broadcasts before the first backward makes them equal")  # fmt: skip
        yield Finding(level="warning", text=text)
    elif start is not None:
        yield Finding(level="fail", text=f"{start.text}: nothing made the replicas equal")
        return
    left = _told(record, "left_unlike")
    if _told(record, "made_equal"):
        yield Finding(level="unknown", text=not_known_to_start_alike(record))
    elif left:  # what it does is in the gradients
        yield Finding(
            level="warning",
            text=f"the ranks start from other {_kinds(left)} than the single run, in "
            f"{_shown(left)}: they were left so, and what that changes is in the gradients",
        )
    other = _told(record, "other_start")
    if other:
        yield Finding(
            level="warning",
            text=f"the ranks start from other weights than the single run in {len(other)} "
            f"parameters (another seed, another order of draws, or a checkpoint that only one of "
            f"them loaded); they were given the same",
        )


def not_known_to_start_alike(record: Record) -> str:
    """Why what the ranks compute with cannot be held against the single run, in words: where the
    weights were drawn otherwise, so may buffers and frozen weights have been."""
    if not any(info.get("drawn_otherwise") for info in _infos(record)):
        return ""
    names = list(dict.fromkeys([*_told(record, "made_equal"), *_told(record, "left_unlike")]))
    if not names:
        return ""
    return (f"the ranks start from other {_kinds(names)} than the single run, in {_shown(names)}, "
            f"and from other weights: what was drawn of these, and what the script means to be "
            f"unlike, is not known (draw all of them alike)")  # fmt: skip


def left_by_all(record: Record) -> list[str]:
    """Names of buffers and frozen weights that every rank has unlike the single run."""
    of_ranks = [next(_of_steps(held), {}).get("left_unlike", ()) for held in record.ranks.values()]
    first = of_ranks[0] if of_ranks else ()
    names = [name for name in first if all(name in others for others in of_ranks)]
    return [name.removeprefix(BUFFER_NAMED) for name in names]


def _told(record: Record, what: str) -> list[str]:
    """Names that any rank says, in order."""
    return [*dict.fromkeys(name for info in _infos(record) for name in info.get(what, ()))]


def _infos(record: Record) -> Iterator[dict[str, Any]]:
    """What each rank said of each step, in order."""
    for held in record.ranks.values():
        yield from _of_steps(held)


def _of_steps(held: RankRecord) -> Iterator[dict[str, Any]]:
    """What one rank said of each step, in order."""
    yield from (held.info[at] for at in sorted(held.info, key=lambda at: at[1]))


def _kinds(names: list[str]) -> str:
    of_buffers = [name.startswith(BUFFER_NAMED) for name in names]
    if all(of_buffers):
        return "buffers"
    return "buffers and frozen weights" if any(of_buffers) else "frozen weights"


def _shown(names: list[str]) -> str:
    return some_of([name.removeprefix(BUFFER_NAMED) for name in names])


def unlike_starts(record: Record) -> Unlike | None:
    """The first rank that held other values of parameters than another of the same elements."""
    first: dict[tuple[str, str], tuple[int, str]] = {}
    names: dict[tuple[int, int], list[str]] = {}
    for rank, held in record.ranks.items():
        started = {n: told for info in _of_steps(held)
                   for n, told in info.get("started_with", {}).items()}  # fmt: skip
        for name, told in started.items():
            if name.startswith(BUFFER_NAMED):
                continue
            part, _, value = told.partition(":")
            known = first.setdefault((name, part), (rank, value))
            if known[1] != value:
                names.setdefault((rank, known[0]), []).append(name)
    for (rank, other), own in names.items():
        text = f"rank {rank} starts from other weights than rank {other}, in {some_of(own)}"
        return Unlike(rank=rank, text=text, names=tuple(own))
    return None


def unlike_shards(record: Record) -> Unlike | None:
    """The first rank whose shards are others than the single run's, of parameters of which all that
    another rank holds are that run's: as where one alone loads a checkpoint before it is cut. To be
    asked where no replicas are unlike. None where ranks hand each other weights before any gradient
    is reduced."""
    held = {rank: {n for info in _of_steps(one) for n in info.get("started_with", ())}
            for rank, one in record.ranks.items()}  # fmt: skip
    other = {rank: [n for info in _of_steps(one) for n in info.get("other_start", ())]
             for rank, one in record.ranks.items()}  # fmt: skip
    drawn = [r for r, one in record.ranks.items()
             if any(info.get("drawn_otherwise") for info in _of_steps(one))]  # fmt: skip
    theirs = [rank for rank, own in other.items() if not own]
    for rank in drawn:
        for first in theirs:
            names = [n for n in dict.fromkeys(other[rank]) if n in held[first]]
            if len(names) >= FEWEST and not _hands_weights_on(record, rank):
                text = (f"the shards of rank {first} are the single run's, and those of rank "
                        f"{rank} are others, in {some_of(names)}")  # fmt: skip
                return Unlike(rank=rank, text=text, names=tuple(names))
    return None


def _hands_weights_on(record: Record, rank: int) -> bool:
    """Whether something is broadcast, or scattered, before any gradient is reduced."""
    tier = next(iter(record.spec.tiers))
    for event in record.ranks[rank].events.get((tier, 0), ()):
        if event.get("grads"):
            return False
        floats = str(event.get("dtype", "")).startswith(FLOATS)
        if event.get("op") in ("broadcast", "scatter") and floats:
            return True
    return False


def are_made_equal(record: Record, start: Unlike) -> bool:
    """Whether ranks broadcast, after a model was called and before any gradient is reduced, one
    tensor for each parameter that they began with unlike, or DDP all of its model's in one."""
    tier = next(iter(record.spec.tiers))
    references = record.references.get(tier, ())
    if not references or any(name not in references[0].grads for name in start.names):
        return False
    sizes = [references[0].grads[name].numel() for name in start.names]
    given = Counter[int]()
    for event in record.ranks[start.rank].events.get((tier, 0), ()):
        if event.get("grads"):
            break
        if event.get("op") == "broadcast" and str(event.get("dtype", "")).startswith(FLOATS):
            numel = int(event.get("numel") or 0)
            if str(event.get("by", "")).endswith("parallel/distributed.py") and numel >= sum(sizes):
                return True
            given[numel] += 1
    return all(given[size] >= number for size, number in Counter(sizes).items())
