"""SwiGLU: y = silu(gate) * up, element by element, with silu(g) = g sigmoid(g).

    dgate = dy up s (1 + g (1 - s)), s = sigmoid(g)          dup = dy g s

Every product is rounded on its own: nothing is fused, so an element's bits depend on it alone.
"""

from __future__ import annotations

from typing import Any

import torch
from sumgrad.kernels.runtime import (
    INTERPRETED,
    TL_DTYPE,
    accumulator_dtype,
    check_floats,
    check_shape,
    compute,
    compute_dtype,
    first_order,
    launch,
    tl,
    triton,
)
from torch import Tensor

BLOCK = 1 << 16 if INTERPRETED else 1024


@triton.jit
def _sigmoid(g):
    """1 / (1 + exp(-g)) without overflow on either side."""
    small = tl.exp(-tl.abs(g))
    return tl.where(g >= 0, 1.0, small) / (1.0 + small)


@triton.jit(do_not_specialize=["numel"])
def swiglu_fwd(gate, up, y, numel, BLOCK: tl.constexpr, ACC: tl.constexpr):
    """BLOCK elements of y."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + place, mask=place < numel, other=0.0).to(ACC)
    u = tl.load(up + place, mask=place < numel, other=0.0).to(ACC)
    sigmoid = _sigmoid(g)
    tl.store(y + place, (g * sigmoid * u).to(y.dtype.element_ty), mask=place < numel)


@triton.jit(do_not_specialize=["numel"])
def swiglu_bwd(dy, gate, up, dgate, dup, numel, BLOCK: tl.constexpr, ACC: tl.constexpr):
    """BLOCK elements of dgate and dup."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < numel
    seed = tl.load(dy + place, mask=inside, other=0.0).to(ACC)
    g = tl.load(gate + place, mask=inside, other=0.0).to(ACC)
    u = tl.load(up + place, mask=inside, other=0.0).to(ACC)
    sigmoid = _sigmoid(g)
    slope = sigmoid * (1.0 + g * (1.0 - sigmoid))
    tl.store(dgate + place, (seed * u * slope).to(dgate.dtype.element_ty), mask=inside)
    tl.store(dup + place, (seed * (g * sigmoid)).to(dup.dtype.element_ty), mask=inside)


def forward(gate: Tensor, up: Tensor) -> Tensor:
    """y, of gate's shape and dtype. Raises KernelError."""
    check_floats(gate=gate, up=up)
    check_shape("up", up, tuple(gate.shape))
    y = torch.empty(gate.shape, dtype=compute_dtype(gate.dtype), device=gate.device)
    acc = TL_DTYPE[accumulator_dtype(gate.dtype)]
    grid = (triton.cdiv(y.numel(), BLOCK),)
    launch(swiglu_fwd, grid, compute(gate), compute(up), y, y.numel(), BLOCK=BLOCK, ACC=acc)
    return y.to(gate.dtype)


def backward(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """dgate and dup."""
    dgate = torch.empty(gate.shape, dtype=compute_dtype(gate.dtype), device=gate.device)
    dup = torch.empty_like(dgate)
    launch(
        swiglu_bwd, (triton.cdiv(dup.numel(), BLOCK),),
        compute(dy), compute(gate), compute(up), dgate, dup, dup.numel(),
        BLOCK=BLOCK, ACC=TL_DTYPE[accumulator_dtype(gate.dtype)],
    )  # fmt: skip
    return dgate.to(gate.dtype), dup.to(up.dtype)


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return forward(gate, up)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return backward(grads[0], *ctx.saved_tensors)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, for tensors of one shape and dtype. Raises KernelError."""
    out: Tensor = _SwiGlu.apply(gate, up)
    return out
