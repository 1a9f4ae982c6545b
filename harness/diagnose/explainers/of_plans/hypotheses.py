"""What could have gone wrong with a plan: every one-edge fault, in words, as another plan.

The Diagnosis asks of each: does its whole predicted gradient explain what was measured? Names of
factors come from here: the edge first, the sizes of the topology second.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from sumgrad.base.verdict import Diagnosis
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

    def diagnosis(self, **evidence: Any) -> Diagnosis:
        """It as a cause. evidence: because, however and also."""
        factor = None if self.factor is None else str(self.factor)
        same = {name: getattr(self, name) for name in ("cause", "kind", "term", "ranks", "symbol")}
        return Diagnosis(factor=factor, **same, **evidence)


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


def _edited(
    plan: Plan,
    edges: Sequence[Edge],
    kind: str,
    cause: str,
    rank: int,
    edit: dict[str, Any],
    **more: Any,
) -> Hypothesis:
    """The hypothesis that these edges are otherwise. edit: how; more: its other fields."""
    names = tuple(edge.name for edge in edges)
    changed = _change(plan, edges, **edit)
    return Hypothesis(cause=cause, kind=kind, plan=changed, edges=names, rank=rank, **more)


def _reduction_hypotheses(plan: Plan) -> Iterator[Hypothesis]:
    for pool in plan.topology.pools:
        if pool.size == 1:
            continue
        whole = plan.select(Reduction, pool=pool.name)
        sets = [whole] if len(whole) == 1 else [whole, *((edge,) for edge in whole)]
        size, symbol, ranks = Fraction(pool.size), pool.symbol, tuple(pool.ranks)
        for edges in sets:
            what = f"the {pool.name} reduction"
            if len(whole) > 1 and len(edges) == 1:
                what = f"the {pool.name} reduction of {edges[0].unit}"
            later = 0 if len(edges) == len(whole) else 1
            less = {"ranks": ranks, "factor": 1 / size, "symbol": f"1/{symbol}"}
            cause = f"{what} averages (AVG) where the convention sums"
            yield _edited(plan, edges, "avg", cause, later, {"op": "avg"}, **less)
            cause = f"{what} is skipped: every rank keeps its own partial sum"
            yield _edited(
                plan, edges, "skipped_reduction", cause, later, {"op": "none"}, ranks=ranks
            )
            cause = f"{what} runs twice: a complete gradient is summed again"
            more = {"ranks": ranks, "factor": size, "symbol": symbol}
            yield _edited(
                plan, edges, "double_reduction", cause, later + 2, {"weight": size}, **more
            )
            cause = f"every rank divides by {symbol} before {what}"
            edit: dict[str, Any] = {"weight": 1 / size}
            yield _edited(plan, edges, "divided_before_reduction", cause, later + 3, edit, **less)
            cause = (
                f"two factors cancel: every rank multiplies by {symbol}, then {what} averages "
                f"(AVG); the values are right only while both stay"
            )
            edit = {"op": "avg", "weight": size}
            more = {"ranks": ranks, "factor": Fraction(1), "symbol": f"{symbol}/{symbol}"}
            yield _edited(plan, edges, "compensated", cause, later, edit, **more)


def _emission_hypotheses(plan: Plan) -> Iterator[Hypothesis]:
    replicated = [e for e in plan.select(Emission) if e.placement == "leader"]
    by_term: dict[str, list[Emission]] = {}
    for edge in replicated:
        by_term.setdefault(edge.term, []).append(edge)
    for term, edges in by_term.items():
        for chosen in [edges, *([e] for e in edges)] if len(edges) > 1 else [edges]:
            pools = [plan.topology.pool(e.pool) for e in chosen]
            many = [pool for pool in pools if pool.size > 1]
            if not many:
                continue
            sizes = {pool.size for pool in many}
            names = " and ".join(pool.name for pool in many)
            yield _edited(
                plan,
                chosen,
                "replicated_contribution",
                f"{term} comes from replicated weights, but every rank of {names} adds it, not one",
                0 if len(chosen) == len(edges) else 1,
                {"placement": "all"},
                term=term,
                ranks=tuple(r for pool in many for r in pool.ranks),
                factor=Fraction(sizes.pop()) if len(sizes) == 1 else None,
                symbol=", ".join(pool.symbol for pool in many),
            )
    for edge in plan.select(Emission):
        cause = f"{edge.term} of {edge.pool} never reaches the gradient"
        ranks = tuple(plan.topology.pool(edge.pool).ranks)
        yield _lost(plan, edge, "lost_term", cause, 2, term=edge.term, ranks=ranks)


def _lost(plan: Plan, edge: Edge, kind: str, cause: str, rank: int, **more: Any) -> Hypothesis:
    """The hypothesis that what an edge carries is dropped."""
    zero = Fraction(0)
    more = {"factor": zero, "symbol": "0", **more}
    return _edited(plan, [edge], kind, cause, rank, {"weight": zero}, **more)


def _statistic_hypotheses(plan: Plan) -> Iterator[Hypothesis]:
    for edge in plan.select(Statistic):
        pool = plan.topology.pool(edge.pool)
        if pool.size == 1:
            continue
        more: dict[str, Any] = {"term": edge.term, "ranks": tuple(pool.ranks)}
        cause = (
            f"{edge.term} is evaluated at each rank's own sums, not at the global ones; no "
            f"coefficient describes that"
        )
        yield _edited(plan, [edge], "local_statistic", cause, 0, {"mode": "local"}, **more)
        cause = (
            f"the global sum of {edge.term} is differentiated through the collective, so every "
            f"rank's loss reaches every rank"
        )
        edit: dict[str, Any] = {"mode": "differentiable"}
        sized = {**more, "factor": Fraction(pool.size), "symbol": pool.symbol}
        yield _edited(plan, [edge], "differentiable_sum", cause, 0, edit, **sized)
        cause = f"{edge.term} is evaluated at the mean of the ranks' sums, not at their sum"
        edit = {"weight": Fraction(1, pool.size)}
        yield _edited(plan, [edge], "mean_statistic", cause, 1, edit, **more)


def _message_hypotheses(plan: Plan) -> Iterator[Hypothesis]:
    for edge in plan.select(Transfer):
        if edge.kind != "cotangent":
            continue
        cause = f"no rank of {edge.src} returns the derivative of {edge.term} to {edge.dst}"
        ranks = tuple(plan.topology.pool(edge.src).ranks)
        yield _lost(plan, edge, "lost_messages", cause, 2, term=edge.term, ranks=ranks)
        for m in messages(plan, edge):
            place = plan.topology.place
            cause = (
                f"the message {edge.name} from {place(m.src)} to {place(m.dst)}, rows {m.a} to "
                f"{m.b - 1}, never arrives"
            )
            yield _edited(
                plan,
                [edge],
                "lost_message",
                cause,
                1,
                {"overrides": (((m.src, m.dst), Fraction(0)),)},
                term=edge.term,
                ranks=(m.src, m.dst),
                factor=Fraction(0),
                symbol="0",
            )
    for handoff in plan.select(Handoff):
        ranks = (handoff.src_rank, handoff.dst_rank)
        what = f"the gradient that {handoff.src} hands to {handoff.dst}"
        yield _lost(plan, handoff, "lost_handoff", f"{what} never arrives", 1, ranks=ranks)
        for pool in (plan.topology.pool(handoff.src), plan.topology.pool(handoff.dst)):
            if pool.size > 1:
                size = Fraction(pool.size)
                more = {"ranks": ranks, "factor": size, "symbol": pool.symbol}
                cause = f"{what} counts {pool.symbol} times"
                yield _edited(
                    plan, [handoff], "repeated_handoff", cause, 2, {"weight": size}, **more
                )


def _stale_hypotheses(plan: Plan) -> Iterator[Hypothesis]:
    for pool in plan.topology.pools:
        whole = plan.select(Reduction, pool=pool.name)
        for rank in pool.ranks:
            a, b = plan.rows(rank)
            if a == b and rank != plan.leader(pool.name):
                continue
            cause = (
                f"{plan.topology.place(rank)} adds what it contributed in the previous step to the "
                f"{pool.name} reduction: a stale buffer, not a weighting bug"
            )
            edit = {"stale_rank": rank}
            yield _edited(plan, whole, "stale_buffer", cause, 1, edit, ranks=(rank,))


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
        ranks = tuple(r for s in srcs for r in plan.topology.pool(s).ranks)
        for factor, symbols in factor_names(plan).items():
            how = "is counted {} times" if factor > 1 else "is multiplied by {}"
            product = "*" in symbols[0] or symbols[0].count("/") > 1
            yield _edited(
                plan,
                edges,
                "factor",
                f"{what} {how.format(symbols[0])}",
                4 if product else 3,
                {"weight": factor},
                term=first.term,
                ranks=ranks,
                factor=factor,
                symbol=symbols[0],
            )
