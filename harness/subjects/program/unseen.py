"""What a step does beside the gradients that are compared: kept elsewhere, come alive, buffers.

What it is: small looks at a rank's model after a step, and at a loss's graph in one process. What
they find is written down as data; the judge says it. Nothing here compares a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from sumgrad.base.tensors import to_local
from sumgrad.subjects.program.placed.placement import Placed, bare_name
from torch import Tensor, nn

KEPT_UNCHANGED = 1 << 16  # elements of a buffer; a larger one is kept where a step changes it
MOST_KEPT = 1 << 26  # a larger one is not, unless it is to be compared
MOST_STARTS = 256  # places in a gradient at which a part of it may begin
SAME_ROUNDINGS = 4  # of the dtype that a second gradient is kept in


def gradients_elsewhere(placed: Sequence[Placed]) -> dict[str, str]:
    """Parameter -> attribute that holds a gradient of it which its `.grad` is not.

    Megatron's `main_grad` and its like, and the gradient of a copy that hangs at the parameter
    (`main_param`): which of the two an optimizer uses is not known here.
    """
    out = {}
    for p in placed:
        for attribute, value in _second_gradients(p.param):
            held = to_local(value).detach()
            if _is_counted(held, p.local()) and not same_gradient(p.param.grad, held):
                out[p.name] = attribute
    return out


def _second_gradients(param: Tensor) -> Iterator[tuple[str, Tensor]]:
    for attribute, value in vars(param).items():
        if not isinstance(value, Tensor):
            continue
        if "grad" in attribute:
            yield attribute, value
        elif value is not param and value.is_leaf and value.grad is not None:
            yield f"{attribute}.grad", value.grad


def _is_counted(held: Tensor, local: Tensor) -> bool:
    """Whether it may be a gradient of a parameter: a padded one or a part, too, and no norm."""
    return held.numel() == local.numel() or (held.dim() > 0 and held.numel() > 1)


def same_gradient(grad: Tensor | None, held: Tensor) -> bool:
    """Whether a second gradient is `.grad`, or a part of it, or that and zeros, but for the
    rounding to its dtype; zeros beside None are an unused buffer."""
    if grad is None:
        return not bool(held.any())
    own = to_local(grad).detach()
    own = (own.to_dense() if own.is_sparse else own).double().reshape(-1)
    if not held.numel() or not held.is_floating_point():
        return True
    if not own.numel():
        return not bool(held.any())
    bound = SAME_ROUNDINGS * torch.finfo(held.dtype).eps * float(own.abs().max())
    flat = held.double().reshape(-1)
    if len(flat) > len(own):
        return not bool(flat[len(own) :].any()) and _within(flat[: len(own)], own, bound)
    last = len(own) - len(flat)
    starts = ((own[: last + 1] - flat[0]).abs() <= bound).nonzero()[:MOST_STARTS, 0].tolist()
    return any(_within(flat, own[i : i + len(flat)], bound) for i in starts)


def _within(a: Tensor, b: Tensor, bound: float) -> bool:
    return float((a - b).abs().max()) <= bound


def trained_names(model: nn.Module) -> set[str]:
    """Parameters that require a gradient, by the names they are shown under."""
    return {name for name, param in model.named_parameters() if param.requires_grad}


def come_alive(model: nn.Module, before: set[str]) -> list[str]:
    """Parameters that are trained after a step and were not when the model was distributed."""
    return [
        name
        for name, param in model.named_parameters()
        if name not in before and (param.requires_grad or param.grad is not None)
    ]


def buffers_after(
    model: nn.Module,
    before: Mapping[str, Tensor],
    compared: Callable[[str], bool] = lambda _: False,
) -> tuple[dict[str, Tensor], list[str]]:
    """Buffers by build()'s names, this rank's part of each, and which of them have changed; some of
    these may be too large to be kept.

    compared: whether one is kept in any case, by its name.
    """
    held, changed = {}, []
    for shown, buffer in model.named_buffers():
        now, then, name = to_local(buffer).detach(), before.get(shown), bare_name(shown)
        then = None if then is None else to_local(then)
        if then is None or now.shape != then.shape or not torch.equal(now, then.to(now.dtype)):
            changed.append(name)
        most = MOST_KEPT if name in changed[-1:] else KEPT_UNCHANGED
        if now.numel() <= most or compared(name):
            plain = torch.view_as_real(now.resolve_conj()) if now.is_complex() else now
            held[name] = plain.to(device="cpu", copy=True).contiguous()
    return held, changed


def leaves_of(loss: Tensor) -> Iterator[Tensor]:
    """Every tensor that a backward of this loss would give a gradient."""
    todo, seen = [loss.grad_fn], set[Any]()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == "AccumulateGrad":
            yield node.variable  # type: ignore[attr-defined]
        todo += [following for following, _ in node.next_functions]


def describe_tensor(tensor: Tensor, owner: Any) -> str:
    """A tensor as a person would find it: an attribute of a Program or of a module it holds."""
    for attribute, value in vars(owner).items() if hasattr(owner, "__dict__") else ():
        if value is tensor:
            return f"self.{attribute}"
        if isinstance(value, nn.Module):
            for name, param in value.named_parameters():
                if param is tensor:
                    return f"self.{attribute}.{name}"
    return f"a tensor of shape {tuple(tensor.shape)}"
