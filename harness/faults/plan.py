"""Plan faults: named wrong steps of real systems, as functions from Plan to Plan.

Each knows where it can be planted, where it must be visible, and how many steps it needs. The step
executes the mutated plan; the Proof of the mutated plan predicts the gradient; the judge sees
neither and must find the cause by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from sumgrad.base.errors import UserError
from sumgrad.plan.edges import Edge, Emission, Plan, Reduction, Statistic, Transfer, messages


@dataclass(frozen=True, slots=True)
class PlanFault:
    """plant: Plan -> Plan. visible: whether the comparison can see it on this plan.

    named: kinds of cause that name it. breaks_law: what the ledger shows although the comparison
    passes. min_steps: steps it needs.
    """

    name: str
    story: str
    named: tuple[str, ...]
    plant: Callable[[Plan], Plan]
    visible: Callable[[Plan], bool]
    breaks_law: bool = False
    min_steps: int = 1


def find_fault(name: str, *, known: dict[str, PlanFault] | None = None) -> PlanFault:
    """The fault of that name; UserError lists those that exist."""
    faults = known or plan_faults()
    if name not in faults:
        raise UserError(f"--fault: got {name!r}, expected one of {', '.join(sorted(faults))}")
    return faults[name]


def plan_faults() -> dict[str, PlanFault]:
    """Every shipped plan fault by name."""
    # fmt: off
    return {
        fault.name: fault
        for fault in (
            PlanFault("avg_on_ci",
                      "the CI function's gradients are averaged where the convention sums them",
                      ("avg",),
                      lambda plan: _edit(plan, _reductions(plan, _pool(plan, "ci")), op="avg"),
                      lambda plan: _size(plan, _pool(plan, "ci")) > 1, breaks_law=True),
            PlanFault("faith_on_all_ranks",
                      "a loss from replicated weights is added by every rank before the SUM",
                      ("replicated_contribution",),
                      lambda plan: _edit(plan, _replicated(plan), placement="all"),
                      lambda plan: any(_sizes(plan, "block"))),
            PlanFault("skip_block_reduce",
                      "one block never reduces its gradients: every rank keeps its partial",
                      ("skipped_reduction",),
                      lambda plan: _edit(plan, _reductions(plan, _widest(plan)), op="none"),
                      lambda plan: _size(plan, _widest(plan)) > 1),
            PlanFault("divide_by_ci_count",
                      "the blocks divide what they return by the number of CI ranks", ("factor",),
                      _divide_by_ci_count, lambda plan: _size(plan, _pool(plan, "ci")) > 1),
            PlanFault("block_over_ci_size",
                      "the widest block multiplies what it returns by its ranks over the CI ranks",
                      ("factor",), _block_over_ci,
                      lambda plan: _size(plan, _widest(plan)) != _size(plan, _pool(plan, "ci"))),
            PlanFault("drop_message", "what one block rank owes one CI rank is never sent",
                      ("lost_message",), _drop_message, lambda plan: True),
            PlanFault("imp_local_statistic",
                      "a loss that needs a global sum inside a logarithm uses the rank's own sum",
                      ("local_statistic",),
                      lambda plan: _edit(plan, plan.select(Statistic), mode="local"),
                      lambda plan: _size(plan, _pool(plan, "ci")) > 1),
            PlanFault("imp_differentiable_sum",
                      "the global sum is differentiated through the collective on every rank",
                      ("differentiable_sum",),
                      lambda plan: _edit(plan, plan.select(Statistic), mode="differentiable"),
                      lambda plan: _size(plan, _pool(plan, "ci")) > 1),
            PlanFault("times_ci_then_avg",
                      "every CI rank multiplies by the number of CI ranks, then AVG divides again",
                      ("compensated",), _times_ci_then_avg, lambda plan: False, breaks_law=True),
            PlanFault("stale_buffer",
                      "one rank's buffer still holds the previous step's contribution",
                      ("stale_buffer",), _stale_buffer, lambda plan: True, min_steps=2),
        )
    }
    # fmt: on


def plant(fault: PlanFault, plan: Plan) -> Plan:
    """The plan with the fault in it. UserError where it has no place."""
    roles = {pool.role for pool in plan.topology.pools}
    missing = sorted({"ci", "block"} - roles)
    if missing:
        raise UserError(
            f"--fault {fault.name}: needs pools with the roles ci and block; "
            f"{plan.topology.name} has none with {', '.join(missing)}"
        )
    planted = fault.plant(plan)
    assert planted.edges != plan.edges or not fault.visible(plan), fault.name
    return planted


def is_visible(fault: PlanFault, plan: Plan, *, steps: int) -> bool:
    """Whether the comparison must fail. A fault invisible here must pass."""
    return steps >= fault.min_steps and fault.visible(plan)


def breaks_law(fault: PlanFault, plan: Plan) -> bool:
    """Whether the ledger differs from the lawful plan although the values may not."""
    return fault.breaks_law and _size(plan, _pool(plan, "ci")) > 1


def _edit(plan: Plan, edges: Iterable[Edge], **change: Any) -> Plan:
    for edge in edges:
        plan = plan.with_edge(replace(edge, **change))
    return plan


def _pool(plan: Plan, role: str) -> str:
    return plan.topology.with_role(role)[0].name


def _size(plan: Plan, pool: str) -> int:
    return plan.topology.pool(pool).size


def _sizes(plan: Plan, role: str) -> list[bool]:
    return [pool.size > 1 for pool in plan.topology.with_role(role)]


def _widest(plan: Plan) -> str:
    """The block with the most ranks, the first of them if several."""
    return max(plan.topology.with_role("block"), key=lambda pool: pool.size).name


def _reductions(plan: Plan, pool: str) -> tuple[Reduction, ...]:
    return plan.select(Reduction, pool=pool)


def _replicated(plan: Plan) -> tuple[Emission, ...]:
    return tuple(e for e in plan.select(Emission) if e.placement == "leader")


def _from_blocks(plan: Plan) -> tuple[Transfer, ...]:
    blocks = {pool.name for pool in plan.topology.with_role("block")}
    return tuple(t for t in plan.select(Transfer) if t.kind == "cotangent" and t.src in blocks)


def _divide_by_ci_count(plan: Plan) -> Plan:
    return _edit(plan, _from_blocks(plan), weight=Fraction(1, _size(plan, _pool(plan, "ci"))))


def _block_over_ci(plan: Plan) -> Plan:
    widest = _widest(plan)
    weight = Fraction(_size(plan, widest), _size(plan, _pool(plan, "ci")))
    return _edit(plan, [t for t in _from_blocks(plan) if t.src == widest], weight=weight)


def _drop_message(plan: Plan) -> Plan:
    transfer = _from_blocks(plan)[-1]
    sent = messages(plan, transfer)
    lost = max(sent, key=lambda m: (m.b - m.a, m.b))
    override = (((lost.src, lost.dst), Fraction(0)),)
    return plan.with_edge(replace(transfer, overrides=override))


def _times_ci_then_avg(plan: Plan) -> Plan:
    size = Fraction(_size(plan, _pool(plan, "ci")))
    return _edit(plan, _reductions(plan, _pool(plan, "ci")), op="avg", weight=size)


def _stale_buffer(plan: Plan) -> Plan:
    (reduction,) = _reductions(plan, _pool(plan, "ci"))
    last = plan.topology.with_role("ci")[0].ranks[-1]
    filled = [
        r for r in plan.topology.with_role("ci")[0].ranks if plan.rows(r)[0] < plan.rows(r)[1]
    ]
    return plan.with_edge(replace(reduction, stale_rank=filled[-1] if filled else last))
