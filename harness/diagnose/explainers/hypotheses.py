"""What could have gone wrong with a plan: every one-edge fault, in words, as another plan.

The Diagnosis asks of each: does its whole predicted gradient explain what was measured? Names of
factors come from here: the edge first, the sizes of the topology second.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from sumgrad.plan.edges import (
    Edge,
    Emission,
    Handoff,
    Plan,
    Reduction,
    Statistic,
    Transfer,
    messages,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hypothesis:
    """One possible cause. plan: the plan as it would then be. rank: simpler causes come first."""

    cause: str
    kind: str
    plan: Plan
    edges: tuple[str, ...]
    rank: int
    term: str | None = None
    ranks: tuple[int, ...] = ()
    factor: Fraction | None = None
    symbol: str | None = None


def hypotheses(plan: Plan, *, with_stale: bool = True) -> Iterator[Hypothesis]:
    """All one-edge faults, cheapest first: reductions, emissions, statistics, messages, factors.

    with_stale: there is a previous step whose buffers could be left over.
    """
    yield from _reduction_hypotheses(plan)
    yield from _emission_hypotheses(plan)
    yield from _statistic_hypotheses(plan)
    yield from _message_hypotheses(plan)
    if with_stale:
        yield from _stale_hypotheses(plan)
    yield from _factor_hypotheses(plan)


def factor_names(plan: Plan) -> dict[Fraction, list[str]]:
    """Every factor that sizes of this topology make, with its names; `1/ci.dp` for 1/4."""
    named: dict[Fraction, list[str]] = {}
    sizes = [(Fraction(pool.size), pool.symbol) for pool in plan.topology.pools]
    sizes.append((Fraction(plan.topology.world_size), "world_size"))
    counts = {role.name: len(plan.topology.with_role(role.name)) for role in plan.declaration.roles}
    sizes += [(Fraction(n), f"number of {role} pools") for role, n in counts.items() if n > 1]
    for value, name in sizes:
        if value != 1:
            named.setdefault(value, []).append(name)
            named.setdefault(1 / value, []).append(f"1/{name}")
    single = [(v, n) for v, n in sizes if v != 1]
    for i, (v1, n1) in enumerate(single):
        for v2, n2 in single[i + 1 :]:
            named.setdefault(v1 * v2, []).append(f"{n1}*{n2}")
            named.setdefault(1 / (v1 * v2), []).append(f"1/({n1}*{n2})")
            named.setdefault(v1 / v2, []).append(f"{n1}/{n2}")
            named.setdefault(v2 / v1, []).append(f"{n2}/{n1}")
    return named


def _change(plan: Plan, edges: Iterable[Edge], **change: object) -> Plan:
    for edge in edges:
        plan = plan.with_edge(replace(edge, **change))  # type: ignore[arg-type]
    return plan


def _reduction_hypotheses(plan: Plan) -> Iterator[Hypothesis]:
    for pool in plan.topology.pools:
        if pool.size == 1:
            continue
        whole = plan.select(Reduction, pool=pool.name)
        sets = [whole] if len(whole) == 1 else [whole, *((edge,) for edge in whole)]
        for edges in sets:
            what = f"the {pool.name} reduction"
            if len(whole) > 1 and len(edges) == 1:
                what = f"the {pool.name} reduction of {edges[0].unit}"
            common: dict[str, Any] = {
                "edges": tuple(e.name for e in edges),
                "ranks": tuple(pool.ranks),
            }
            later = 0 if len(edges) == len(whole) else 1
            size, symbol = Fraction(pool.size), pool.symbol
            yield Hypothesis(
                cause=f"{what} averages (AVG) where the convention sums",
                kind="avg",
                plan=_change(plan, edges, op="avg"),
                factor=1 / size,
                symbol=f"1/{symbol}",
                rank=later,
                **common,
            )
            yield Hypothesis(
                cause=f"{what} is skipped: every rank keeps its own partial sum",
                kind="skipped_reduction",
                plan=_change(plan, edges, op="none"),
                rank=later,
                **common,
            )
            yield Hypothesis(
                cause=f"{what} runs twice: a complete gradient is summed again",
                kind="double_reduction",
                plan=_change(plan, edges, weight=size),
                factor=size,
                symbol=symbol,
                rank=later + 2,
                **common,
            )
            yield Hypothesis(
                cause=f"every rank divides by {symbol} before {what}",
                kind="divided_before_reduction",
                plan=_change(plan, edges, weight=1 / size),
                factor=1 / size,
                symbol=f"1/{symbol}",
                rank=later + 3,
                **common,
            )
            yield Hypothesis(
                cause=f"two factors cancel: every rank multiplies by {symbol}, then {what} "
                f"averages (AVG); the values are right only while both stay",
                kind="compensated",
                plan=_change(plan, edges, op="avg", weight=size),
                factor=Fraction(1),
                symbol=f"{symbol}/{symbol}",
                rank=later,
                **common,
            )


def _emission_hypotheses(plan: Plan) -> Iterator[Hypothesis]:
    replicated = [e for e in plan.select(Emission) if e.placement == "leader"]
    by_term: dict[str, list[Emission]] = {}
    for edge in replicated:
        by_term.setdefault(edge.term, []).append(edge)
    for term, edges in by_term.items():
        for chosen in [edges, *([e] for e in edges)] if len(edges) > 1 else [edges]:
            pools = [plan.topology.pool(e.pool) for e in chosen]
            if all(pool.size == 1 for pool in pools):
                continue
            many = [pool for pool in pools if pool.size > 1]
            sizes = {pool.size for pool in many}
            names = " and ".join(pool.name for pool in many)
            yield Hypothesis(
                cause=f"{term} comes from replicated weights, but every rank of {names} adds it, "
                f"not one",
                kind="replicated_contribution",
                plan=_change(plan, chosen, placement="all"),
                edges=tuple(e.name for e in chosen),
                term=term,
                ranks=tuple(r for pool in many for r in pool.ranks),
                factor=Fraction(sizes.pop()) if len(sizes) == 1 else None,
                symbol=", ".join(pool.symbol for pool in many),
                rank=0 if len(chosen) == len(edges) else 1,
            )
    for edge in plan.select(Emission):
        yield Hypothesis(
            cause=f"{edge.term} of {edge.pool} never reaches the gradient",
            kind="lost_term",
            plan=_change(plan, [edge], weight=Fraction(0)),
            edges=(edge.name,),
            term=edge.term,
            ranks=tuple(plan.topology.pool(edge.pool).ranks),
            factor=Fraction(0),
            symbol="0",
            rank=2,
        )


def _statistic_hypotheses(plan: Plan) -> Iterator[Hypothesis]:
    for edge in plan.select(Statistic):
        pool = plan.topology.pool(edge.pool)
        if pool.size == 1:
            continue
        common: dict[str, Any] = {
            "edges": (edge.name,),
            "term": edge.term,
            "ranks": tuple(pool.ranks),
        }
        yield Hypothesis(
            cause=f"{edge.term} is evaluated at each rank's own sums, not at the global ones; "
            f"no coefficient describes that",
            kind="local_statistic",
            plan=_change(plan, [edge], mode="local"),
            rank=0,
            **common,
        )
        yield Hypothesis(
            cause=f"the global sum of {edge.term} is differentiated through the collective, so "
            f"every rank's loss reaches every rank",
            kind="differentiable_sum",
            plan=_change(plan, [edge], mode="differentiable"),
            factor=Fraction(pool.size),
            symbol=pool.symbol,
            rank=0,
            **common,
        )
        yield Hypothesis(
            cause=f"{edge.term} is evaluated at the mean of the ranks' sums, not at their sum",
            kind="mean_statistic",
            plan=_change(plan, [edge], weight=Fraction(1, pool.size)),
            rank=1,
            **common,
        )


def _message_hypotheses(plan: Plan) -> Iterator[Hypothesis]:
    for edge in plan.select(Transfer):
        if edge.kind != "cotangent":
            continue
        yield Hypothesis(
            cause=f"no rank of {edge.src} returns the derivative of {edge.term} to {edge.dst}",
            kind="lost_messages",
            plan=_change(plan, [edge], weight=Fraction(0)),
            edges=(edge.name,),
            term=edge.term,
            ranks=tuple(plan.topology.pool(edge.src).ranks),
            factor=Fraction(0),
            symbol="0",
            rank=2,
        )
        for m in messages(plan, edge):
            lost = (((m.src, m.dst), Fraction(0)),)
            yield Hypothesis(
                cause=f"the message {edge.name} from {plan.topology.place(m.src)} to "
                f"{plan.topology.place(m.dst)}, rows {m.a} to {m.b - 1}, never arrives",
                kind="lost_message",
                plan=_change(plan, [edge], overrides=lost),
                edges=(edge.name,),
                term=edge.term,
                ranks=(m.src, m.dst),
                factor=Fraction(0),
                symbol="0",
                rank=1,
            )
    for handoff in plan.select(Handoff):
        src = plan.topology.pool(handoff.src)
        common: dict[str, Any] = {
            "edges": (handoff.name,),
            "ranks": (handoff.src_rank, handoff.dst_rank),
        }
        yield Hypothesis(
            cause=f"the gradient that {handoff.src} hands to {handoff.dst} never arrives",
            kind="lost_handoff",
            plan=_change(plan, [handoff], weight=Fraction(0)),
            factor=Fraction(0),
            symbol="0",
            rank=1,
            **common,
        )
        for pool in (src, plan.topology.pool(handoff.dst)):
            if pool.size > 1:
                yield Hypothesis(
                    cause=f"the gradient that {handoff.src} hands to {handoff.dst} counts "
                    f"{pool.symbol} times",
                    kind="repeated_handoff",
                    plan=_change(plan, [handoff], weight=Fraction(pool.size)),
                    factor=Fraction(pool.size),
                    symbol=pool.symbol,
                    rank=2,
                    **common,
                )


def _stale_hypotheses(plan: Plan) -> Iterator[Hypothesis]:
    for pool in plan.topology.pools:
        whole = plan.select(Reduction, pool=pool.name)
        for rank in pool.ranks:
            a, b = plan.rows(rank)
            if a == b and rank != plan.leader(pool.name):
                continue
            yield Hypothesis(
                cause=f"{plan.topology.place(rank)} adds what it contributed in the previous step "
                f"to the {pool.name} reduction: a stale buffer, not a weighting bug",
                kind="stale_buffer",
                plan=_change(plan, whole, stale_rank=rank),
                edges=tuple(e.name for e in whole),
                ranks=(rank,),
                rank=1,
            )


def _factor_hypotheses(plan: Plan) -> Iterator[Hypothesis]:
    """One factor from the topology's sizes on one family of edges."""
    families: dict[str, list[Edge]] = {}
    for edge in plan.select(Transfer):
        if edge.kind == "cotangent":
            role = plan.topology.pool(edge.src).role
            families.setdefault(f"what {role} pools return for {edge.term}", []).append(edge)
            families.setdefault(f"what {edge.src} returns for {edge.term}", []).append(edge)
    for edge in plan.select(Emission):
        families.setdefault(f"{edge.term} on all pools", []).append(edge)
        families.setdefault(f"{edge.term} on {edge.pool}", []).append(edge)
    seen: set[tuple[str, ...]] = set()
    for what, edges in families.items():
        names = tuple(edge.name for edge in edges)
        if names in seen:
            continue
        seen.add(names)
        first = edges[0]
        assert isinstance(first, Transfer | Emission)
        srcs = [e.src if isinstance(e, Transfer) else e.pool for e in edges]  # type: ignore[union-attr]
        for factor, symbols in factor_names(plan).items():
            yield Hypothesis(
                cause=f"{what} is counted {symbols[0]} times"
                if factor > 1
                else f"{what} is multiplied by {symbols[0]}",
                kind="factor",
                plan=_change(plan, edges, weight=factor),
                edges=names,
                term=first.term,
                ranks=tuple(r for s in srcs for r in plan.topology.pool(s).ranks),
                factor=factor,
                symbol=symbols[0],
                rank=4 if "*" in symbols[0] or symbols[0].count("/") > 1 else 3,
            )
