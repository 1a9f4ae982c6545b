"""Any fault by the name that `--fault` takes, for what a run checks."""

from __future__ import annotations

from sumgrad.faults.plan import PlanFault, find_fault, plan_faults
from sumgrad.faults.step import ProgramFault, find_program_fault, step_faults, variants
from sumgrad.record.spec import RunSpec

Fault = PlanFault | ProgramFault


def find_any(name: str, workload: str, *, opaque: bool) -> Fault:
    """The fault of this name. UserError lists those that a workload can have.

    opaque: whether it is a user's own step, as a Program is.
    """
    return find_program_fault(name, workload) if opaque else find_fault(name)


def own_faults(spec: RunSpec) -> list[str]:
    """Faults by name that need no collective to be known."""
    if not spec.opaque:
        return list(plan_faults())
    own = [name for name, fault in variants().items() if fault.workload == spec.workload]
    return [*step_faults(), *own]
