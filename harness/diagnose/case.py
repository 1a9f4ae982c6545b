"""What a failed step is explained from: what every rank holds, what it must be, and the partials.

One Holder is one unit's gradient as some ranks of a pool hold it, bit for bit the same. A
coefficient's column is its partial over all tensors of the unit, each tensor scaled by
1 / |reference|, so that a bias counts as much as a weight matrix.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

import torch
from sumgrad.base.tensors import same_bits
from sumgrad.base.verdict import RecoveredCoefficient
from sumgrad.diagnose.fit import Fit, as_fraction, fit_deviation
from sumgrad.judge.cells import Cell, cells, expected
from sumgrad.judge.checks.rescaled import before_the_clip
from sumgrad.judge.comparison import Expected, TensorDiff
from sumgrad.judge.finding import Compared
from sumgrad.judge.knowledge import known_plan, plan_of
from sumgrad.plan.edges import Plan
from sumgrad.plan.predict import PartialSums
from sumgrad.plan.proof import Coefficient, expected_terms
from sumgrad.plan.schedule import Mismatch, compare_ledger
from sumgrad.record.directory import Record
from sumgrad.record.reference import Reference
from sumgrad.record.trace import Traces
from torch import Tensor

OF_MODULES = ("look", "terms_together", "gone_into")  # what is known whatever is wrong
MIN_EXPLAINED = 0.999  # of a deviation, by a cause that is one


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """One unit's gradient as some ranks hold it, bit for bit the same on all of them."""

    pool: str
    unit: str
    ranks: tuple[int, ...]
    measured: dict[str, Tensor]
    expected: dict[str, Expected]

    @property
    def rank(self) -> int:
        return self.ranks[0]

    @property
    def failing(self) -> bool:
        return any(not self.passes(name, e.value) for name, e in self.expected.items())

    def passes(self, name: str, value: Tensor, *, factor: float = 1.0) -> bool:
        """Whether the measured gradient is this value, within the tier's threshold."""
        error = float((self.measured[name] - value).abs().max())
        return error <= self.expected[name].threshold * max(1.0, factor)


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """One failing step of one tier, with everything that explaining it needs.

    record: with a script's gradients as they were before torch's clip. clean: a run of the same
    that passed, if one is at hand. mismatches: where the ledgers differ from the plan. diffs,
    again: the comparison, and that of a repeated step. only: the parameters that are explained.
    """

    record: Record
    tier: str
    step: int
    clean: Record | None = None
    mismatches: Sequence[Mismatch] = ()
    diffs: Sequence[TensorDiff] = ()
    again: Sequence[TensorDiff] = ()
    only: frozenset[str] | None = None
    known: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def exact(self) -> bool:
        return self.record.spec.tiers[self.tier] == "float64"

    @property
    def traces(self) -> Traces | None:
        """What a second run of this very step recorded, if there was one."""
        found = self.record.traces
        here = found is not None and (found.tier, found.step) == (self.tier, self.step)
        return found if here else None

    @property
    def has_plan(self) -> bool:
        return self.record.spec.declaration is not None

    @property
    def plan(self) -> Plan:
        return known_plan(self.record)

    @property
    def reference(self) -> Reference:
        return self.record.references[self.tier][self.step]

    @property
    def previous(self) -> Reference | None:
        """The reference of the step before."""
        return self.record.references[self.tier][self.step - 1] if self.step else None

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        """Of all ranks, those whose gradient has the right shape."""
        found = cells(self.record, self.tier, self.reference)
        return tuple(
            c
            for c in found
            if c.measured.shape == c.wanted.value.shape
            and (self.only is None or c.name in self.only)
        )

    @cached_property
    def failing_cells(self) -> list[Cell]:
        """Cells over their threshold."""
        return [c for c in self.cells if fails(c, c.measured - c.wanted.value)]

    @cached_property
    def holders(self) -> tuple[Holder, ...]:
        return tuple(holders(self.record, self.tier, self.step))

    @cached_property
    def failing(self) -> list[Holder]:
        return [holder for holder in self.holders if holder.failing]

    @cached_property
    def sums(self) -> PartialSums:
        return PartialSums(self.reference.partials)

    @cached_property
    def previous_sums(self) -> PartialSums | None:
        held = self.record.partials(self.tier).get(self.step - 1)
        return None if held is None else PartialSums(held)

    def of(self, names: Sequence[str]) -> Case:
        """The same for these parameters alone, with what was seen of modules."""
        kept = {key: held for key, held in self.known.items() if key in OF_MODULES}
        return replace(self, only=frozenset(names), known=kept)

    @property
    def parts(self) -> int:
        """How many things are explained one by one: failing holders of a plan, else all at once."""
        return len(self.failing) if self.has_plan else 1


def case_of(compared: Compared, clean: Record | None = None) -> Case | None:
    """The first failing step of the first failing tier; None where nothing can be explained."""
    failed = [d for d in compared.diffs if d.status == "fail"]
    if plan_of(compared.record) is not None:
        failed = [d for d in failed if d.comparable]
    if not failed:
        return None
    tier = next(t for t in compared.record.spec.tiers if any(d.tier == t for d in failed))
    step = min(d.step for d in failed if d.tier == tier)
    return Case(
        record=before_the_clip(compared.record, tier, step),
        tier=tier,
        step=step,
        clean=clean,
        mismatches=compared.mismatches,
        diffs=compared.diffs,
        again=compared.again,
    )


