"""The gradients that an optimizer finds: in `.grad`, or elsewhere; and what it changes without."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sumgrad.base.outcome import SETUP
from sumgrad.base.tensors import bits, to_local
from sumgrad.ledger.process_group import Ledger
from sumgrad.subjects.program.unseen import same_gradient
from sumgrad.subjects.script.models import Held
from torch import Tensor

SECOND = "main_grad"  # Megatron's, apex's and Transformer Engine's


def gradient_of(held: Held, info: dict[str, Any], ledger: Ledger) -> Tensor | None:
    """What an optimizer finds of a parameter, of the local shape; None where that is nothing. info:
    of the step, to which is added what a reader must know of it."""
    grad, beside = held.param.grad, second_gradient(held.param)
    if grad is None and beside is not None:
        grad, info["read_from"][held.name] = beside, SECOND
    elif grad is not None and beside is not None and not is_same_gradient(grad, beside):
        info["elsewhere"][held.name] = SECOND
    if grad is None:
        return None
    if is_placed_otherwise(held.param, grad):
        if any(p.is_partial() for p in grad.placements):  # type: ignore[attr-defined]
            info["partial"].append(held.name)
        with ledger.label(f"{SETUP}/partial"):
            grad = grad.redistribute(placements=held.param.placements)  # type: ignore[attr-defined]
    grad = grad.to_dense() if grad.is_sparse else grad
    local = held.part_of(grad).detach()
    wanted = held.local().shape
    return local.reshape(wanted) if local.numel() == wanted.numel() else local


def is_placed_otherwise(param: Tensor, grad: Tensor) -> bool:
    """Whether it is a DTensor that lies on its ranks, or is a sum over them, as its parameter does
    not and is not: an optimizer's arithmetic brings it to where that is."""
    own = getattr(grad, "placements", None)
    return own is not None and own != getattr(param, "placements", own)


def second_gradient(param: Tensor) -> Tensor | None:
    """What such an optimizer takes in place of `.grad`, where a parameter has it."""
    held = getattr(param, SECOND, None)
    fits = isinstance(held, Tensor) and held.numel() == param.numel()
    return held if fits and isinstance(held, Tensor) and held.is_floating_point() else None


def is_same_gradient(grad: Tensor, beside: Tensor) -> bool:
    """Whether the two hold the same, as where one is a view of the other, or the second nothing."""
    return not bool(to_local(beside).any()) or same_gradient(grad, to_local(beside).detach())


class Without:
    """Of one process: what an optimizer's step changes though it found no gradient."""

    def __init__(self) -> None:
        self._had: dict[str, tuple[Held, str]] = {}

    def before(self, held: Mapping[str, Held]) -> None:
        """held: parameters of the optimizer without a gradient."""
        self._had = {n: (h, bits([h.local().detach()])) for n, h in held.items()}

    def after(self) -> list[str]:
        """Names of those that have other values now; once a step."""
        had, self._had = self._had, {}
        return [n for n, (h, was) in had.items() if bits([h.local().detach()]) != was]
