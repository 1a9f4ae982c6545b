"""What a rank notes of its step beyond the ledger: which gradients enter and leave a reduction.

An averaging reducer may divide before a SUM, so the reduce op alone does not tell. What autograd
produced for each parameter is therefore held against what enters each reduction, and what leaves
it against the gradients the step ends with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from sumgrad.base.tensors import bits, to_local
from sumgrad.ledger.backends import tensors_in
from sumgrad.ledger.operations import FAMILIES, REDUCTIONS
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

CLOSE = 1e-9  # of the norm: the same numbers, divided once, in float64
OUT_OF_PLACE = ("reduce_scatter", "all_gather", "all_to_all", "scatter", "gather")
MAX_NUMEL = 1 << 22  # larger buffers are not looked into


class GradientWatch:
    """Observes one rank. params: name -> parameter, as the rank holds them."""

    def __init__(self, params: Mapping[str, nn.Parameter]) -> None:
        self._params = dict(params)
        self._produced: dict[str, Tensor] = {}
        self._outputs: list[tuple[int, list[Tensor]]] = []
        self.backwards: dict[str, int] = {}
        self._calls = 0
        # On the node that accumulates: a hook on the tensor also fires inside autograd.grad, whose
        # result is no gradient of the step. The node lives as long as somebody holds it.
        self._nodes = {n: get_gradient_edge(p).node for n, p in params.items() if p.requires_grad}
        self._hooks = [
            node.register_prehook(lambda grads, name=name: self._saw(name, grads[0]))
            for name, node in self._nodes.items()
        ]

    def begin_step(self) -> None:
        """Forget what the last step produced."""
        self._produced.clear()
        self._outputs.clear()
        self.backwards.clear()
        self._calls = 0

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def observe(
        self, op: str, args: tuple[Any, ...]
    ) -> tuple[dict[str, Any], Callable[[], str] | None]:
        """For the ledger: digest of what goes in, the gradients in it; then that of the result."""
        number, self._calls = self._calls, self._calls + 1
        family = FAMILIES.get(op)
        outputs = list(tensors_in(args[:1]))
        inputs = list(tensors_in(args[1:2])) if family in OUT_OF_PLACE else outputs
        size = sum(t.numel() for t in [*inputs, *outputs])
        sparse = any(t.is_sparse for t in [*inputs, *outputs])
        if not inputs or size > MAX_NUMEL or sparse or family in (None, "barrier"):
            return {"call": number}, None
        seen: dict[str, Any] = {"call": number}
        if family != "recv":
            seen["input"] = bits(inputs)
        if family in REDUCTIONS and len({t.dtype for t in inputs}) == 1:
            flat = torch.cat([t.detach().reshape(-1) for t in inputs])
            self._outputs.append((number, outputs))
            seen["nonzero"] = bool(flat.count_nonzero())
            if flat.numel() == 1:
                seen["scalar"] = float(flat)
            own = self._own_gradient(inputs, flat) or segments(flat, self._produced)
            seen["grads"] = [[n, c] for n, c in own]
        return seen, None if family == "send" else lambda: bits(outputs)

    def _own_gradient(self, inputs: Sequence[Tensor], flat: Tensor) -> list[tuple[str, float]]:
        """The parameter whose `.grad` itself goes in: by values another's may be the same, as those
        of two norms at their first weights are."""
        if len(inputs) != 1:
            return []
        for name, param in self._params.items():
            grad = None if param.grad is None else to_local(param.grad)
            if grad is None or grad.is_sparse or grad.numel() != flat.numel():
                continue
            made = self._produced.get(name)
            if grad.data_ptr() == inputs[0].data_ptr() and made is not None and bool(made.any()):
                factor = _factor(flat, made.reshape(-1))
                return [] if factor is None else [(name, factor)]
        return []

    def feeds(self) -> list[dict[str, Any]]:
        """Which reductions' results the final gradients are: call number -> parameters, factor."""
        final = {
            name: to_local(param.grad)
            for name, param in self._params.items()
            if param.grad is not None
            and not param.grad.is_sparse
            and to_local(param.grad).numel() <= MAX_NUMEL
        }
        out = []
        for number, outputs in self._outputs:
            own = {t.untyped_storage().data_ptr() for t in outputs}
            named = [[n, 1.0] for n, g in final.items() if g.untyped_storage().data_ptr() in own]
            if not named:
                flat = torch.cat([t.detach().reshape(-1) for t in outputs])
                named = [[n, c] for n, c in segments(flat, final)]
            if named:
                out.append({"call": number, "grads": named})
        return out

    def _saw(self, name: str, grad: Tensor | None) -> None:
        if grad is None:  # an autograd function that leaves a gradient for later
            return
        self.backwards[name] = self.backwards.get(name, 0) + 1
        value = to_local(grad).detach()
        if value.numel() > MAX_NUMEL:
            return  # no reduction of that size is looked into
        value = value.to_dense() if value.is_sparse else value
        before = self._produced.get(name)
        self._produced[name] = value.clone() if before is None else before + value


def segments(flat: Tensor, grads: Mapping[str, Tensor]) -> list[tuple[str, float]]:
    """The gradients that a flat buffer is made of, one after the other, each times one factor.

    None where they are less than half of it: a few numbers may be like a gradient by chance, or
    because something else shares its direction. Between them there may be gradients of one number
    and of zeros, which tell nothing.
    """
    if not flat.is_floating_point():
        return []
    left = {n: g.reshape(-1) for n, g in grads.items() if g.numel() > 1 and bool(g.any())}
    none = (g.numel() for g in grads.values() if g.numel() == 1 or not bool(g.any()))
    zeros = sorted(none, reverse=True)
    found: list[tuple[str, float]] = []
    position = covered = 0
    while position < flat.numel():
        for name, grad in left.items():
            part = flat[position : position + grad.numel()]
            factor = _factor(part, grad)
            if factor is not None:
                found.append((name, factor))
                position += grad.numel()
                covered += grad.numel()
                del left[name]
                break
        else:
            size = _without_a_gradient(flat[position:], zeros)
            if not size:
                break
            zeros.remove(size)
            position += size
    return found if 2 * covered >= int(flat.count_nonzero()) else []


def _without_a_gradient(rest: Tensor, sizes: Sequence[int]) -> int:
    """How much of a buffer's rest is one gradient of zeros, or of one number; 0 where none is."""
    for size in sizes:
        if size <= rest.numel() and (size == 1 or not bool(rest[:size].any())):
            return size
    return 0


def _factor(part: Tensor, grad: Tensor) -> float | None:
    """c with part = c grad, c not 0; None if there is none. Either may be rounded to its dtype."""
    if part.numel() != grad.numel() or not part.is_floating_point():
        return None
    eps = max(float(torch.finfo(part.dtype).eps), float(torch.finfo(grad.dtype).eps))
    close = max(CLOSE, 4 * eps)
    x, y = part.double(), grad.double()
    at = int(y.abs().argmax())
    largest = abs(float(y[at]))
    if not largest:
        return None
    x, y = x / largest, y / largest  # their squares may be nothing
    guess = float(x[at]) / float(y[at])
    rough = max(1e-2, close) * (abs(float(x[0])) + abs(guess * float(y[0])))
    if guess == 0 or not abs(float(x[0]) - guess * float(y[0])) <= rough:
        return None  # most pairs are told apart by two elements
    size = float(y.square().sum())
    c = float((x * y).sum()) / size
    if c == 0 or not float((x - c * y).norm()) <= close * abs(c) * size**0.5:
        return None
    return c
