"""The gradients that a rank holds when its step has ended: `.grad`, or what the Program names."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from sumgrad.base.tensors import to_local
from sumgrad.subjects.own_gradients import OwnGradients, gathered
from sumgrad.subjects.program.context import Context
from sumgrad.subjects.program.placed.placement import Placed
from sumgrad.subjects.program.protocol import with_place
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial
from torch.nn.parallel import DistributedDataParallel

OWN_SAMPLES = 1 << 16  # of each parameter, that are kept of what a failing step's backwards give


def held_gradients(
    placed: Sequence[Placed],
    program: Any,
    ctx: Context,
    label: Callable[[], AbstractContextManager[Any]],
) -> tuple[dict[str, Tensor], list[str]]:
    """Local gradients by name, of the local shapes, and names of those that were partial sums.

    A DTensor that is still a partial sum is reduced: all ranks ask in the same order. label: for
    the operations that do this. TypeError where `gradient_of` gives something else than a gradient.
    """
    grads: dict[str, Tensor] = {}
    partial: list[str] = []
    declared = getattr(program, "gradient_of", None)
    for p in placed:
        grad = p.param.grad
        if declared is not None:
            grad = _declared(program, p, declared(p.name, p.param, ctx))
        if grad is None:
            continue
        if isinstance(grad, DTensor) and isinstance(p.param, DTensor):
            if any(isinstance(x, Partial) for x in grad.placements):
                partial.append(p.name)
            with label():
                grad = grad.redistribute(placements=p.param.placements)
        grad = grad.to_dense() if grad.is_sparse else grad
        grads[p.name] = to_local(grad).detach()
    return grads, partial


def _declared(program: Any, p: Placed, grad: Any) -> Tensor | None:
    """What gradient_of() gives for a parameter, in the shape of what the rank holds."""
    shape = tuple(p.local().shape)
    if grad is None:
        return None
    tensor = isinstance(grad, Tensor)
    if not tensor or to_local(grad).numel() != p.local().numel():
        got = f"a tensor of {tuple(grad.shape)}" if tensor else type(grad).__name__
        raise TypeError(
            with_place(
                program,
                f"gradient_of() returned {got} for {p.name}, expected None or a tensor of {shape}, "
                f"what this rank holds of it",
            )
        )
    given: Tensor = grad
    return given if to_local(given).shape == shape else to_local(given).reshape(shape)


def ddp_divides_by(model: nn.Module) -> int:
    """By how many ranks the DistributedDataParallel in it divides; 0 where none does, or a hook
    does what it wants, or there are several that differ."""
    sizes = {
        dist.get_world_size(m.process_group) if not m._comm_hooks else 0
        for m in model.modules()
        if isinstance(m, DistributedDataParallel)
    }
    return sizes.pop() if len(sizes) == 1 else 0


@contextlib.contextmanager
def own_gradients_of(model: nn.Module, placed: Sequence[Placed]) -> Iterator[OwnGradients]:
    """What this rank's own backwards give its parameters, before it is reduced."""
    own = OwnGradients(OWN_SAMPLES)
    names = {id(p.param): p.name for p in placed}
    for p in placed:
        own.look_at(p.name, p.param, p.index)

    def look_at_whole_ones(module: nn.Module, args: Any, output: Any) -> None:
        for shard, leaf in gathered(module):
            if id(shard) in names and not isinstance(leaf, DTensor):
                own.look_at(names[id(shard)], leaf, None)

    sharding = [m for m in model.modules() if hasattr(m, "_get_fsdp_state")]
    hooks = [module.register_forward_hook(look_at_whole_ones) for module in sharding]
    try:
        yield own
    finally:
        for hook in hooks:
            hook.remove()
        own.close()


def reduced_by_no_wrapper(params: Mapping[str, Tensor], roots: Iterable[nn.Module]) -> list[str]:
    """Names of those that neither a DistributedDataParallel in these models nor fully_shard has:
    who steps with their gradients has to reduce them by hand."""
    known = {
        id(param)
        for root in roots
        for module in root.modules()
        if isinstance(module, DistributedDataParallel)
        for name, param in module.module.named_parameters()
        if name not in module.parameters_to_ignore
    }
    return [n for n, p in params.items() if not isinstance(p, DTensor) and id(p) not in known]
