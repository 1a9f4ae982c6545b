"""The Proof: with which coefficient every term lands in every gradient, by exact fractions.

What it is: a sum over the Plan's paths, from the plan alone; no process is started. A coefficient
belongs to (pool or rank, unit, term, producer, rows); the law says that all are 1, that no edge
carries another weight, that every value a term reads and every global sum holds every row exactly
once. An interval sweep over the cuts of all pools keeps it fast: 90,112 ranks take about a second.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np
from sumgrad.plan.edges import (
    ONE,
    Count,
    Emission,
    Handoff,
    Norm,
    Plan,
    Reduction,
    Statistic,
    Transfer,
    overlaps,
)

Interval = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Coefficient:
    """`weight` is None where no coefficient exists: the value itself would be another one.

    rank: None when all ranks of the pool hold the same. rows: None for a replicated term.
    """

    pool: str
    rank: int | None
    unit: str
    term: str
    producer: str
    rows: Interval | None
    weight: Fraction | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One statement of the law that an edge breaks."""

    edge: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """`holds` when every coefficient is 1 and nothing was found."""

    coefficients: tuple[Coefficient, ...]
    findings: tuple[Finding, ...]
    num_messages: int

    @property
    def holds(self) -> bool:
        return not self.findings and all(c.weight == 1 for c in self.coefficients)


def prove(plan: Plan) -> Proof:
    """Coefficients of every holder of every unit, and every finding."""
    sweep = Sweep(plan)
    coefficients: list[Coefficient] = []
    for reduction in plan.select(Reduction):
        pool = plan.topology.pool(reduction.pool)
        ranks = pool.ranks if reduction.op == "none" else [None]
        for rank in ranks:
            coefficients.extend(sweep.coefficients(reduction, rank))
    num_messages = sum(len(overlaps(plan, t)[0]) for t in plan.select(Transfer))
    num_messages += len(plan.select(Handoff))
    return Proof(
        coefficients=tuple(coefficients), findings=tuple(_findings(plan)), num_messages=num_messages
    )


def expected_terms(plan: Plan, pool: str, unit: str) -> list[tuple[str, str]]:
    """(term, producer) pairs that a pool's reduced gradient of a unit must hold, once each.

    A home holds all terms; a replica holds the terms it computes itself.
    """
    if not plan.role(pool).home:
        return [(e.term, pool) for e in plan.select(Emission, pool=pool)]
    out = [(e.term, e.pool) for e in plan.select(Emission) if unit in plan.units[e.pool]]
    if pool == plan.producer_pool:
        out += [(t.term, t.src) for t in plan.select(Transfer) if t.kind == "cotangent"]
    return out


class Cover:
    """How often each row is counted, by exact weight: weight -> +1/-1 at the cuts."""

    def __init__(self, cuts: np.ndarray) -> None:
        self._cuts = cuts
        self._steps: dict[Fraction, np.ndarray] = {}
        self.once = Fraction(0)
        self.exists = True

    def add_rows(self, a: np.ndarray, b: np.ndarray, weight: Fraction) -> None:
        """Count the intervals [a, b) with `weight`; empty ones count nothing."""
        if weight == 0:
            return
        steps = self._steps.setdefault(weight, np.zeros(len(self._cuts) + 1, dtype=np.int64))
        np.add.at(steps, np.searchsorted(self._cuts, a), 1)
        np.add.at(steps, np.searchsorted(self._cuts, b), -1)

    def add(self, other: Cover, weight: Fraction) -> None:
        """Count everything that another cover counts, times `weight`."""
        self.once += other.once * weight
        self.exists &= other.exists or weight == 0
        for inner, steps in other._steps.items():
            total = inner * weight
            if total != 0:
                mine = self._steps.setdefault(total, np.zeros_like(steps))
                mine += steps

    def intervals(self) -> Iterator[tuple[Interval, Fraction]]:
        """Maximal row intervals with their total weight, in order, zeros included."""
        num = len(self._cuts) - 1
        if num <= 0:
            return
        counts = [(w, np.cumsum(s)[:num]) for w, s in self._steps.items()]
        changed = np.zeros(num, dtype=bool)
        for _, count in counts:
            changed[1:] |= count[1:] != count[:-1]
        starts = [0, *np.flatnonzero(changed).tolist(), num]
        previous: tuple[Interval, Fraction] | None = None
        for i, j in itertools.pairwise(starts):
            total = sum((w * int(c[i]) for w, c in counts), Fraction(0))
            a, b = int(self._cuts[i]), int(self._cuts[j])
            if previous is not None and previous[1] == total:
                a = previous[0][0]
            elif previous is not None:
                yield previous
            previous = ((a, b), total)
        if previous is not None:
            yield previous


