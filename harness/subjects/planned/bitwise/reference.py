"""The bits that every rank must have: one process, the same formulas, one row a call.

Imports no plan, no collective and nothing of the step. Before it is relied on, everything is
computed again from the last row to the first: other bits are no ranks' fault.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from sumgrad.base.tensors import same_bits
from sumgrad.base.tree import Key, root
from sumgrad.subjects.planned.bitwise.rows import (
    RowByRow,
    Tensors,
    clip_factor,
    flat,
    norm_of,
    square_sum,
)
from sumgrad.subjects.planned.workload import Formulas, Workload
from sumgrad.topology.declaration import Declaration, Role, Term
from torch import Tensor

State = dict[str, dict[int, dict[str, Tensor]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class BitsOfStep:
    """What one process has at one step, by name. problems: of two runs that are not the same."""

    step: int
    tensors: Tensors
    problems: tuple[str, ...]


def single_bits(
    workload: Workload, formulas: Formulas, dtype: torch.dtype, *, steps: int, max_norm: float
) -> list[BitsOfStep]:
    """Every step's bits. formulas: those that ranks have. max_norm: gradients are clipped to it."""
    num_rows = workload.declaration.num_rows
    states: tuple[State, State] = ({}, {})
    out = []
    for step in range(steps):
        first, again = (
            _Single(workload, formulas, dtype, step, state, order, max_norm).run()
            for state, order in zip(
                states, (range(num_rows), range(num_rows - 1, -1, -1)), strict=True
            )
        )
        other = [name for name in first if not same_bits(first[name], again[name])]
        problems = [
            f"one process that goes through its rows from the last to the first has other bits in "
            f"{name}, and in {len(other)} of {len(first)} tensors: an operator is not the same "
            f"each time"
            for name in other[:1]
        ]
        out.append(BitsOfStep(step=step, tensors=first, problems=tuple(problems)))
    return out


