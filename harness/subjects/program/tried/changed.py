"""What a step calls at one place, done otherwise there: summed over ranks, detached, of all parts.

On all ranks alike, each time it runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from sumgrad.record.computed import MODULE
from sumgrad.record.trial import Change, Way
from sumgrad.subjects.program.functions.every_apply import FROM_A_USERS_LINE, around_every_apply
from sumgrad.subjects.program.tried.added import added
from sumgrad.subjects.program.tried.whole import of_the_whole
from sumgrad.subjects.program.watched.computations import is_backward, name_of, several
from sumgrad.subjects.program.watched.frames import site_of, users_frame
from torch import Tensor, nn
from torch.autograd import Function
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Each = Callable[[int, Any], Any]  # of what a call takes, by number
WithEach = Callable[[Any, Args, Kwargs, Each], Any]


class Changed(TorchFunctionMode):
    """Between `with` and its end. group: of the ranks that sum, or put together what
    they have. modules: those of the model, by name."""

    def __init__(
        self, change: Change, group: dist.ProcessGroup, modules: Mapping[str, nn.Module]
    ) -> None:
        super().__init__()
        self._change, self._group, self._modules = change, group, modules
        self._functions = {function for _, function in change.places}
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> Changed:
        super().__enter__()
        try:
            self._begin()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _begin(self) -> None:
        for _, function in self._change.places:
            name = function.removeprefix(MODULE)
            module = self._modules.get(name) if name != function else None
            if module is not None:
                self._change_module(module)

        def around(cls: Any, call: Any, args: Any, kwargs: Any) -> Any:
            if not self._is_at(cls.__name__, users_frame(FROM_A_USERS_LINE)):
                return call(*args, **kwargs)
            return self._called(call, args, kwargs, _with_tensors)

        self._undo.callback(around_every_apply(around))

    def _change_module(self, module: nn.Module) -> None:
        """A Function's `apply`, and a module's forward, are none of torch's functions."""
        forward = module.forward
        if "forward" in module.__dict__:  # a wrapper's, as of autocast or a compiler
            self._undo.callback(module.__dict__.__setitem__, "forward", forward)
        else:
            self._undo.callback(module.__dict__.pop, "forward", None)
        module.forward = lambda *args, **kwargs: self._called(forward, args, kwargs, _with_tensors)

    def __exit__(self, *what: Any) -> None:
        self._undo.close()
        super().__exit__(*what)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return func(*args, **(kwargs or {}))
        name = name_of(func)
        is_at = name in self._functions and self._is_at(name, users_frame())
        if not is_at:
            return func(*args, **(kwargs or {}))
        return self._called(func, args, kwargs or {}, _with_arguments)

    def _is_at(self, name: str, frame: FrameType | None) -> bool:
        here = frame is not None and (site_of(frame)[0], name) in self._change.places
        return here and not is_backward()

    def _called(self, func: Any, args: Args, kwargs: Kwargs, with_each: WithEach) -> Any:
        """What a call that is to be changed gives."""
        change = self._change
        if change.way in ("attach", "skip"):
            return next(t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor))
        if change.way == "added":
            return added(func, args, kwargs)
        if change.way in ("whole", "whole_both"):
            name = str(getattr(func, "__name__", ""))
            if "out" in kwargs or (name.endswith("_") and not name.endswith("__")):
                raise ValueError(f"{name} writes into what it takes, which is no whole")
            return of_the_whole(
                lambda each: with_each(func, args, kwargs, each),
                change.ats,
                dim=change.dim,
                both=change.way == "whole_both",
                group=self._group,
            )
        if change.ats:
            return with_each(func, args, kwargs, self._if_meant)
        out = func(*args, **kwargs)
        return self._otherwise(out) if isinstance(out, Tensor) else out

    def _if_meant(self, at: int, value: Any) -> Any:
        return self._otherwise(value) if at in self._change.ats else value

    def _otherwise(self, value: Any) -> Any:
        change = self._change
        if change.way == "number":
            return _times(value, change.by)
        if type(value) in (int, float) and change.way in ("sum", "largest"):
            return _of_numbers(value, change.way, self._group)
        if isinstance(value, Tensor) and change.way == "first":
            return _of_the_first(value, self._group)
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        if change.way == "detach":
            return value.detach()
        if change.way == "once":
            return value * change.by
        with torch._C.DisableTorchFunction():
            return _Otherwise.apply(value, change, self._group)