Held = dict[tuple[str, str], Cover]


class Sweep:
    """Sums weights along all paths of one plan. Covers of whole pools are kept."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._reduced: dict[str, Held] = {}

    @cached_property
    def _cuts(self) -> np.ndarray:
        return np.unique(np.concatenate([np.asarray(o) for o in self.plan.offsets.values()]))

    def coefficients(self, reduction: Reduction, rank: int | None) -> Iterator[Coefficient]:
        """What one holder's gradient of one unit is made of, expected terms first."""
        held = self.reduced(reduction, rank)
        wanted = expected_terms(self.plan, reduction.pool, reduction.unit)
        for term, producer in dict.fromkeys([*wanted, *held]):
            cover = held.get((term, producer)) or Cover(self._cuts)
            yield from self._coefficients(reduction, rank, term, producer, cover)

    def contribution(self, reduction: Reduction, rank: int) -> Iterator[Coefficient]:
        """What one rank puts into a reduction, before it runs and without the edge's weight."""
        for (term, producer), cover in self._local(reduction, [rank]).items():
            yield from self._coefficients(reduction, rank, term, producer, cover)

    def _coefficients(
        self, reduction: Reduction, rank: int | None, term: str, producer: str, cover: Cover
    ) -> Iterator[Coefficient]:
        for rows, weight in self._pieces(term, cover):
            yield Coefficient(
                pool=reduction.pool,
                rank=rank,
                unit=reduction.unit,
                term=term,
                producer=producer,
                rows=rows,
                weight=weight if cover.exists else None,
            )

    def _pieces(self, term: str, cover: Cover) -> Iterable[tuple[Interval | None, Fraction]]:
        if self.plan.declaration.term(term).kind == "replicated":
            return [(None, cover.once)]
        return cover.intervals()

    def reduced(self, reduction: Reduction, rank: int | None) -> Held:
        """The gradient after the reduction: on every rank of the pool, or on one if none runs."""
        if reduction.op == "none":
            assert rank is not None, reduction.name
            return self._scaled(self._local(reduction, [rank]), reduction.weight)
        if reduction.name not in self._reduced:
            pool = self.plan.topology.pool(reduction.pool)
            factor = reduction.weight / (pool.size if reduction.op == "avg" else 1)
            local = self._local(reduction, pool.ranks)
            self._reduced[reduction.name] = self._scaled(local, factor)
        return self._reduced[reduction.name]

    def _scaled(self, held: Held, factor: Fraction) -> Held:
        out: Held = {}
        for key, cover in held.items():
            out[key] = Cover(self._cuts)
            out[key].add(cover, factor)
        return out

    def _local(self, reduction: Reduction, ranks: Iterable[int]) -> Held:
        """The sum of what these ranks of the pool hold before the reduction."""
        plan, pool = self.plan, self.plan.topology.pool(reduction.pool)
        members = (
            np.arange(pool.size)
            if ranks is pool.ranks
            else np.asarray([pool.ranks.index(rank) for rank in ranks], dtype=np.int64)
        )
        held: Held = {}
        for emission in plan.select(Emission, pool=pool.name):
            cover = held.setdefault((emission.term, pool.name), Cover(self._cuts))
            self._emit(emission, members, cover)
        if pool.name == plan.producer_pool:
            for transfer in plan.select(Transfer):
                if transfer.kind == "cotangent":
                    key = (transfer.term or "", transfer.src)
                    self._receive(transfer, members, held.setdefault(key, Cover(self._cuts)))
        for handoff in plan.select(Handoff):
            if (
                handoff.dst == pool.name
                and reduction.unit in handoff.units
                and pool.ranks.index(handoff.dst_rank) in members
            ):
                source = plan.edge(f"reduce:{reduction.unit}@{handoff.src}")
                assert isinstance(source, Reduction)
                for key, cover in self.reduced(source, handoff.src_rank).items():
                    held.setdefault(key, Cover(self._cuts)).add(cover, handoff.weight)
        return held

    def _emit(self, emission: Emission, members: np.ndarray, cover: Cover) -> None:
        weight = emission.weight
        if emission.placement == "leader":
            cover.once += weight if 0 in members else 0
            return
        if emission.placement == "all":
            cover.once += weight * len(members)
            return
        for statistic in self.plan.select(Statistic, pool=emission.pool):
            if statistic.term == emission.term:
                cover.exists &= statistic.mode != "local" and statistic.weight == 1
                if statistic.mode == "differentiable":
                    weight *= self.plan.topology.pool(emission.pool).size
        cuts = np.asarray(self.plan.offsets[emission.pool])
        cover.add_rows(cuts[members], cuts[members + 1], weight)

    def _receive(self, transfer: Transfer, members: np.ndarray, cover: Cover) -> None:
        emission = self.plan.edge(f"emit:{transfer.term}@{transfer.src}")
        assert isinstance(emission, Emission)
        src, dst, a, b = overlaps(self.plan, transfer)
        keep = np.isin(dst, members)
        if transfer.overrides:
            src_ranks = self.plan.topology.pool(transfer.src).ranks
            dst_ranks = self.plan.topology.pool(transfer.dst).ranks
            for (src_rank, dst_rank), weight in transfer.overrides:
                hit = (src == src_ranks.index(src_rank)) & (dst == dst_ranks.index(dst_rank))
                chosen = keep & hit
                cover.add_rows(a[chosen], b[chosen], weight * emission.weight)
                keep &= ~hit
        cover.add_rows(a[keep], b[keep], transfer.weight * emission.weight)


