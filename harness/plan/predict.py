"""The gradient that a Plan predicts: its coefficients times the measured partials.

Used twice: on hypotheses, to find the cause of a failure; and on the planted fault's own plan,
where prediction and measurement must agree (the tool checks itself).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction

import torch
from sumgrad.plan.edges import Plan, Reduction, Statistic
from sumgrad.plan.proof import Coefficient, Sweep
from torch import Tensor

Partials = Mapping[tuple[str, str], Mapping[str, Tensor]]


class PartialSums:
    """Partials of one step, summed over row intervals.

    partials: (term, producer) -> name -> (rows, *shape).
    """

    def __init__(self, partials: Partials) -> None:
        self._partials = partials
        self._cumulative: dict[tuple[str, str, str], Tensor] = {}

    def has(self, term: str, producer: str) -> bool:
        return (term, producer) in self._partials

    def over(
        self, term: str, producer: str, name: str, rows: tuple[int, int] | None
    ) -> Tensor | None:
        """The sum over rows [a, b), or the one partial of a replicated term; None if there is none.

        float64, shape of the parameter. Summed directly, not as a difference of running sums:
        that would lose the small partials' last digits.
        """
        held = self._partials.get((term, producer), {}).get(name)
        if held is None:
            return None
        if rows is None:
            return held[0]
        key = (term, producer, f"{name}:{rows}")
        if key not in self._cumulative:
            self._cumulative[key] = held[rows[0] : rows[1]].sum(0)
        return self._cumulative[key]


class Prediction:
    """Gradients that a plan predicts at one step. previous: partials of the step before, if any."""

    def __init__(self, plan: Plan, sums: PartialSums, previous: PartialSums | None) -> None:
        self.plan, self._sums, self._previous = plan, sums, previous
        self.sweep = Sweep(plan)
        self._known: dict[tuple[str, int | None], list[Coefficient]] = {}

    def coefficients(self, pool: str, unit: str, rank: int) -> list[Coefficient]:
        """What the plan says a rank's gradient of a unit is made of."""
        reduction = self._reduction(pool, unit)
        who = rank if reduction.op == "none" else None
        key = (reduction.name, who)
        if key not in self._known:
            self._known[key] = list(self.sweep.coefficients(reduction, who))
        return self._known[key]

    def gradient(self, pool: str, unit: str, rank: int) -> dict[str, Tensor] | None:
        """name -> float64 gradient; None where this plan's value cannot be predicted."""
        out = self._combine(self.coefficients(pool, unit, rank), unit, self._sums)
        reduction = self._reduction(pool, unit)
        if out is None or reduction.stale_rank is None:
            return out
        stale = self._stale(reduction, unit)
        if stale is None:
            return None
        size = self.plan.topology.pool(pool).size if reduction.op == "avg" else 1
        return {name: value + stale[name] / size for name, value in out.items()}

    def _stale(self, reduction: Reduction, unit: str) -> dict[str, Tensor] | None:
        if self._previous is None:  # the first step: nothing can be left over
            names = [p for p in self.plan.declaration.params_of(unit)]
            return {p.name: torch.zeros(p.shape, dtype=torch.float64) for p in names}
        assert reduction.stale_rank is not None
        coefficients = self.sweep.contribution(reduction, reduction.stale_rank)
        return self._combine(coefficients, unit, self._previous)

    def _combine(
        self, coefficients: Iterable[Coefficient], unit: str, sums: PartialSums
    ) -> dict[str, Tensor] | None:
        params = self.plan.declaration.params_of(unit)
        out = {p.name: torch.zeros(p.shape, dtype=torch.float64) for p in params}
        for c in coefficients:
            producer, weight = c.producer, c.weight
            if weight is None:
                wrong = self._wrong_statistic(c)
                if wrong is None or not sums.has(c.term, wrong):
                    return None
                producer, weight = wrong, self._path_weight(c)
            if weight == 0:
                continue
            parts = {name: sums.over(c.term, producer, name, c.rows) for name in out}
            out |= {n: out[n] + float(weight) * x for n, x in parts.items() if x is not None}
        return out

    def _wrong_statistic(self, c: Coefficient) -> str | None:
        """The stored partials that stand for a term at a wrong global sum."""
        for edge in self.plan.select(Statistic):
            if edge.term == c.term and edge.mode == "local":
                return f"{c.producer}@local"
            if edge.term == c.term and edge.weight != 1:
                size = self.plan.topology.pool(edge.pool).size
                return f"{c.producer}@mean" if edge.weight * size == 1 else None
        return None

    def _path_weight(self, c: Coefficient) -> Fraction:
        """The weight from the emission to the holder, for a term without a coefficient."""
        emission = self.plan.edge(f"emit:{c.term}@{c.producer}")
        reduction = self._reduction(c.pool, c.unit)
        size = self.plan.topology.pool(c.pool).size if reduction.op == "avg" else 1
        return emission.weight * reduction.weight / size

    def _reduction(self, pool: str, unit: str) -> Reduction:
        edge = self.plan.edge(f"reduce:{unit}@{pool}")
        assert isinstance(edge, Reduction)
        return edge
