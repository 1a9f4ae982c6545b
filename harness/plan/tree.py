"""Which nodes of the canonical trees every rank brings to a reduction: from the row slices alone.

A gradient is a sum of trees, one for each term in declared order: over rows where the term is
emitted by rows, of one leaf where a leader emits it or receives it from another pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from sumgrad.base.tree import Key, node_keys
from sumgrad.plan.edges import Emission, Handoff, Plan, Transfer


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """One term's part of a unit's gradient in one pool.

    name: the term, or the terms of the pool that hands it over. edge: what puts it there. leaves:
    how many there are; over_rows: one for each row. keys: of every member of the pool, in order.
    """

    name: str
    edge: str
    leaves: int
    keys: tuple[tuple[Key, ...], ...]
    over_rows: bool = False


def trees_of(plan: Plan, pool: str, unit: str) -> tuple[Tree, ...]:
    """The trees that a unit's reduction over a pool sums, in the order in which roots are added."""
    out = []
    for term in plan.declaration.terms:
        emit = f"emit:{term.name}@{pool}"
        emitted = [e for e in plan.select(Emission, pool=pool) if e.name == emit]
        moved = [t for t in plan.select(Transfer)
                 if t.kind == "cotangent" and t.dst == pool and t.term == term.name]  # fmt: skip
        if emitted:
            out.append(_emitted(plan, emitted[0]))
        elif moved:
            out.append(by_rows(plan, pool, term.name, edge=moved[0].name))
    size = plan.topology.pool(pool).size
    for handoff in plan.select(Handoff):
        if handoff.dst == pool and unit in handoff.units:
            first: tuple[Key, ...] = ((0, 0),)
            keys = (first, *((),) * (size - 1))
            name = handed_over(plan, handoff)
            out.append(Tree(name=name, edge=handoff.name, leaves=1, keys=keys))
    return tuple(out)


def by_rows(plan: Plan, pool: str, name: str, *, edge: str) -> Tree:
    """A tree over all rows, cut as the pool cuts them."""
    num, cuts = plan.declaration.num_rows, plan.offsets[pool]
    keys = tuple(node_keys(a, b, num) for a, b in pairwise(cuts))
    return Tree(name=name, edge=edge, leaves=num, keys=keys, over_rows=True)


def handed_over(plan: Plan, handoff: Handoff) -> str:
    """The terms of the pool that hands a gradient over."""
    role = plan.topology.pool(handoff.src).role
    return "+".join(t.name for t in plan.declaration.terms if t.role == role)


def _emitted(plan: Plan, edge: Emission) -> Tree:
    size = plan.topology.pool(edge.pool).size
    if edge.placement == "rows":
        return by_rows(plan, edge.pool, edge.term, edge=edge.name)
    if edge.placement == "leader":
        return Tree(name=edge.term, edge=edge.name, leaves=1, keys=(((0, 0),), *((),) * (size - 1)))
    keys = tuple(((0, i),) for i in range(size))
    return Tree(name=edge.term, edge=edge.name, leaves=size, keys=keys)


def nodes_brought(trees: tuple[Tree, ...]) -> tuple[int, ...]:
    """How many nodes every member of a pool brings to one exchange."""
    return tuple(sum(len(tree.keys[i]) for tree in trees) for i in range(len(trees[0].keys)))


def share(numel: int, size: int) -> int:
    """Of how many elements each member of a pool finishes the trees."""
    return -(-numel // size)
