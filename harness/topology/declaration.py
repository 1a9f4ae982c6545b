"""What a workload declares about itself: names, shapes and who computes what. Data only.

A Plan is made from a Topology and a Declaration; no tensor exists yet. The words:

unit      parameters that are owned and reduced together ("ci_fn", a site)
role      what a pool does; a home role owns the full gradient of its units, a replica role only
          computes terms on a copy of them and hands its sum to the homes
quantity  values, one block of numbers per row, that one role computes and other roles read;
          the readers send the loss's derivative back
term      one summand of the loss: `rows` (a sum over rows), `replicated` (from parameters alone),
          or `statistic` (a non-linear function of sums over all rows)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, Literal

TermKind = Literal["rows", "replicated", "statistic"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Param:
    """One trained tensor."""

    name: str
    unit: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """What a pool does. With `shared_by_pools`, the units are split over the role's pools."""

    name: str
    units: tuple[str, ...]
    home: bool
    shared_by_pools: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """Values that `role` computes for every row; `shapes` gives one row's shape by unit."""

    name: str
    role: str
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def numel_per_row(self) -> dict[str, int]:
        return {unit: prod(shape) for unit, shape in self.shapes.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One summand of the loss, computed by the pools of `role` on the units they hold."""

    name: str
    role: str
    kind: TermKind
    reads_quantity: bool = False
    statistic_numel: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """Everything a Plan needs to know of a workload.

    row_lengths: valid positions of each row, in global row order; its length is the number of
    rows. Counts of `rows` and `statistic` terms are sums over rows.
    """

    workload: str
    row_lengths: tuple[int, ...]
    params: tuple[Param, ...]
    roles: tuple[Role, ...]
    quantity: Quantity | None
    terms: tuple[Term, ...]

    @property
    def num_rows(self) -> int:
        return len(self.row_lengths)

    def role(self, name: str) -> Role:
        return next(role for role in self.roles if role.name == name)

    def term(self, name: str) -> Term:
        return next(term for term in self.terms if term.name == name)

    def params_of(self, unit: str) -> tuple[Param, ...]:
        return tuple(param for param in self.params if param.unit == unit)

    def numel_of(self, unit: str) -> int:
        return sum(param.numel for param in self.params_of(unit))


def declaration_to_json(declaration: Declaration) -> dict[str, Any]:
    """Plain data for a run record."""
    return asdict(declaration)


def declaration_from_json(data: Mapping[str, Any]) -> Declaration:
    """Read back what `declaration_to_json` wrote."""
    return Declaration(
        workload=data["workload"],
        row_lengths=tuple(data["row_lengths"]),
        params=tuple(Param(**{**p, "shape": tuple(p["shape"])}) for p in data["params"]),
        roles=tuple(Role(**{**r, "units": tuple(r["units"])}) for r in data["roles"]),
        quantity=_quantity_from_json(data["quantity"]),
        terms=tuple(Term(**t) for t in data["terms"]),
    )


def _quantity_from_json(data: Mapping[str, Any] | None) -> Quantity | None:
    if data is None:
        return None
    shapes = {unit: tuple(shape) for unit, shape in data["shapes"].items()}
    return Quantity(name=data["name"], role=data["role"], shapes=shapes)
