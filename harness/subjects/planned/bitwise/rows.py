"""A workload's formulas one row a call: the same shapes, hence the same bits, on whichever rank.

torch's operators on a CPU round an element by its place in a tensor and by the tensor's size, so a
rank's share of the rows would be in its bits. Of one row nothing is left of that. What is emitted
by units that pools share out is also called unit by unit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from sumgrad.subjects.planned.workload import (
    Formulas,
    Produced,
    check_produced,
    check_scalar,
    check_statistics,
)
from sumgrad.topology.declaration import Declaration
from torch import Tensor

Tensors = dict[str, Tensor]
CLIP_EPS = 1e-6


class RowByRow:
    """One step's formulas. leaves: the parameters that get gradients, by name, requiring them."""

    def __init__(
        self, formulas: Formulas, declaration: Declaration, leaves: Mapping[str, Tensor], step: int
    ) -> None:
        self.formulas, self.declaration = formulas, declaration
        self.leaves, self.step = dict(leaves), step
        self._produced: dict[int, Produced] = {}

    def produced(self, row: int) -> Produced:
        """What the producing role computes of a row, with its graph."""
        if row not in self._produced:
            made = self.formulas.produce(self.leaves, _index(row))
            check_produced(self.declaration, made, 1)
            self._produced[row] = made
        return self._produced[row]

    def statistic(self, term: str, row: int) -> Tensor:
        """A row's part of a term's sums, with its graph."""
        sums = self.formulas.statistics(term, self.produced(row), _index(row))
        check_statistics(self.declaration, term, sums)
        return sums

    def slope(self, term: str, total: Tensor, count: int, seed: float) -> Tensor:
        """seed times the derivative of a term's value by its global sums."""
        point = total.detach().clone().requires_grad_()
        value = self.formulas.value(term, point, count)
        check_scalar(term, value)
        return torch.autograd.grad(value, point, grad_outputs=torch.full_like(value, seed))[0]

    def through(self, outputs: Sequence[Tensor], slopes: Sequence[Tensor]) -> Tensors:
        """Gradients of a row's outputs, unit by unit flat."""
        grads = torch.autograd.grad(
            list(outputs),
            list(self.leaves.values()),
            grad_outputs=[slope.clone() for slope in slopes],
            allow_unused=True,
            retain_graph=True,
        )
        return self._by_unit(dict(zip(self.leaves, grads, strict=True)))

    def emitted(
        self,
        term: str,
        row: int | None,
        units: Iterable[str],
        *,
        quantity: Mapping[str, Tensor],
        state: Mapping[str, Tensor],
        seed: float,
    ) -> tuple[Tensors, Tensors]:
        """Gradients of a term at one row (None: a replicated term), unit by unit flat; and those by
        the quantity, (1, ...) by unit.

        quantity: (1, ...) by unit.
        """
        shared = next(
            role.shared_by_pools
            for role in self.declaration.roles
            if role.name == self.declaration.term(term).role
        )
        grads: Tensors = {}
        cotangents: Tensors = {}
        for group in [(u,) for u in units] if shared else [tuple(units)]:
            mine = [u for u in group if u in quantity]
            here = {u: quantity[u].detach().clone().requires_grad_() for u in mine}
            loss = self.formulas.loss_sum(
                term,
                params=self.leaves,
                quantity=here,
                rows=_index(row),
                units=group,
                step=self.step,
                state=state,
            )
            check_scalar(term, loss)
            found = torch.autograd.grad(
                loss,
                [*self.leaves.values(), *here.values()],
                grad_outputs=torch.full_like(loss, seed),
                allow_unused=True,
            )
            own = dict(zip(self.leaves, found, strict=False))
            grads |= {u: g for u, g in self._by_unit(own).items() if u in group}
            for (unit, value), grad in zip(here.items(), found[len(own) :], strict=True):
                cotangents[unit] = torch.zeros_like(value) if grad is None else grad
        return grads, cotangents

    def advanced(
        self, term: str, row: int, quantity: Mapping[str, Tensor], state: dict[str, Tensor] | None
    ) -> dict[str, Tensor]:
        """A row's state of this step from that of the step before, or from the first."""
        before = self.formulas.initial_state(term, _index(row)) if state is None else state
        return self.formulas.advance(
            term,
            params=self.leaves,
            quantity=quantity,
            rows=_index(row),
            step=self.step,
            state=before,
        )

    def count(self, term: str) -> int:
        """What a replicated term is divided by."""
        return self.formulas.count(term, _index(None))

    def _by_unit(self, grads: Mapping[str, Tensor | None]) -> Tensors:
        """Flat by unit, of units that got anything."""
        out: Tensors = {}
        for unit in dict.fromkeys(p.unit for p in self.declaration.params if p.name in grads):
            names = [p.name for p in self.declaration.params_of(unit)]
            if any(grads[name] is not None for name in names):
                out[unit] = flat({n: _or_zeros(grads[n], self.leaves[n]) for n in names}, names)
        return out


def flat(tensors: Mapping[str, Tensor], names: Iterable[str]) -> Tensor:
    """Some tensors one after the other."""
    return torch.cat([tensors[name].reshape(-1) for name in names])


def square_sum(gradient: Tensor) -> Tensor:
    """A unit's part of the squared norm, float64."""
    return gradient.double().square().sum()


def norm_of(squares: Iterable[Tensor]) -> Tensor:
    """The norm of units' squared parts, added in their order."""
    total = torch.zeros((), dtype=torch.float64)
    for square in squares:
        total = total + square
    return total.sqrt()


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """What gradients are multiplied by, float64."""
    return torch.clamp(max_norm / (norm + CLIP_EPS), max=1.0)


def _index(row: int | None) -> Tensor:
    return torch.arange(0) if row is None else torch.tensor([row])


def _or_zeros(grad: Tensor | None, leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if grad is None else grad
