"""Renders a Plan and its Proof: the rank map, who contributes what, what the law says."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from sumgrad.base.files import finite
from sumgrad.base.outcome import spans
from sumgrad.plan.edges import Emission, Handoff, Plan, Reduction, Statistic, Transfer, overlaps
from sumgrad.plan.proof import Coefficient, Proof

MAX_RANKS_LISTED = 64
MAX_LINES = 20


def render_plan(plan: Plan, proof: Proof) -> RenderableType:
    """Rank map, edges, coefficients that are not one, findings."""
    topology = plan.topology
    head = Text.assemble(
        (f"{topology.name}", "bold"),
        f"  {topology.world_size} ranks, {plan.declaration.num_rows} rows, "
        f"{sum(plan.declaration.row_lengths)} valid positions",
    )
    parts: list[RenderableType] = [
        head,
        Text(""),
        _rank_map(plan),
        Text(""),
        _edges(plan),
        Text(""),
    ]
    wrong = [c for c in proof.coefficients if c.weight != 1]
    if wrong:
        parts += [_coefficients(wrong), Text("")]
    if proof.findings:
        parts.append(Text("findings", style="dim"))
        shown = proof.findings[:MAX_LINES]
        parts += [Text(f"  {finding.edge}: {finding.text}") for finding in shown]
        if len(proof.findings) > len(shown):
            parts.append(Text(f"  and {len(proof.findings) - len(shown)} more"))
    if proof.holds:
        parts.append(
            Text(
                f"every one of {len(proof.coefficients)} coefficients is 1 on every row and rank; "
                "no edge carries another weight",
                style="green",
            )
        )
    return Group(*parts)


def plan_to_json(plan: Plan, proof: Proof) -> dict[str, Any]:
    """The plan's edges, slices and proof as plain data."""
    data: dict[str, Any] = {
        "schema": 1,
        "topology": plan.topology.name,
        "world_size": plan.topology.world_size,
        "holds": proof.holds,
        "num_messages": proof.num_messages,
        "offsets": {pool: list(cuts) for pool, cuts in plan.offsets.items()},
        "units": {pool: list(units) for pool, units in plan.units.items()},
        "edges": [{"kind": type(e).__name__.lower(), **_plain(asdict(e))} for e in plan.edges],
        "coefficients": [_plain(asdict(c)) for c in proof.coefficients],
        "findings": [asdict(f) for f in proof.findings],
    }
    result: dict[str, Any] = finite(data)
    return result


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _rank_map(plan: Plan) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("pool", "role", "ranks", "holds"):
        table.add_column(name)
    table.add_column("rows per rank", justify="right")
    table.add_column("valid positions per rank", justify="right")
    lengths = plan.declaration.row_lengths
    for pool in plan.topology.pools:
        cuts = plan.offsets[pool.name]
        rows = [b - a for a, b in itertools.pairwise(cuts)]
        valid = [sum(lengths[a:b]) for a, b in itertools.pairwise(cuts)]
        span = (
            spans(pool.ranks)
            if pool.size <= MAX_RANKS_LISTED
            else (f"{pool.ranks[0]}-{pool.ranks[-1]}")
        )
        table.add_row(
            pool.name,
            pool.role,
            span,
            _units(plan.units[pool.name]),
            _numbers(rows),
            _numbers(valid),
        )
    return table


def _units(units: tuple[str, ...]) -> str:
    return ", ".join(units) if len(units) <= 4 else f"{units[0]} .. {units[-1]} ({len(units)})"


def _numbers(values: list[int]) -> str:
    if len(values) <= 12:
        return " ".join(map(str, values))
    return f"{min(values)} to {max(values)}"


def _edges(plan: Plan) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("edge", "what"):
        table.add_column(name)
    table.add_column("weight", justify="right")
    shown = [(edge.name, text, str(edge.weight)) for edge, text in _described(plan)]
    for row in shown[: 2 * MAX_LINES]:
        table.add_row(*row)
    if len(shown) > 2 * MAX_LINES:
        table.caption = f"and {len(shown) - 2 * MAX_LINES} more; --json has all"
    return table


def _described(plan: Plan) -> Iterator[tuple[Any, str]]:
    for edge in plan.edges:
        if isinstance(edge, Emission):
            who = {
                "leader": f"rank {plan.leader(edge.pool)} only",
                "rows": "every rank, its rows",
                "all": "every rank",
            }[edge.placement]
            yield edge, f"{edge.term}: {who}"
        elif isinstance(edge, Transfer):
            yield edge, f"{len(overlaps(plan, edge)[0])} messages, {_units(edge.units)}"
        elif isinstance(edge, Handoff):
            yield edge, f"rank {edge.src_rank} to rank {edge.dst_rank}, {_units(edge.units)}"
        elif isinstance(edge, Reduction):
            yield edge, f"{edge.op.upper()} over {plan.topology.pool(edge.pool).size} ranks"
        elif isinstance(edge, Statistic):
            yield edge, f"{edge.term}: global sums, {edge.mode}"
        else:
            yield edge, type(edge).__name__.lower()


def _coefficients(wrong: list[Coefficient]) -> Table:
    table = Table(
        title="coefficients that are not 1",
        title_justify="left",
        box=None,
        pad_edge=False,
        header_style="dim",
        title_style="dim",
    )
    for name in ("unit", "pool", "rank", "term", "computed by", "rows", "coefficient"):
        table.add_column(name)
    for c in wrong[:MAX_LINES]:
        rows = f"{c.rows[0]} to {c.rows[1] - 1}" if c.rows else "all"
        rank = "all" if c.rank is None else str(c.rank)
        weight = "none exists" if c.weight is None else str(c.weight)
        table.add_row(c.unit, c.pool, rank, c.term, c.producer, rows, weight)
    if len(wrong) > MAX_LINES:
        table.caption = f"and {len(wrong) - MAX_LINES} more; --json has all"
    return table
