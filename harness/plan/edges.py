"""The Plan: topology x workload as data. Every arrow of the step is an edge with an exact weight.

What it is: the one description that the step executes, the Proof sums up, the ledger is held
against and the faults mutate. What it is not: it holds no tensor and starts no process. Families
of messages are stored as one edge and enumerated from the row slices, so a plan for 90,112 ranks
is small.

Order of one step, for a rank of pool p:

    count -> values out | values in -> statistic -> cotangents -> [handoff in] -> reduction
          -> [handoff out] -> norm
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from sumgrad.base.errors import UserError
from sumgrad.topology.declaration import Declaration, Role
from sumgrad.topology.pools import Pool, Topology

ONE = Fraction(1)
Placement = Literal["rows", "leader", "all"]
StatisticMode = Literal["detached", "differentiable", "local"]
ReductionOp = Literal["sum", "avg", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """The global counts of a pool's terms: a SUM of each rank's own count."""

    name: str
    pool: str
    terms: tuple[str, ...]
    weight: Fraction = ONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistic:
    """The global sums inside a non-linear term. `detached` is the law's global residual."""

    name: str
    pool: str
    term: str
    mode: StatisticMode = "detached"
    weight: Fraction = ONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Emission:
    """A term's partial enters the gradients: of every rank's rows, of the leader, or of all."""

    name: str
    pool: str
    term: str
    placement: Placement
    weight: Fraction = ONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Messages wherever a row slice of `src` meets one of `dst`.

    kind: `value` carries the quantity, `cotangent` the derivative of `term` by it.
    overrides: (src rank, dst rank) -> weight, for single messages; weight 0 means not sent.
    """

    name: str
    kind: Literal["value", "cotangent"]
    src: str
    dst: str
    units: tuple[str, ...]
    term: str | None = None
    weight: Fraction = ONE
    overrides: tuple[tuple[tuple[int, int], Fraction], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Handoff:
    """A replica pool's summed gradient goes to a home pool once, leader to leader."""

    name: str
    src: str
    dst: str
    src_rank: int
    dst_rank: int
    units: tuple[str, ...]
    weight: Fraction = ONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """The all-reduce of one unit's gradient over a pool.

    weight: factor every rank puts on its own partial first. stale_rank: this rank also adds what
    it contributed in the previous step (a buffer that nobody zeroed).
    """

    name: str
    pool: str
    unit: str
    op: ReductionOp = "sum"
    weight: Fraction = ONE
    stale_rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """The global gradient norm: the leader of each home pool adds its units' squares, once.

    max_norm: gradients are then clipped to it.
    """

    name: str
    max_norm: float = 0.25
    weight: Fraction = ONE


Edge = Count | Statistic | Emission | Transfer | Handoff | Reduction | Norm


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a Transfer: rows [a, b) from a global rank to a global rank."""

    src: int
    dst: int
    a: int
    b: int
    weight: Fraction


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All edges of one step. `offsets[pool]` cuts the rows: member i owns [o[i], o[i + 1])."""

    topology: Topology
    declaration: Declaration
    offsets: Mapping[str, tuple[int, ...]]
    units: Mapping[str, tuple[str, ...]]
    edges: tuple[Edge, ...]
    _by_name: dict[str, Edge] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        self._by_name.update({edge.name: edge for edge in self.edges})
        assert len(self._by_name) == len(self.edges), "edge names must be unique"

    def edge(self, name: str) -> Edge:
        return self._by_name[name]

    def with_edge(self, edge: Edge) -> Plan:
        """The same plan with the edge of that name replaced."""
        assert edge.name in self._by_name, edge.name
        edges = tuple(edge if old.name == edge.name else old for old in self.edges)
        return replace(self, edges=edges, _by_name={})

    def select(self, kind: type, *, pool: str | None = None) -> tuple[Any, ...]:
        """Edges of one kind, in step order; `pool` restricts those that belong to one pool."""
        found = (edge for edge in self.edges if isinstance(edge, kind))
        return tuple(e for e in found if pool is None or getattr(e, "pool", None) == pool)

    def rows(self, rank: int) -> tuple[int, int]:
        """The half-open interval of global rows that a rank owns; empty where a == b."""
        pool = self.topology.pool_of(rank)
        index, cuts = pool.ranks.index(rank), self.offsets[pool.name]
        return cuts[index], cuts[index + 1]

    def role(self, pool: str) -> Role:
        return self.declaration.role(self.topology.pool(pool).role)

    def home(self, unit: str) -> str:
        """The pool that holds the full gradient of a unit."""
        return next(p for p, units in self.units.items() if unit in units and self.role(p).home)

    def leader(self, pool: str) -> int:
        return self.topology.pool(pool).ranks[0]

    @cached_property
    def producer_pool(self) -> str | None:
        """The pool that computes the quantity, if the workload has one."""
        quantity = self.declaration.quantity
        return self.topology.with_role(quantity.role)[0].name if quantity else None


