"""What a failed step is explained from: who holds what, and the partials as columns.

One Holder is one unit's gradient as some ranks hold it, bit for bit the same. A cell is a term of a
producer on some rows; its column is its partial over all tensors of the unit, each tensor scaled by
1 / |reference|, so that a bias counts as much as a weight matrix.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from sumgrad.compare import Expected, expect, same_bits
from sumgrad.fit import Fit, fit_deviation
from sumgrad.plan import Plan
from sumgrad.predict import PartialSums
from sumgrad.proof import Coefficient, expected_terms
from sumgrad.record import RunRecord
from sumgrad.schedule import Mismatch, compare_ledger
from torch import Tensor


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One failing step of one tier, with everything that explaining it needs."""

    record: RunRecord
    tier: str
    step: int
    holders: tuple[Holder, ...]
    sums: PartialSums
    previous: PartialSums | None

    @property
    def plan(self) -> Plan:
        return self.record.plan

    @property
    def failing(self) -> list[Holder]:
        return [holder for holder in self.holders if holder.failing]


def holders(record: RunRecord, tier: str, step: int) -> Iterator[Holder]:
    plan = record.plan
    reference = record.references[tier][step]
    dtype = record.spec.tiers[tier]
    for pool in plan.topology.pools:
        for unit in plan.units[pool.name]:
            names = [p.name for p in plan.declaration.params_of(unit)]
            wanted = {
                n: expect(plan, reference, pool.name, n, tier=tier, dtype=dtype, every_term=False)
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


def covers_all(case: Case, cell: Coefficient) -> bool:
    return cell.rows is None or cell.rows == (0, case.plan.declaration.num_rows)


def whole_terms(case: Case, holder: Holder) -> list[Coefficient]:
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
    """The cell's partial over all of the holder's tensors, each scaled by 1 / |ref|."""
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


def ledger_against(record: RunRecord, plan: Plan, tier: str, step: int) -> list[Mismatch]:
    """Where the ledgers of one step differ from what this plan would have issued."""
    dtype, label = record.spec.tiers[tier], f"{tier}, step {step}"
    return [
        mismatch
        for rank, held in record.ranks.items()
        for mismatch in compare_ledger(plan, rank, dtype, label, held.events.get((tier, step), []))
    ]
