"""Rotary position embedding: each pair (x_i, x_{i + D/2}) turned by the angle p base**(-2i / D).

    y_i = x_i cos - x_{i+D/2} sin          y_{i+D/2} = x_{i+D/2} cos + x_i sin

Backward turns back. Cosines and sines are made once, in float64, from the position in the sample.
"""

from __future__ import annotations

from typing import Any

import torch
from sumgrad.kernels.layout import Layout, resolve
from sumgrad.kernels.runtime import (
    TL_DTYPE,
    KernelError,
    accumulator_dtype,
    block_of,
    check_floats,
    check_shape,
    compute,
    compute_dtype,
    first_order,
    launch,
    rows_per_program,
    tl,
    triton,
)
from torch import Tensor


@triton.jit(do_not_specialize=["num_rows"])
def rope_turn(
    x, y, cosine, sine, position, num_rows, SIGN: tl.constexpr,
    HEADS: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """ROWS rows of one head; SIGN -1 turns back. Padding rows (position -1) are turned by 0."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1).to(tl.int64)
    i = tl.arange(0, WIDE)
    inside = (row < num_rows)[:, None] & (i < HALF)[None, :]
    at = tl.maximum(tl.load(position + row, mask=row < num_rows, other=0), 0)
    c = tl.load(cosine + at[:, None] * HALF + i[None, :], mask=inside, other=0.0)
    s = tl.load(sine + at[:, None] * HALF + i[None, :], mask=inside, other=0.0) * SIGN
    place = (row[:, None] * HEADS + head) * (2 * HALF) + i[None, :]
    low = tl.load(x + place, mask=inside, other=0.0).to(ACC)
    high = tl.load(x + place + HALF, mask=inside, other=0.0).to(ACC)
    tl.store(y + place, (low * c - high * s).to(y.dtype.element_ty), mask=inside)
    tl.store(y + place + HALF, (high * c + low * s).to(y.dtype.element_ty), mask=inside)


def _angles(
    layout: Layout, half: int, base: float, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Cosines and sines (T, D / 2) of every position, and each row's position (R,)."""

    def make() -> tuple[Tensor, Tensor, Tensor]:
        length = max((p.stop for p in layout.pieces), default=0)
        rate = base ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = torch.arange(max(length, 1), dtype=torch.float64)[:, None] * rate
        return (
            angle.cos().to(dtype).to(device),
            angle.sin().to(dtype).to(device),
            layout.positions.to(device),
        )

    found: tuple[Tensor, Tensor, Tensor] = layout.derived(("rope", half, base, dtype, device), make)
    return found


def _turn(x: Tensor, layout: Layout, base: float, sign: float) -> Tensor:
    num_rows, heads, head = x.shape
    acc, half = accumulator_dtype(x.dtype), head // 2
    wide = block_of(half)
    rows = rows_per_program(wide)
    cosine, sine, position = _angles(layout, half, base, acc, x.device)
    y = torch.empty(x.shape, dtype=compute_dtype(x.dtype), device=x.device)
    launch(
        rope_turn, (triton.cdiv(num_rows, rows), heads),
        compute(x), y, cosine, sine, position, num_rows,
        SIGN=sign, HEADS=heads, HALF=half, ROWS=rows, WIDE=wide, ACC=TL_DTYPE[acc],
    )  # fmt: skip
    return y.to(x.dtype)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: Layout, base: float) -> Tensor:
        ctx.layout, ctx.base = layout, base
        return _turn(x, layout, base, 1.0)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _turn(grads[0], ctx.layout, ctx.base, -1.0), None, None


def rope(x: Tensor, *, layout: Layout | None = None, base: float = 10000.0) -> Tensor:
    """x (R, H, D), D even -> the same shape, each row turned by its position in its sample.

    layout: where each row's position comes from (default: the rows are one sample). Raises
    KernelError, LayoutError.
    """
    check_floats(x=x)
    check_shape("x", x, ("R", "H", "D"))
    if x.shape[2] % 2 or not 2 <= x.shape[2] <= 1024:
        raise KernelError(f"x: got a head of {x.shape[2]} elements, expected an even 2 to 1024")
    out: Tensor = _Rope.apply(x, resolve(layout, len(x)), base)
    return out
