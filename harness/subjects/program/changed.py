"""What a step calls at one place, done otherwise there: summed over ranks, or detached.

On all ranks alike, each time it runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from sumgrad.record.computed import MODULE
from sumgrad.record.trial import Change
from sumgrad.subjects.program.computations import is_backward, name_of, several
from sumgrad.subjects.program.frames import site_of, users_frame
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle


class Changed(TorchFunctionMode):
    """Between `with` and its end. group: of the ranks that sum, or take the largest. modules: those
    of the model, by name."""

    def __init__(
        self, change: Change, group: dist.ProcessGroup, modules: Mapping[str, nn.Module]
    ) -> None:
        super().__init__()
        self._change, self._group, self._modules = change, group, modules
        self._hook: RemovableHandle | None = None

    def __enter__(self) -> Changed:
        super().__enter__()
        name = self._change.function.removeprefix(MODULE)
        module = self._modules.get(name) if name != self._change.function else None
        if module is not None and self._change.at < 0:
            self._hook = module.register_forward_hook(lambda _, args, out: self._otherwise(out))
        elif module is not None:
            self._hook = module.register_forward_pre_hook(
                lambda _, args: (self._otherwise(args[0]), *args[1:]) if args else None
            )
        return self

    def __exit__(self, *what: Any) -> None:
        if self._hook is not None:
            self._hook.remove()
        super().__exit__(*what)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, change = kwargs or {}, self._change
        frame = users_frame() if name_of(func) == change.function else None
        if frame is None or site_of(frame)[0] != change.site or is_backward():
            return func(*args, **kwargs)
        if change.way in ("attach", "skip"):
            return args[0]
        if change.at >= 0:
            args, kwargs = self._with_argument(args, kwargs)
        out = func(*args, **kwargs)
        return self._otherwise(out) if change.at < 0 and isinstance(out, Tensor) else out

    def _with_argument(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """With the tensor that is meant as it is to be; counted as a Computation's are."""
        keys = sorted(kwargs)
        at, out = 0, list[Any]()
        for value in (*args, *(kwargs[key] for key in keys)):
            own = []
            for one in several(value):
                own.append(self._otherwise(one) if at == self._change.at else one)
                at += 1
            of = tuple if isinstance(value, tuple) else list
            out.append(of(own) if several(value) is value else own[0])
        return tuple(out[: len(args)]), dict(zip(keys, out[len(args) :], strict=True))

    def _otherwise(self, tensor: Any) -> Any:
        change = self._change
        if change.way == "number":
            return _times(tensor, change.by)
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            return tensor
        if change.way == "detach":
            return tensor.detach()
        if change.way == "once":
            return tensor * change.by
        with torch._C.DisableTorchFunction():
            return _Otherwise.apply(tensor, change, self._group)


class _Otherwise(torch.autograd.Function):
    """A tensor, or its sum or largest over ranks; and its gradient, so or so."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, change: Change, group: dist.ProcessGroup) -> Tensor:
        ctx.change, ctx.group = change, group
        out = tensor.detach().clone()
        if change.way in ("sum", "sum_both"):
            dist.all_reduce(out, dist.ReduceOp.SUM, group)
        elif change.way in ("largest", "smallest"):
            op = dist.ReduceOp.MAX if change.way == "largest" else dist.ReduceOp.MIN
            dist.all_reduce(out, op, group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if ctx.change.way in ("sum_both", "sum_back"):
            grad = grad.contiguous().clone()
            dist.all_reduce(grad, dist.ReduceOp.SUM, ctx.group)
        return grad, None, None


def _times(number: Any, by: float) -> Any:
    """A whole number stays one, where that is so many times it."""
    if isinstance(number, bool) or not isinstance(number, int | float):
        return number
    whole = isinstance(number, int) and float(number * by).is_integer()
    return int(number * by) if whole else number * by
