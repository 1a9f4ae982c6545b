"""A call of a torch function with what the ranks of a group have together, in place of each's own.

a rank's part --gathered along a dimension--> the call --> of what it gives its own part, too,
or all of it, where it has no such dimension
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree


def of_the_whole(
    call: Callable[[Callable[[int, Any], Any]], Any],
    parts: Sequence[int],
    *,
    dim: int,
    both: bool,
    group: dist.ProcessGroup,
) -> Any:
    """call: with each of its arguments, and what number it has, through what it is given. parts: of
    which of these ranks have parts. both: whether a part's gradient is what all ranks' calls give
    it, not the own alone. ValueError where it cannot be told which part of the result is a rank's
    own."""
    taken: dict[int, Any] = {}
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        own = pytree.tree_leaves(call(taken.setdefault))
    sizes = {taken[parts[0]].shape[dim]}
    sizes |= {t.shape[dim] for t in own if isinstance(t, Tensor) and t.ndim > dim}
    sizes -= {1}  # more often a dimension's number
    numbers = {at: value for at, value in taken.items() if _numbers(value)}
    with torch._C.DisableTorchFunction():
        of_ranks = _of_all((numbers, sizes), group)

    def together(at: int, value: Any, *, sized: bool = True) -> Any:
        if at in parts:
            with torch._C.DisableTorchFunction():
                return _Together.apply(value, dim, both, group)
        return _in_all(at, value, of_ranks) if sized and at in numbers else value

    try:
        given = call(together)
    except (IndexError, RuntimeError):  # a number that is no size
        given = call(partial(together, sized=False))
    leaves, spec = pytree.tree_flatten(given)
    with torch._C.DisableTorchFunction():
        own_parts = [_own_part(*pair, group) for pair in zip(own, leaves, strict=True)]
    return pytree.tree_unflatten(own_parts, spec)


def _numbers(value: Any) -> Sequence[int]:
    values = value if isinstance(value, list | tuple) else (value,)
    return values if all(type(v) is int for v in values) else ()


def _in_all(at: int, value: Any, of_ranks: Sequence[tuple[dict[int, Any], set[int]]]) -> Any:
    """With a number that is on each rank the size of its part as that of the whole."""
    each = [(_numbers(numbers.get(at, ())), sizes) for numbers, sizes in of_ranks]
    own = _numbers(value)
    if len({len(numbers) for numbers, _ in each}) > 1:
        return value
    out = [
        sum(numbers[i] for numbers, _ in each)
        if all(numbers[i] in sizes for numbers, sizes in each)
        else own[i]
        for i in range(len(own))
    ]
    return type(value)(out) if isinstance(value, list | tuple) else out[0]


def _own_part(part: Any, whole: Any, group: dist.ProcessGroup) -> Any:
    if not isinstance(whole, Tensor):
        return whole
    shapes = _of_all(tuple(part.shape), group)
    unlike = [
        at for at in range(whole.ndim)
        if whole.ndim == part.ndim and any(s[at] != whole.shape[at] for s in shapes)
    ]  # fmt: skip
    if whole.ndim == part.ndim and not unlike:
        return whole
    sizes = [shape[unlike[0]] for shape in shapes] if len(unlike) == 1 else []
    if not sizes or sum(sizes) != whole.shape[unlike[0]]:
        raise ValueError(f"of {tuple(whole.shape)} no part is as large as {tuple(part.shape)}")
    me = dist.get_rank(group)
    return whole.narrow(unlike[0], sum(sizes[:me]), sizes[me])


class _Together(torch.autograd.Function):
    """The parts of all ranks of a group along a dimension, which may be unlike in size there."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, dim: int, both: bool, group: dist.ProcessGroup) -> Tensor:
        shapes = _of_all(tuple(part.shape), group)
        sizes = [shape[dim] for shape in shapes]
        ctx.dim, ctx.sizes, ctx.both, ctx.group = dim, sizes, both, group
        padded = part.new_zeros([*part.shape[:dim], max(sizes), *part.shape[dim + 1 :]])
        padded.narrow(dim, 0, part.shape[dim]).copy_(part)
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group)
        cut = [one.narrow(dim, 0, size) for one, size in zip(parts, sizes, strict=True)]
        return torch.cat(cut, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.both:
            grad = grad.contiguous().clone()
            dist.all_reduce(grad, dist.ReduceOp.SUM, ctx.group)
        me = dist.get_rank(ctx.group)
        return grad.narrow(ctx.dim, sum(ctx.sizes[:me]), ctx.sizes[me]), None, None, None


def _of_all(own: Any, group: dist.ProcessGroup) -> Sequence[Any]:
    out: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(out, own, group)
    return out