class _Single:
    def __init__(
        self,
        workload: Workload,
        formulas: Formulas,
        dtype: torch.dtype,
        step: int,
        state: State,
        order: Sequence[int],
        max_norm: float,
    ) -> None:
        declaration: Declaration = workload.declaration
        params = workload.params(step)
        leaves = {n: value.to(dtype).requires_grad_() for n, value in params.items()}
        self.rows = RowByRow(formulas, declaration, leaves, step)
        self.declaration, self.formulas, self.state = declaration, formulas, state
        self.order, self.max_norm = order, max_norm
        self.num = declaration.num_rows
        everything = torch.arange(self.num)
        self.counts = {t.name: formulas.count(t.name, everything) for t in declaration.terms
                       if t.kind != "replicated"}  # fmt: skip
        self.tensors: Tensors = {}
        self.held: dict[str, dict[str, dict[Key, Tensor]]] = {}  # term -> unit -> its leaves
        self.cotangents: dict[str, dict[int, Mapping[str, Tensor]]] = {}

    def run(self) -> Tensors:
        if self._shapes:
            made = {row: self.rows.produced(row).quantity for row in self.order}
            for unit in self._shapes:
                parts = [made[row][unit].detach() for row in range(self.num)]
                self.tensors[f"quantity/{unit}"] = torch.cat(parts)
        for term in self.declaration.terms:
            if term.kind == "statistic":
                self._statistic(term)
            elif term.kind == "replicated":
                seed = self.formulas.coefficient(term.name) / self.rows.count(term.name)
                grads, _ = self.rows.emitted(
                    term.name, None, self._role(term.role).units, quantity={}, state={}, seed=seed
                )
                self._hold(term.name, 0, grads)
            else:
                self._by_rows(term)
        for term_name, by_row in self.cotangents.items():
            for unit in by_row[0]:
                parts = [by_row[row][unit] for row in range(self.num)]
                self.tensors[f"cotangent/{term_name}/{unit}"] = torch.cat(parts)
        self._gradients()
        return self.tensors

    def _statistic(self, term: Term) -> None:
        sums = {row: self.rows.statistic(term.name, row) for row in self.order}
        total = root({(0, row): value.detach() for row, value in sums.items()}, self.num)
        self.tensors[f"statistic/{term.name}"] = total
        slope = self.rows.slope(
            term.name, total, self.counts[term.name], self.formulas.coefficient(term.name)
        )
        for row in self.order:
            self._hold(term.name, row, self.rows.through([sums[row]], [slope]))

    def _by_rows(self, term: Term) -> None:
        seed = self.formulas.coefficient(term.name) / self.counts[term.name]
        for row in self.order:
            quantity: Tensors = {}
            if term.reads_quantity:
                made = self.rows.produced(row).quantity
                quantity = {u: value.detach().clone() for u, value in made.items()}
            known = self.state.setdefault(term.name, {})
            known[row] = self.rows.advanced(term.name, row, quantity, known.get(row))
            grads, cotangents = self.rows.emitted(
                term.name, row, self._role(term.role).units,
                quantity=quantity, state=known[row], seed=seed,
            )  # fmt: skip
            self._hold(term.name, row, grads)
            if term.reads_quantity:
                self.cotangents.setdefault(term.name, {})[row] = cotangents
                outputs = self.rows.produced(row).quantity
                units = [u for u in self._shapes if u in cotangents]
                through = self.rows.through(
                    [outputs[u] for u in units], [cotangents[u] for u in units]
                )
                self._hold(term.name, row, through)

    def _hold(self, term: str, row: int, grads: Tensors) -> None:
        for unit, value in grads.items():
            self.held.setdefault(term, {}).setdefault(unit, {})[0, row] = value

    def _gradients(self) -> None:
        """Roots of every term; in its home a unit's own terms first, then what is handed over."""
        roles = self.declaration.roles
        squares = []
        for unit in dict.fromkeys(p.unit for p in self.declaration.params):
            home = next(role for role in roles if role.home and unit in role.units)
            parts = self._roots(home, unit)
            for role in roles:
                if not role.home and unit in role.units:
                    terms = self._roots(role, unit)
                    total = _folded(list(terms.values()))
                    self.tensors[f"root/{'+'.join(terms)}/{unit}"] = total
                    parts["+".join(terms)] = total
            gradient = _folded(list(parts.values()))
            squares.append(square_sum(gradient))
            params = self.declaration.params_of(unit)
            for param, part in zip(
                params, gradient.split([self.rows.leaves[p.name].numel() for p in params]),
                strict=True,
            ):  # fmt: skip
                self.tensors[f"gradient/{param.name}"] = part.view(param.shape).clone()
        norm = norm_of(squares)
        self.tensors["norm/all"], self.tensors["clip/all"] = norm, clip_factor(norm, self.max_norm)

    def _roots(self, role: Role, unit: str) -> Tensors:
        """The roots of the terms that reach a unit in a role, by term; noted as they are."""
        out: Tensors = {}
        for term in self.declaration.terms:
            reaches = term.role == role.name or self._arrives(term, role)
            if not reaches:
                continue
            held = self.held.get(term.name, {}).get(unit, {})
            num = 1 if term.kind == "replicated" else self.num
            nothing = flat(
                {p.name: torch.zeros_like(self.rows.leaves[p.name]).detach()
                 for p in self.declaration.params_of(unit)},
                [p.name for p in self.declaration.params_of(unit)],
            )  # fmt: skip
            filled = {(0, row): held.get((0, row), nothing) for row in range(num)}
            out[term.name] = root(filled, num)
            self.tensors[f"root/{term.name}/{unit}"] = out[term.name]
        return out

    def _arrives(self, term: Term, role: Role) -> bool:
        """Whether a term that another role emits comes back to this one by the quantity."""
        quantity = self.declaration.quantity
        return quantity is not None and term.reads_quantity and quantity.role == role.name

    @property
    def _shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of the quantity, by unit in declared order; nothing where there is none."""
        return self.declaration.quantity.shapes if self.declaration.quantity else {}

    def _role(self, name: str) -> Role:
        return next(role for role in self.declaration.roles if role.name == name)


def _folded(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
