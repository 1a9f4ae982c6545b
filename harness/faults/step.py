"""Faults of the third layer: around a Program's step, and the catalogue of all a Program can have.

Three kinds: a collective that misbehaves (`collective_faults`), a wrapper around the step that
works on any Program, and a shipped Program's own planted variant, the bug written out as code.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from sumgrad.base.errors import UserError
from sumgrad.faults.collective import CollectiveFault, parse_collective_fault
from torch import nn

VARIANTS = "sumgrad.workloads.planted"


class Held(Protocol):
    """A parameter that a rank holds."""

    @property
    def param(self) -> nn.Parameter: ...


@dataclass(frozen=True, slots=True)
class StepFault:
    """A wrapper around step. named: kinds of cause the Diagnosis may give it."""

    name: str
    story: str
    operator: str
    named: tuple[str, ...]
    plant: Callable[[nn.Module, Sequence[Held], Any], contextlib.AbstractContextManager[None]]
    min_steps: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantFault:
    """A subclass of a shipped Program with the bug in its code. target: `module:Class`."""

    name: str
    story: str
    operator: str
    named: tuple[str, ...]
    workload: str
    target: str
    min_steps: int = 1


ProgramFault = CollectiveFault | StepFault | VariantFault


@contextlib.contextmanager
def _keep_last(model: nn.Module, placed: Sequence[Held], ctx: Any) -> Iterator[None]:
    """Each backward clears what the one before it left."""

    def clear(param: nn.Parameter) -> Callable[[Any], None]:
        def hook(_: Any) -> None:
            if param.grad is not None:
                param.grad.zero_()

        return hook

    hooks = [p.param.register_hook(clear(p.param)) for p in placed]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _scaled_after(
    factor: Callable[[Any], float],
) -> Callable[[nn.Module, Sequence[Held], Any], contextlib.AbstractContextManager[None]]:
    @contextlib.contextmanager
    def plant(model: nn.Module, placed: Sequence[Held], ctx: Any) -> Iterator[None]:
        yield
        for p in placed:
            if p.param.grad is not None:
                p.param.grad.mul_(factor(ctx))

    return plant


@contextlib.contextmanager
def _clip_locally(model: nn.Module, placed: Sequence[Held], ctx: Any) -> Iterator[None]:
    """Every rank clips by the norm of what it holds, as if that were all."""
    yield
    grads = [p.param.grad for p in placed if p.param.grad is not None]
    locals_ = [g.to_local() if hasattr(g, "to_local") else g for g in grads]
    if locals_:
        norm = torch.stack([g.square().sum() for g in locals_]).sum().sqrt()
        for g in locals_:
            g.mul_(0.5 / (1 + norm))


@contextlib.contextmanager
def _nothing(model: nn.Module, placed: Sequence[Held], ctx: Any) -> Iterator[None]:
    yield


def step_faults() -> dict[str, StepFault]:
    """Every wrapper that works on any Program."""
    # fmt: off
    return {
        fault.name: fault
        for fault in (
            StepFault("keep_last_microbatch", "the accumulator is cleared by every micro-batch",
                      "M34", ("lost_rows", "lost_contribution"), _keep_last),
            StepFault("divide_by_world", "the result is divided by the world size once more", "M08",
                      ("factor",), _scaled_after(lambda ctx: 1 / ctx.world_size)),
            StepFault("times_world",
                      "the loss is multiplied by the world size for an average that is none", "M07",
                      ("factor",), _scaled_after(lambda ctx: ctx.world_size)),
            StepFault("clip_by_local_norm", "each rank clips by the norm of its own shard", "M53",
                      ("rank_scale", "factor"), _clip_locally),
            StepFault("clip_with_replicas_counted",
                      "the norm counts replicated gradients once for each rank, so all are clipped",
                      "M52", ("factor",), _scaled_after(lambda ctx: ctx.world_size**-0.5)),
            StepFault("clip_on_rank_0", "only rank 0 clips its gradients", "M54", ("rank_scale",),
                      _scaled_after(lambda ctx: 0.5 if ctx.rank == 0 else 1.0)),
            StepFault("unsynchronised_init", "one replica starts from other weights", "M50",
                      ("other_weights",), _nothing),
        )
    }
    # fmt: on


def variants() -> dict[str, VariantFault]:
    """Every planted variant of a shipped Program."""
    planted = importlib.import_module(VARIANTS).PLANTED
    return {item["name"]: VariantFault(**item, target=target) for target, item in planted.items()}


def find_program_fault(text: str, workload: str) -> ProgramFault:
    """The fault that `--fault` names. Raises UserError with those there are."""
    if ":" in text:
        return parse_collective_fault(text)
    if text in step_faults():
        return step_faults()[text]
    known = variants()
    if text not in known:
        names = [*step_faults(), *(n for n, v in known.items() if v.workload == workload)]
        raise UserError(
            f"--fault: got {text!r}, expected KIND:FAMILY@GROUP#N (a collective; `sumgrad faults` "
            f"lists those of a Program) or one of {', '.join(names)}"
        )
    if known[text].workload != workload:
        raise UserError(
            f"--fault {text}: is a variant of {known[text].workload}, not of {workload}"
        )
    return known[text]


def planted_class(workload: str, fault: str) -> str:
    """What `--workload` would say for the planted Program: itself, unless it is a variant."""
    found = find_program_fault(fault, workload)
    return found.target if isinstance(found, VariantFault) else workload


def plant_in_step(
    fault: ProgramFault | None, model: nn.Module, placed: Sequence[Held], ctx: Any
) -> contextlib.AbstractContextManager[None]:
    """The wrapper around one step; nothing for faults that are elsewhere."""
    if isinstance(fault, StepFault):
        return fault.plant(model, placed, ctx)
    return contextlib.nullcontext()
