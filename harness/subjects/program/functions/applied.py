"""One call of a user's Function: what it was given and gave, and what came back.

Its forward can be run once more by itself when the step is over, with other values of arguments.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sumgrad.record.computed import Computation
from sumgrad.record.line import Line
from torch import Tensor
from torch.autograd import Function
from torch.utils import _pytree as pytree

STEP = 1e-6  # of the largest number of an argument
LEAST = 1e-2  # in place of that, where all are smaller


@dataclass(slots=True, kw_only=True, eq=False)
class Applied:
    """One call: what it was given and gave, and what came back, once the backward has run it."""

    cls: Any
    made: Computation
    computation: int  # number of `made`
    number: int  # of the calls at this line
    operations: tuple[int, int]  # which collectives its forward issued: from, and up to
    given: tuple[Any, ...]
    gave: tuple[Tensor, ...]
    leaves: tuple[bool, ...]  # which arguments are leaves
    until: tuple[float, float] = (math.inf, math.inf)  # no forward is begun later than that
    began: int = 0  # operations when its first backward began
    ended: int = 0  # and when that had ended
    talked: bool = False  # some backward of it communicated
    came: tuple[tuple[Tensor | None, ...], tuple[Tensor | None, ...]] | None = None

    @property
    def is_alone(self) -> bool:
        """Whether it does not communicate."""
        return self.operations[0] == self.operations[1] and not self.talked

    @property
    def line(self) -> Line:
        """That calls it, and what stands there."""
        return self.made.line, self.made.code


def step_of(value: Tensor) -> float:
    """How far an argument is moved."""
    return STEP * max(float(value.detach().abs().max()), LEAST)


def run_again(one: Applied, other: Mapping[int, Tensor]) -> list[Tensor]:
    """The forward once more, with other values of some arguments. Raises TimeoutError."""
    own, clock = one.until
    if time.process_time() > own or time.monotonic() > clock:
        raise TimeoutError
    args = [
        other.get(i, a).detach().clone().requires_grad_(a.requires_grad)
        if isinstance(a, Tensor)
        else a
        for i, a in enumerate(one.given)
    ]
    return [t for t in pytree.tree_leaves(one.cls.apply(*args)) if isinstance(t, Tensor)]


def is_as_it_was(one: Applied, again: Sequence[Tensor]) -> bool:
    return len(again) == len(one.gave) and all(
        a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, rtol=1e-12, atol=1e-14)
        for a, b in zip(again, one.gave, strict=True)
    )


def argument_name(cls: Any, at: int) -> str:
    """Of an argument of the forward, which has a ctx before it unless there is a setup_context."""
    aside = cls.setup_context is Function.setup_context
    names = list(inspect.signature(cls.forward).parameters.values())[aside:]
    known = at < len(names) and names[at].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    return names[at].name if known else f"number {at + 1}"


def along(gradient: Tensor | None, a: Tensor, b: Tensor) -> float:
    """What a loss gains from one result to another: of complex numbers the gradient is that of
    both parts, the one as real and the other as imaginary."""
    if gradient is None or not (a.is_floating_point() or a.is_complex()):
        return 0.0
    change = a - b
    product = (gradient.conj() * change).real if a.is_complex() else gradient * change
    return float(product.sum())
