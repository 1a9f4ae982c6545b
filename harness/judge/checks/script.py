"""A script's ranks beside its single run: the same rows, the same start, as many steps, the same
weights after each. What is not asked of a Program, because it takes no optimizer's step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sumgrad.base.outcome import some_of, spans
from sumgrad.judge.checks.script_starts import Unlike
from sumgrad.judge.finding import Compared, Finding
from sumgrad.record.directory import Record

# Digests of a row and its size ("" in older records), as subjects/script/rows.py gives them.
Row = tuple[str, str, str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherRows:
    """Rows that ranks read otherwise than the single run did in one step, of one model.

    missed: of the single run's, by no rank. uneven: rows that were read more often than others,
    as numbers in the single run's order. foreign: rank -> how many that the single run never read;
    again: how many of these were read before.
    """

    step: int
    model: str
    single: int
    ranks: int
    missed: tuple[int, ...]
    uneven: tuple[int, ...]
    foreign: dict[int, int]
    again: int
    by_rank: dict[int, tuple[int, ...]]

    @property
    def another_batch(self) -> bool:
        """Whether ranks read a batch of their own, its rows once but for chance: larger, or in
        another order. Nothing is wrong with that, and nothing can be compared."""
        number = sum(self.foreign.values())
        known = sum(map(len, self.by_rank.values()))
        repeated = 2 * self.again >= number or 2 * len(self.uneven) > known  # more than by chance
        larger = self.ranks == self.single * len(self.by_rank) and not (known and self.missed)
        # One of two ranks: all that it reads is its own, and nothing of what the other reads.
        half = 2 * number == self.single and not any(self.by_rank[r] for r in self.foreign)
        shuffled = self.ranks == self.single and (2 * number > self.single or half)
        return bool(number) and not repeated and (larger or shuffled)

    @property
    def text(self) -> str:
        said = []
        if self.missed:
            said.append(f"{_rows(self.missed)} by no rank")
        if self.uneven:
            said.append(f"{_rows(self.uneven)} more often than the others")
        if self.foreign:
            number = sum(self.foreign.values())
            said.append(f"{number} that the single run does not read at this step, on rank "
                        f"{spans(list(self.foreign))}")  # fmt: skip
        return (
            f"the runs did not train on the same rows at step {self.step}: {self.model} was given "
            f"{self.single} rows in the single run and {self.ranks} on all ranks; "
            + "; ".join(said)
        )


def the_same_rows(compared: Compared) -> Iterator[Finding]:
    """Rows that were lost, repeated, or others than the single run's.

    A forward that trains nothing (a trial, a validation) is no step's: where every gradient is
    right, it is only said. Where they are not known for it, their own reason says so.
    """
    for tier in compared.record.spec.tiers:
        statuses = {d.status for d in compared.diffs if d.tier == tier}
        for other in other_rows(compared.record, tier)[:1]:
            if "fail" in statuses:
                yield Finding(level="fail", text=other.text, tier=tier)
            elif statuses and "unknown" not in statuses:
                text = f"{other.text}; every gradient that was compared is right all the same"
                yield Finding(level="warning", text=text)


def other_rows(record: Record, tier: str) -> list[OtherRows]:
    """Every step and model whose rows are not the single run's, as far as that can be told.

    Where no rank has any row of the single run (a sequence that is cut, another stage's input), or
    a rank took no optimizer's step, which is when rows are written down, nothing can be told.
    """
    script = record.spec.script
    out = []
    for step, models in enumerate(script.rows if script else ()):
        told = sum((tier, step) in held.info for held in record.ranks.values())
        if told < record.spec.topology.world_size:
            continue
        for model, single in models.items():
            read = {
                rank: [_row(row) for row in info.get("rows", {}).get(model, ())]
                for rank, held in record.ranks.items()
                if (info := held.info.get((tier, step))) is not None
            }
            found = _other(step, model, [_row(r) for r in single], read)
            if found is not None:
                out.append(found)
    return out


def _other(
    step: int, model: str, single: Sequence[Row], read: Mapping[int, Sequence[Row]]
) -> OtherRows | None:
    finder = _Finder(single)
    by_rank = {rank: [finder.find(row) for row in rows] for rank, rows in read.items()}
    times = Counter(i for found in by_rank.values() for i in found if i is not None)
    if not times and not _of_one_size(single, read):
        return None
    wanted = Counter(finder.find(row) for row in single)
    rate = {i: times[i] / n for i, n in wanted.items() if i is not None}
    foreign = {rank: n for rank, found in by_rank.items() if (n := found.count(None))}
    strange = [tuple(row) for rows in read.values() for row in rows if finder.find(row) is None]
    usual = max(Counter(v for v in rate.values() if v).most_common(1), default=(0.0, 0))[0]
    missed = [i for i, v in rate.items() if v == 0]
    uneven = [i for i, v in rate.items() if v > usual]
    fewer = [i for i, v in rate.items() if 0 < v < usual]
    if fewer and not uneven:
        uneven = [i for i, v in rate.items() if v == usual]
    if not missed and not uneven and not foreign:
        return None
    return OtherRows(
        step=step,
        model=model,
        single=len(single),
        ranks=sum(len(rows) for rows in read.values()),
        missed=tuple(sorted(missed)),
        uneven=tuple(sorted(uneven)),
        foreign=foreign,
        again=len(strange) - len(set(strange)),
        by_rank={r: tuple(i for i in found if i is not None) for r, found in by_rank.items()},
    )


def _of_one_size(single: Sequence[Row], read: Mapping[int, Sequence[Row]]) -> bool:
    """Whether rows that nobody shares may be others of the same kind: nothing is cut from them."""
    sizes = {row[3] for row in single}
    return (
        "" not in sizes
        and all(rows for rows in read.values())
        and sizes >= {row[3] for rows in read.values() for row in rows}
    )


class _Finder:
    """Finds rows among those of the single run, whatever they were padded to."""

    def __init__(self, single: Sequence[Row]) -> None:
        self._by: tuple[dict[str, int], ...] = ({}, {}, {})
        for i, row in enumerate(single):
            for table, key in zip(self._by, row[:3], strict=True):
                table.setdefault(key, i)

    def find(self, row: Row) -> int | None:
        once, whole, cut = self._by
        for table, key in ((once, row[0]), (cut, row[1]), (whole, row[2])):
            if key in table:
                return table[key]
        return None


def changed_between(record: Record) -> Unlike | None:
    """The first rank whose weights the script changed between steps, unlike the single run."""
    if record.spec.script is None:
        return None
    found = [
        (step, rank, names)
        for rank, held in record.ranks.items()
        for (_, step), told in held.info.items()
        if (names := told.get("other_weights"))
    ]
    if not found:
        return None
    step, rank, names = min(found)
    return Unlike(rank=rank, text=f"{some_of(names)} before step {step}")


def one_job(compared: Compared) -> Iterator[Finding]:
    """Processes that are called ranks and never made a process group: each trains by itself."""
    record = compared.record
    if record.spec.script is None or record.spec.topology.world_size < 2:
        return
    told = [info for held in record.ranks.values() for info in held.info.values()]
    if told and all(info.get("alone") for info in told):
        yield Finding(
            level="unknown",
            text=f"the {record.spec.topology.world_size} processes made no process group: each of "
            f"them trains by itself, and nothing distributed was compared",
        )


def something_is_exchanged(compared: Compared) -> Iterator[Finding]:
    """Ranks that exchange nothing in any step, and whose gradients are right all the same: each has
    all rows, and nothing distributed was compared."""
    record = compared.record
    of_script, num_ranks = record.spec.script is not None, record.spec.topology.world_size
    if not (of_script or record.spec.opaque) or num_ranks < 2 or not record.ranks:
        return
    events = [e for h in record.ranks.values() for own in h.events.values() for e in own]
    alone = all(i.get("alone") for h in record.ranks.values() for i in h.info.values())
    if (of_script and alone) or not all(map(_carries_nothing, events)):
        return
    text = (f"the {num_ranks} ranks exchange no gradient and no activation in any step: each of "
            "them trains by itself, on all rows, and nothing distributed was compared")  # fmt: skip
    if of_script:
        yield Finding(level="unknown", text=text)
    elif all(d.status != "fail" for d in compared.diffs):
        yield Finding(level="warning", text=text)


def _carries_nothing(event: Mapping[str, Any]) -> bool:
    """A barrier, weights from one rank, a number that is logged."""
    op = str(event.get("op", ""))
    return op.startswith(("barrier", "broadcast")) or int(event.get("numel") or 0) < 2


def as_many_steps(compared: Compared) -> Iterator[Finding]:
    """Ranks whose optimizer stepped less often than was to be compared."""
    record = compared.record
    if record.spec.script is None:
        return
    for count, ranks in ranks_that_step_less(record).items():
        text = (f"rank {spans(ranks)} ended after {count} of {record.spec.steps} optimizer steps "
                f"that the single run takes")  # fmt: skip
        if not count:
            text = (f"rank {spans(ranks)} takes none of the {record.spec.steps} optimizer steps of "
                    f"the single run: what it holds is not compared, and stays behind unless "
                    f"another rank gives it its weights")  # fmt: skip
        yield Finding(level="unknown", text=text)


def ranks_that_step_less(record: Record) -> dict[int, list[int]]:
    """How many steps -> the ranks whose optimizers took so many of those of the single run."""
    few: dict[int, list[int]] = {}
    for rank, held in record.ranks.items():
        if len(held.info) < record.spec.steps:
            few.setdefault(len(held.info), []).append(rank)
    return few


def the_optimizers_together(compared: Compared) -> Iterator[Finding]:
    """Optimizers that have a part of the parameters each: nothing is left out, and what one of
    them makes reaches the ranks that use it."""
    for _, _, text in other_order(compared.record):
        yield Finding(level="unknown", text=text)
        return
    for names, step in unowned(compared.record):
        text = f"no rank's optimizer has {some_of(names)} at step {step}; the single run's does"
        yield Finding(level="fail", text=text)
    for left in left_behind(compared.record):
        yield Finding(level="fail", text=left.text)
    for text in not_together_at_the_end(compared.record):
        yield Finding(level="unknown", text=text)


def other_order(record: Record) -> Iterator[tuple[str, int, str]]:
    """Tier and step at which the ranks' optimizers step what the single run's step at another, as
    two that are called in another order; and that in words. Steps are compared by their number."""
    for tier, references in record.references.items() if record.spec.script else ():
        its = [set(reference.after) for reference in references]
        for step, whole in enumerate(its):
            told = [h.info.get((tier, step), {}) for h in record.ranks.values()]
            had = {name for info in told for name in info.get("stepped", ())}
            others = [i for i, other in enumerate(its) if had <= other]
            if had and whole and had.isdisjoint(whole) and others:
                yield (
                    tier,
                    step,
                    f"optimizers step in another order than in the single run: at step {step} the "
                    f"ranks' have {some_of(sorted(had))}, which that run's have at step "
                    f"{others[0]}: steps are compared by their number",
                )


def not_together_at_the_end(record: Record) -> Iterator[str]:
    """Of the last step, which no other follows: parameters that a rank's optimizer lacks, and of
    which nobody has looked whether its owner's step reaches it; and those that it has too much."""
    last = record.spec.steps - 1
    for tier, references in record.references.items() if record.spec.script else ():
        if len(references) <= last:
            continue
        after = references[last].after.keys()
        lacks: dict[str, list[int]] = {}
        more: dict[str, list[int]] = {}
        for rank, held in record.ranks.items():
            steps = [
                set(held.info.get((tier, step), {}).get("stepped", ())) for step in range(last + 1)
            ]
            if not steps[last]:
                continue
            looked = after - set().union(*steps) if last else set()
            for name in sorted((after & set(held.params)) - steps[last] - looked):
                lacks.setdefault(name, []).append(rank)
            for name in sorted(steps[last] - after):
                more.setdefault(name, []).append(rank)
        for names, how in ((lacks, "lacks"), (more, "has")):
            if names:
                first = next(iter(names.values()))
                alike = [n for n, ranks in names.items() if ranks == first]
                why = ("and whether its owner's step reaches that rank is seen with a further step "
                       "only (--steps)" if how == "lacks" else
                       "and the single run's does not: it was not compared")  # fmt: skip
                yield (f"the optimizer of rank {spans(first)} {how} {some_of(alike)} at step "
                       f"{last}, {why}")  # fmt: skip


def unowned(record: Record) -> Iterator[tuple[list[str], int]]:
    """Parameters that the single run's optimizer steps, that ranks hold, and that none of theirs
    has; of the first such step."""
    if record.spec.script is None:
        return
    if any(rank.unknown for rank in record.ranks.values()) or any(other_order(record)):
        return  # parameters that were put in the place of others may be these
    held = {name for rank in record.ranks.values() for name in rank.params}
    for tier, references in record.references.items():
        for reference in references:
            told = [h.info.get((tier, reference.step), {}) for h in record.ranks.values()]
            if not told or any("stepped" not in info for info in told):
                return
            had = {name for info in told for name in info["stepped"]}
            if names := [n for n in reference.after if n in held and n not in had]:
                yield names, reference.step
                return


def left_behind(record: Record) -> Iterator[Unlike]:
    """Of each rank the first step before which parameters are not what the single run's step made
    of them, that no optimizer of that rank has stepped."""
    if record.spec.script is None:
        return
    for rank, held in record.ranks.items():
        for (_, step), told in sorted(held.info.items()):
            if names := told.get("left_behind"):
                yield Unlike(
                    rank=rank,
                    text=f"{some_of(names)} on rank {rank}, which no optimizer of that rank has "
                    f"stepped, is not brought to what its owner's step made of it before step "
                    f"{step}",
                )
                break


def what_was_done_to_compare(compared: Compared) -> Iterator[Finding]:
    """How the runs were made comparable, where a reader should know."""
    script = compared.record.spec.script
    for text in script.said if script else ():
        yield Finding(level="warning", text=text)


def _row(row: Sequence[str]) -> Row:
    once, whole, cut, *size = row
    return once, whole, cut, size[0] if size else ""


def _rows(numbers: Sequence[int]) -> str:
    word = "row" if len(numbers) == 1 else "rows"
    return f"{word} {spans(numbers)}" if len(numbers) < 200 else f"{len(numbers)} rows"
