"""What a stored run's subject knows of itself beyond its gradients; None where it does not."""

from __future__ import annotations

from sumgrad.plan.edges import Plan, build_plan
from sumgrad.plan.proof import expected_terms
from sumgrad.record.directory import Record


def plan_of(record: Record) -> Plan | None:
    """The lawful plan that a planned run is judged by, whatever fault was planted."""
    declaration = record.spec.declaration
    if declaration is None:
        return None
    plan: Plan = record.once("plan", lambda: build_plan(record.spec.topology, declaration))
    return plan


def known_plan(record: Record) -> Plan:
    """The same of a run that is known to have one."""
    plan = plan_of(record)
    assert plan is not None, record.directory
    return plan


def unit_of(record: Record, name: str) -> str:
    """The unit that a parameter is reduced with; itself where no plan says."""
    declaration = record.spec.declaration
    if declaration is None:
        return name
    return next(p.unit for p in declaration.params if p.name == name)


def names_in(record: Record, pool: str) -> list[str]:
    """Parameters that the ranks of a pool hold, in order."""
    plan = plan_of(record)
    if plan is None:
        return list(record.spec.params)
    return [p.name for u in plan.units[pool] for p in plan.declaration.params_of(u)]


def terms_at(record: Record, pool: str, name: str) -> tuple[str, ...] | None:
    """Terms whose gradient ends at a pool that is no home of the parameter; None for all of it."""
    plan = plan_of(record)
    if plan is None:
        return None
    return tuple(dict.fromkeys(t for t, _ in expected_terms(plan, pool, unit_of(record, name))))