def build_plan(topology: Topology, declaration: Declaration) -> Plan:
    """The lawful plan: every weight 1, every reduction SUM, every replicated term from a leader.

    UserError where pools and roles do not fit or a pool's rows do not add up.
    """
    problems = [
        f"{topology.where(('workload',))}: {text}" for text in _declaration_problems(declaration)
    ]
    if problems:
        raise UserError(problems)
    offsets = {p.name: _offsets(p, topology, declaration, problems) for p in topology.pools}
    units = _units(topology, declaration, problems)
    if problems:
        raise UserError(problems)
    edges = tuple(_edges(topology, declaration, units))
    return Plan(
        topology=topology, declaration=declaration, offsets=offsets, units=units, edges=edges
    )


def _declaration_problems(declaration: Declaration) -> Iterator[str]:
    """What is wrong with a declaration on any topology."""
    name, roles = declaration.workload, {role.name: role for role in declaration.roles}
    groups = {"rows": declaration.row_lengths, "params": declaration.params,
              "roles": declaration.roles, "terms": declaration.terms}  # fmt: skip
    for what, items in groups.items():
        if not items:
            yield f"{name} declares no {what}"
        names = [getattr(item, "name", str(i)) for i, item in enumerate(items)]
        if len(set(names)) != len(names):
            yield f"{name} declares {what} of equal name"
        yield from (f"{name}: {n!r} has a / or @ in it" for n in names if set(n) & set("/@"))
    for unit in dict.fromkeys(param.unit for param in declaration.params):
        homes = [role.name for role in declaration.roles if role.home and unit in role.units]
        if len(homes) != 1:
            yield f"{name}: unit {unit!r} has {len(homes)} home roles, expected exactly one"
    units = {param.unit for param in declaration.params}
    for role in declaration.roles:
        if not role.units or set(role.units) - units:
            yield f"{name}: role {role.name!r} has units {role.units} that no parameter is in"
    yield from _term_problems(declaration, roles)


def _term_problems(declaration: Declaration, roles: dict[str, Role]) -> Iterator[str]:
    name = declaration.workload
    quantity = declaration.quantity
    single = {quantity.role} if quantity else set()
    for term in declaration.terms:
        if term.role not in roles:
            yield f"{name}: term {term.name!r} has the unknown role {term.role!r}"
        if term.kind == "statistic":
            single.add(term.role)
        if term.reads_quantity and (quantity is None or term.role == quantity.role):
            yield f"{name}: term {term.name!r} reads a quantity that its own pool computes, or none"
    for role_name in single:
        if role_name not in roles or roles[role_name].shared_by_pools:
            yield f"{name}: role {role_name!r} must be one pool; it computes global values"