def _findings(plan: Plan) -> Iterator[Finding]:
    """Every edge whose own statement is not the law's."""
    num_rows = plan.declaration.num_rows
    for pool, cuts in plan.offsets.items():
        if cuts[0] != 0 or cuts[-1] != num_rows or any(np.diff(cuts) < 0):
            yield Finding(
                edge=f"slices@{pool}", text=f"rows of {pool} are not [0, {num_rows}) once"
            )
    for edge in plan.edges:
        if edge.weight != ONE:
            text = f"carries the weight {edge.weight}; the law allows only 1"
            if isinstance(edge, Count | Statistic | Norm):
                text = f"does not hold every row once: weight {edge.weight}"
            yield Finding(edge=edge.name, text=text)
        if isinstance(edge, Transfer):
            for (src, dst), weight in edge.overrides:
                if weight != edge.weight:
                    what = "is not sent" if weight == 0 else f"carries the weight {weight}"
                    yield Finding(edge=edge.name, text=f"rank {src} -> rank {dst}: {what}")
        elif isinstance(edge, Reduction):
            yield from _reduction_findings(edge)
        elif isinstance(edge, Statistic) and edge.mode != "detached":
            yield Finding(edge=edge.name, text=_STATISTIC_TEXT[edge.mode])
        elif isinstance(edge, Emission) and edge.placement == "all":
            text = "a contribution from replicated inputs is emitted by every rank, not by one"
            yield Finding(edge=edge.name, text=text)


def _reduction_findings(edge: Reduction) -> Iterator[Finding]:
    if edge.op == "avg":
        yield Finding(edge=edge.name, text="reduces with AVG; the law says SUM")
    if edge.op == "none":
        yield Finding(edge=edge.name, text="is skipped: partial sums stay on their ranks")
    if edge.stale_rank is not None:
        text = f"rank {edge.stale_rank} adds what it contributed in the previous step"
        yield Finding(edge=edge.name, text=text)


_STATISTIC_TEXT = {
    "local": "the term is evaluated at this rank's own sums, not at the global ones",
    "differentiable": "the global sum is differentiated on every rank: counted pool-size times",
}