def summed(value: Any, group: dist.ProcessGroup) -> Any:
    """A tensor, or a number, summed over the ranks of a group; its gradient is left as it comes."""
    if isinstance(value, Tensor) and value.is_floating_point():
        with torch._C.DisableTorchFunction():
            return _Otherwise.apply(value, Change(site="", function="", way="sum"), group)
    return _of_numbers(value, "sum", group) if type(value) in (int, float) else value


def summed_before(value: Any, group: dist.ProcessGroup) -> Any:
    """A number, summed over those ranks of a group that come before this one."""
    own = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    if type(own) not in (int, float):
        raise TypeError("no number")
    numbers = _numbers(own, group)[: dist.get_rank(group)]
    return type(own)(sum(numbers))


def _with_arguments(func: Any, args: Args, kwargs: Kwargs, each: Each) -> Any:
    """Counted as a Computation's are."""
    keys = sorted(kwargs)
    at, out = 0, list[Any]()
    for value in (*args, *(kwargs[key] for key in keys)):
        own = []
        for one in several(value):
            own.append(each(at, one))
            at += 1
        of = tuple if isinstance(value, tuple) else list
        out.append(of(own) if several(value) is value else own[0])
    return func(*out[: len(args)], **dict(zip(keys, out[len(args) :], strict=True)))


def _with_tensors(func: Any, args: Args, kwargs: Kwargs, each: Each) -> Any:
    """Of a Function, or a module, whose tensors alone are counted."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    for at, place in enumerate(places):
        leaves[place] = each(at, leaves[place])
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    return func(*args, **kwargs)


class _Otherwise(Function):
    """A tensor, or its sum or largest over ranks; and its gradient, so or so. That of a largest is
    of all ranks, and of those that have it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, change: Change, group: dist.ProcessGroup) -> Tensor:
        ctx.change, ctx.group = change, group
        out = tensor.detach().clone()
        if change.way in ("sum", "sum_both"):
            dist.all_reduce(out, dist.ReduceOp.SUM, group)
        elif change.way in ("largest", "smallest"):
            op = dist.ReduceOp.MAX if change.way == "largest" else dist.ReduceOp.MIN
            dist.all_reduce(out, op, group)
            has_it = (out == tensor).to(out.dtype)
            all_that_have = has_it.clone()
            dist.all_reduce(all_that_have, dist.ReduceOp.SUM, group)
            ctx.save_for_backward(has_it / all_that_have)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if ctx.change.way in ("sum_both", "sum_back", "largest", "smallest"):
            grad = grad.contiguous().clone()
            dist.all_reduce(grad, dist.ReduceOp.SUM, ctx.group)
        (share,) = ctx.saved_tensors or (None,)
        return grad if share is None else grad * share, None, None


def _of_the_first(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """What the first rank has, of which no gradient comes back."""
    with torch._C.DisableTorchFunction():
        out = own.detach().clone()
        dist.broadcast(out, group=group, group_src=0)
    return out


def _of_numbers(own: float, way: Way, group: dist.ProcessGroup) -> float:
    """Those of all ranks together."""
    numbers = _numbers(own, group)
    return max(numbers) if way == "largest" else sum(numbers)


def _numbers(own: float, group: dist.ProcessGroup) -> list[float]:
    """By rank, each of its own kind; whole ones up to 2 ** 53."""
    held = [torch.zeros(2, dtype=torch.float64) for _ in range(dist.get_world_size(group))]
    with torch._C.DisableTorchFunction():
        dist.all_gather(held, torch.tensor([own, type(own) is int], dtype=torch.float64), group)
        return [int(n) if whole else n for n, whole in (one.tolist() for one in held)]


def _times(number: Any, by: float) -> Any:
    """A whole number stays one, where that is so many times it."""
    if isinstance(number, bool) or not isinstance(number, int | float):
        return number
    whole = isinstance(number, int) and float(number * by).is_integer()
    return int(number * by) if whole else number * by
