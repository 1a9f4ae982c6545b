"""Parameters whose gradient an optimizer finds elsewhere than in their `.grad`."""

from __future__ import annotations

from collections.abc import Mapping

from sumgrad.base.tensors import bits, to_local
from sumgrad.subjects.program.unseen import same_gradient
from sumgrad.subjects.script.models import Held
from torch import Tensor

SECOND = "main_grad"  # Megatron's, apex's and Transformer Engine's


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