def explains(parts: Sequence[tuple[Cell, Tensor]]) -> bool:
    """Whether of all cells together a thousandth of the deviation's energy is left at most.

    parts: cells, and what a cause leaves of each. Just above the threshold nearly everything fits;
    what explains nothing is no cause.
    """
    left = energy = 0.0
    for cell, residual in parts:
        size = cell.wanted.size or cell.wanted.scale or 1.0
        left += float((residual / size).square().sum())
        energy += float(((cell.measured - cell.wanted.value) / size).square().sum())
    return left <= (1 - MIN_EXPLAINED) * energy


def fails(cell: Cell, error: Tensor, *, factor: float = 1.0) -> bool:
    """Whether an error of this cell is over its threshold."""
    if not error.numel():
        return False
    return not float(error.abs().max()) <= cell.wanted.threshold * max(1.0, factor)


def holders(record: Record, tier: str, step: int) -> Iterator[Holder]:
    """Every unit's gradient on every pool of a plan, ranks with the same bits together."""
    plan, reference = known_plan(record), record.references[tier][step]
    for pool in plan.topology.pools:
        for unit in plan.units[pool.name]:
            names = [p.name for p in plan.declaration.params_of(unit)]
            wanted = {
                n: replace(expected(record, reference, pool.name, n, tier), every_term=False)
                for n in names
            }
            classes: list[tuple[list[int], dict[str, Tensor]]] = []
            for rank in pool.ranks:
                held = record.ranks[rank].grads.get((tier, step)) if rank in record.ranks else None
                if held is None or any(
                    n not in held
                    or held[n].shape != wanted[n].value.shape
                    or not bool(torch.isfinite(held[n]).all())
                    for n in names
                ):
                    continue
                mine = {n: held[n] for n in names}
                for ranks, other in classes:
                    if all(same_bits(mine[n], other[n]) for n in names):
                        ranks.append(rank)
                        break
                else:
                    classes.append(([rank], mine))
            for ranks, grads in classes:
                yield Holder(
                    pool=pool.name,
                    unit=unit,
                    ranks=tuple(ranks),
                    measured={n: g.double() for n, g in grads.items()},
                    expected=wanted,
                )


def recovered(
    case: Case, holder: Holder, cell: Coefficient, value: float | None, sigma: float | None
) -> RecoveredCoefficient:
    """A coefficient as it was measured on a holder."""
    fraction = as_fraction(value, sigma)
    whole = cell.rows is None or cell.rows == (0, case.plan.declaration.num_rows)
    return RecoveredCoefficient(
        params=holder.unit,
        ranks=holder.ranks,
        term=cell.term,
        producer=cell.producer,
        rows=None if whole else cell.rows,
        expected="1",
        recovered=value,
        sigma=sigma,
        fraction=str(fraction) if fraction is not None else None,
    )


def whole_terms(case: Case, holder: Holder) -> list[Coefficient]:
    """One coefficient for each term of each producer that ends at a holder."""
    everything = (0, case.plan.declaration.num_rows)
    out = []
    for term, producer in expected_terms(case.plan, holder.pool, holder.unit):
        replicated = case.plan.declaration.term(term).kind == "replicated"
        cell = Coefficient(
            pool=holder.pool,
            rank=None,
            unit=holder.unit,
            term=term,
            producer=producer,
            rows=None if replicated else everything,
            weight=Fraction(1),
        )
        if column(case, holder, cell) is not None:
            out.append(cell)
    return out


def column(case: Case, holder: Holder, cell: Coefficient) -> Tensor | None:
    """The coefficient's partial over all of the holder's tensors, each scaled by 1 / |ref|."""
    parts = []
    for name, wanted in holder.expected.items():
        part = case.sums.over(cell.term, cell.producer, name, cell.rows)
        if part is None:
            return None
        parts.append(part.reshape(-1) / size_of(wanted))
    return torch.cat(parts)


def deviation(holder: Holder) -> Tensor:
    """Measured minus expected, scaled as a column is."""
    return flatten(holder, {n: holder.measured[n] - e.value for n, e in holder.expected.items()})


def flatten(holder: Holder, gradient: Mapping[str, Tensor]) -> Tensor:
    """A gradient of the holder's unit as one scaled column."""
    parts = [gradient[n].reshape(-1) / size_of(e) for n, e in holder.expected.items()]
    return torch.cat(parts)


def size_of(wanted: Expected) -> float:
    return float(wanted.value.norm()) or wanted.scale or 1.0


def fit_cells(case: Case, holder: Holder, cells: Sequence[Coefficient], *, foreign: Tensor) -> Fit:
    """Coefficients of some cells, after `foreign` (a column) is taken off the measured gradient."""
    columns = [c for c in (column(case, holder, cell) for cell in cells) if c is not None]
    return fit_deviation(columns, deviation(holder) - foreign)


def ledger_against(record: Record, plan: Plan, tier: str, step: int) -> list[Mismatch]:
    """Where the ledgers of one step differ from what this plan would have issued."""
    dtype, label = record.spec.tiers[tier], f"{tier}, step {step}"
    return [
        mismatch
        for rank, held in record.ranks.items()
        for mismatch in compare_ledger(plan, rank, dtype, label, held.events.get((tier, step), []))
    ]