def _offsets(
    pool: Pool, topology: Topology, declaration: Declaration, problems: list[str]
) -> tuple[int, ...]:
    rows, size = declaration.num_rows, pool.size
    if pool.rows_per_rank is None:
        return tuple(i * (rows // size) + min(i, rows % size) for i in range(size + 1))
    total = sum(pool.rows_per_rank)
    if total != rows:
        where = topology.where(("pools", pool.name, "rows_per_rank"))
        problems.append(f"{where}: got {total} rows in all, expected the batch's {rows}")
    return tuple(np.cumsum([0, *pool.rows_per_rank]).tolist())


def _units(
    topology: Topology, declaration: Declaration, problems: list[str]
) -> dict[str, tuple[str, ...]]:
    known = {role.name for role in declaration.roles}
    for pool in topology.pools:
        if pool.role not in known:
            where = topology.where(("pools", pool.name))
            problems.append(
                f"{where}: got role {pool.role!r}, expected one of {', '.join(sorted(known))} "
                f"(the roles of workload {declaration.workload})"
            )
    out: dict[str, tuple[str, ...]] = {}
    for role in declaration.roles:
        pools = topology.with_role(role.name)
        limit = len(role.units) if role.shared_by_pools else 1
        if not 1 <= len(pools) <= limit:
            expected = f"between 1 and {limit}" if limit > 1 else "exactly 1"
            problems.append(
                f"{topology.where(('pools',))}: got {len(pools)} pools with role {role.name}, "
                f"expected {expected}"
            )
            continue
        cuts = [i * len(role.units) // len(pools) for i in range(len(pools) + 1)]
        for pool, (start, stop) in zip(pools, pairwise(cuts), strict=True):
            out[pool.name] = role.units[start:stop] if role.shared_by_pools else role.units
    return out


def _edges(
    topology: Topology, declaration: Declaration, units: Mapping[str, tuple[str, ...]]
) -> Iterator[Edge]:
    yield from _term_edges(topology, declaration, units)
    for pool in topology.pools:
        if not declaration.role(pool.role).home:
            yield from _reductions(pool, units)
    for src in topology.pools:
        if declaration.role(src.role).home:
            continue
        for dst in topology.pools:
            shared = tuple(u for u in units[dst.name] if u in units[src.name])
            if shared and declaration.role(dst.role).home:
                yield Handoff(
                    name=f"handoff:{src.name}->{dst.name}",
                    src=src.name,
                    dst=dst.name,
                    src_rank=src.ranks[0],
                    dst_rank=dst.ranks[0],
                    units=shared,
                )
    for pool in topology.pools:
        if declaration.role(pool.role).home:
            yield from _reductions(pool, units)
    yield Norm(name="norm")


def _term_edges(
    topology: Topology, declaration: Declaration, units: Mapping[str, tuple[str, ...]]
) -> Iterator[Edge]:
    quantity = declaration.quantity
    for pool in topology.pools:
        terms = [t for t in declaration.terms if t.role == pool.role]
        counted = tuple(t.name for t in terms if t.kind != "replicated")
        if counted:
            yield Count(name=f"count@{pool.name}", pool=pool.name, terms=counted)
        for term in terms:
            if term.kind == "statistic":
                name = f"statistic:{term.name}@{pool.name}"
                yield Statistic(name=name, pool=pool.name, term=term.name)
            yield Emission(
                name=f"emit:{term.name}@{pool.name}",
                pool=pool.name,
                term=term.name,
                placement="leader" if term.kind == "replicated" else "rows",
            )
        readers = [t for t in terms if t.reads_quantity]
        if not readers or quantity is None:
            continue
        src = topology.with_role(quantity.role)[0].name
        carried = tuple(u for u in units[pool.name] if u in quantity.numel_per_row)
        yield Transfer(
            name=f"{quantity.name}:{src}->{pool.name}",
            kind="value",
            src=src,
            dst=pool.name,
            units=carried,
        )
        for term in readers:
            yield Transfer(
                name=f"d{quantity.name}:{term.name}:{pool.name}->{src}",
                kind="cotangent",
                src=pool.name,
                dst=src,
                units=carried,
                term=term.name,
            )


def _reductions(pool: Pool, units: Mapping[str, tuple[str, ...]]) -> Iterator[Reduction]:
    for unit in units[pool.name]:
        yield Reduction(name=f"reduce:{unit}@{pool.name}", pool=pool.name, unit=unit)


def overlaps(plan: Plan, transfer: Transfer) -> tuple[np.ndarray, ...]:
    """All messages of a transfer as arrays: src member, dst member, first row, end row."""
    src = np.asarray(plan.offsets[transfer.src], dtype=np.int64)
    dst = np.asarray(plan.offsets[transfer.dst], dtype=np.int64)
    cuts = np.unique(np.concatenate([src, dst]))
    a, b = cuts[:-1], cuts[1:]
    return (
        np.searchsorted(src, a, side="right") - 1,
        np.searchsorted(dst, a, side="right") - 1,
        a,
        b,
    )


def messages(plan: Plan, transfer: Transfer, *, rank: int | None = None) -> list[Message]:
    """The messages of a transfer that are sent (weight not 0), or one rank's, in row order."""
    src_ranks = plan.topology.pool(transfer.src).ranks
    dst_ranks = plan.topology.pool(transfer.dst).ranks
    weights = dict(transfer.overrides)
    out = []
    for i, j, a, b in zip(*(x.tolist() for x in overlaps(plan, transfer)), strict=True):
        src, dst = src_ranks[i], dst_ranks[j]
        weight = weights.get((src, dst), transfer.weight)
        if weight != 0 and rank in (None, src, dst):
            out.append(Message(src=src, dst=dst, a=a, b=b, weight=weight))
    return out


def row_owner(plan: Plan, pool: str, row: int) -> int:
    """The global rank of a pool that owns a row."""
    return plan.topology.pool(pool).ranks[bisect_right(plan.offsets[pool], row) - 1]
