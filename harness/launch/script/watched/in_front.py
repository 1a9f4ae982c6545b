"""What stands in front of torch's own in a process of a script: groups, backward, optimizers."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.device_mesh
from sumgrad.ledger.process_group import BACKEND
from torch import nn
from torch.nn.utils import stateless
from torch.optim.optimizer import Optimizer

Optimizers = list[weakref.ref[Optimizer]]
A_FILE = "file://"  # how init_method begins where ranks meet at one
_MODULE_FILE = nn.Module.__call__.__code__.co_filename


def record_groups(made: Callable[[], object], meets_at: Callable[[str], object]) -> None:
    """Have process groups over gloo record what goes through them. made: told of the first;
    meets_at: of the file at which ranks meet, before it is there."""
    own = dist.init_process_group

    @functools.wraps(own)
    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        gloo = ("gloo", "cpu:gloo", "cpu:gloo,cuda:nccl")
        at = args[0] if args else kwargs.get("init_method")
        if isinstance(at, str) and at.startswith(A_FILE):
            meets_at(at.removeprefix(A_FILE).partition("?")[0])
        asked = backend.lower() if isinstance(backend, str) else backend
        plain = asked in gloo or (backend is None and not torch.cuda.is_available())
        own(BACKEND if plain else backend, *args, **kwargs)
        made()

    for module in [*sys.modules.values()]:  # device_mesh has its own name for it, as others may
        if vars(module).get("init_process_group") is own:
            setattr(module, "init_process_group", init_process_group)  # noqa: B010


def see_backward(before: Callable[[Any], object], after: Callable[[], object]) -> None:
    """Every backward that a script calls: what it is called on before it, and when it is done, but
    not one inside another."""
    own = torch.autograd.backward
    inside = 0

    @functools.wraps(own)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal inside
        before(tensors)
        inside += 1
        try:
            own(tensors, *args, **kwargs)
        finally:
            inside -= 1
        if not inside:
            after()

    torch.autograd.backward = backward


def see_functional_calls(first: Callable[[nn.Module], object]) -> None:
    """Before every call of a model with other parameters than its own."""
    own = stateless._functional_call

    @functools.wraps(own)
    def functional_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        first(module)
        return own(module, *args, **kwargs)

    stateless._functional_call = functional_call


def see_optimizers() -> Optimizers:
    """Every optimizer from here on: a window of steps is whole when each of them is in it."""
    made: Optimizers = []
    own = Optimizer.__init__

    @functools.wraps(own)
    def init(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        own(optimizer, *args, **kwargs)
        made.append(weakref.ref(optimizer))

    Optimizer.__init__ = init  # type: ignore[assignment,method-assign]
    return made


def in_front_of(owner: Any, name: str, first: Callable[..., Any]) -> None:
    """Call `first` before every call of owner's function."""
    own = getattr(owner, name)

    def both(*args: Any) -> Any:
        first(*args)
        return own(*args)

    setattr(owner, name, both)


def kwargs_of_the_call() -> dict[str, Any]:
    """The keyword arguments of the module call whose global hook runs: torch hands on none."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == _MODULE_FILE:
            kwargs = frame.f_locals.get("kwargs")
            return kwargs if isinstance(kwargs, dict) else {}
        frame = frame.f_back
    return {}
