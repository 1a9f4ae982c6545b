"""Layer norm: y = (x - mean(x)) / sqrt(var(x) + eps) * gamma + beta, row by row.

Two-pass variance mean((x - mean)^2), never E[x^2] - E[x]^2. The mean is kept as two numbers, high +
low: high is rounded, low is the mean of x - high, and x - high - low is right even where a row's
offset is 10^4 times its spread. With s = 1 / sqrt(var + eps),
xh = (x - mean) s and dxh = dy gamma:
    dx     = (s / D) (D dxh - sum(dxh) - xh sum(dxh xh))
    dgamma = sum over rows of dy xh          dbeta = sum over rows of dy

The derivation, its stability and its cost are in docs/layer_norm.md.
"""

from __future__ import annotations

from typing import Any

import torch
from sumgrad.kernels.layout import Layout, resolve
from sumgrad.kernels.primitives import add_rows, empty_rows, fold_leaves, tables
from sumgrad.kernels.runtime import (
    TL_DTYPE,
    accumulator_dtype,
    block_of,
    check_eps,
    check_floats,
    check_row,
    check_shape,
    compute,
    compute_dtype,
    first_order,
    launch,
    rows_of_leaf,
    rows_per_program,
    stages_of,
    tl,
    triton,
    warps_for,
)
from sumgrad.kernels.sink import Sinks, check_sinks, deliver
from sumgrad.kernels.tree import plan_tree
from torch import Tensor

LEAF = 32


@triton.jit(do_not_specialize=["num_rows"])
def layer_norm_fwd(
    x, gamma, beta, y, mean, low, rstd, num_rows, EPS: tl.constexpr,
    LENGTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """y, both parts of the mean, and rstd; the row stays in registers, so it is read once."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < num_rows)[:, None] & (column < LENGTH)[None, :]
    place = row[:, None] * LENGTH + column[None, :]
    value = tl.load(x + place, mask=inside, other=0.0).to(ACC)
    scale = tl.load(gamma + column, mask=column < LENGTH, other=0.0).to(ACC)
    shift = tl.load(beta + column, mask=column < LENGTH, other=0.0).to(ACC)
    middle = tl.sum(value, axis=1) / LENGTH
    centred = tl.where(inside, value - middle[:, None], 0.0)
    rest = tl.sum(centred, axis=1) / LENGTH
    centred = tl.where(inside, centred - rest[:, None], 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(centred * centred, axis=1) / LENGTH + EPS)
    tl.store(mean + row, middle, mask=row < num_rows)
    tl.store(low + row, rest, mask=row < num_rows)
    tl.store(rstd + row, inverse, mask=row < num_rows)
    out = centred * inverse[:, None] * scale[None, :] + shift[None, :]
    tl.store(y + place, out.to(y.dtype.element_ty), mask=inside)


@triton.jit
def layer_norm_bwd_leaf(
    dy, x, gamma, mean, low, rstd, dx, gamma_leaves, beta_leaves, leaf_row, leaf_count,
    LENGTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """One leaf: dx of its rows, ROWS at a time; its dgamma and dbeta as chains from +0."""
    leaf = tl.program_id(0).to(tl.int64)
    first = tl.load(leaf_row + leaf)
    count = tl.load(leaf_count + leaf)
    column = tl.arange(0, BLOCK)[None, :]
    scale = tl.load(gamma + column, mask=column < LENGTH, other=0.0).to(ACC)
    gamma_chain = tl.zeros((BLOCK,), dtype=ACC)
    beta_chain = tl.zeros((BLOCK,), dtype=ACC)
    for start in tl.range(0, count, ROWS, num_stages=STAGES):
        slot = start + tl.arange(0, ROWS)
        row, there = first + slot, slot < count
        place = row[:, None] * LENGTH + column
        inside = there[:, None] & (column < LENGTH)
        value = tl.load(x + place, mask=inside, other=0.0).to(ACC)
        seed = tl.load(dy + place, mask=inside, other=0.0).to(ACC)
        inverse = tl.load(rstd + row, mask=there, other=0.0)[:, None]
        middle = tl.load(mean + row, mask=there, other=0.0)[:, None]
        rest = tl.load(low + row, mask=there, other=0.0)[:, None]
        unit = tl.where(inside, (value - middle - rest) * inverse, 0.0)
        scaled = seed * scale
        along = tl.sum(scaled * unit, axis=1)[:, None] / LENGTH
        level = tl.sum(scaled, axis=1)[:, None] / LENGTH
        dx_rows = inverse * (scaled - level - unit * along)
        tl.store(dx + place, dx_rows.to(dx.dtype.element_ty), mask=inside)
        gamma_chain = add_rows(gamma_chain, seed * unit, ROWS)
        beta_chain = add_rows(beta_chain, seed, ROWS)
    place = leaf * LENGTH + column
    tl.store(gamma_leaves + place, (gamma_chain + 0.0)[None, :], mask=column < LENGTH)
    tl.store(beta_leaves + place, (beta_chain + 0.0)[None, :], mask=column < LENGTH)


def forward(
    x: Tensor, gamma: Tensor, beta: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y in x's dtype; both parts of the mean, and rstd (rows,), in the accumulator's."""
    check_floats(x=x, weight=gamma, bias=beta)
    check_shape("x", x, ("R", "D"))
    check_row("x", x.shape[1])
    check_shape("weight", gamma, (x.shape[1],))
    check_shape("bias", beta, (x.shape[1],))
    check_eps(eps)
    num_rows, length = x.shape
    block = block_of(length)
    rows = rows_per_program(block)
    acc = accumulator_dtype(x.dtype)
    y = torch.empty(x.shape, dtype=compute_dtype(x.dtype), device=x.device)
    mean, low, rstd = (torch.empty(num_rows, dtype=acc, device=x.device) for _ in range(3))
    launch(
        layer_norm_fwd, (triton.cdiv(num_rows, rows),),
        compute(x), compute(gamma), compute(beta), y, mean, low, rstd, num_rows, eps,
        LENGTH=length, ROWS=rows, BLOCK=block, ACC=TL_DTYPE[acc], num_warps=warps_for(block),
    )  # fmt: skip
    return y.to(x.dtype), mean, low, rstd


def backward(
    dy: Tensor,
    x: Tensor,
    gamma: Tensor,
    stats: tuple[Tensor, Tensor, Tensor],
    layout: Layout,
    leaf: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """dx in x's dtype, and the leaves (n, D) of dgamma and dbeta. stats: mean, low, rstd."""
    length = x.shape[1]
    block, plan = block_of(length), plan_tree(layout, leaf)
    table = tables(layout, plan, x.device)
    dx = empty_rows(x, layout, compute_dtype(x.dtype))
    num_leaves, acc = len(plan.keys), stats[0].dtype
    gamma_leaves = torch.empty(num_leaves, length, dtype=acc, device=x.device)
    beta_leaves = torch.empty_like(gamma_leaves)
    launch(
        layer_norm_bwd_leaf, (num_leaves,),
        compute(dy), compute(x), compute(gamma), *stats, dx, gamma_leaves, beta_leaves,
        table["row"], table["count"],
        LENGTH=length, ROWS=rows_of_leaf(leaf), BLOCK=block, STAGES=stages_of(x.dtype),
        ACC=TL_DTYPE[acc],
        num_warps=warps_for(block),
    )  # fmt: skip
    return dx.to(x.dtype), gamma_leaves, beta_leaves


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gamma: Tensor,
        beta: Tensor,
        eps: float,
        layout: Layout,
        sinks: Sinks | None,
        leaf: int,
    ) -> Tensor:
        y, *stats = forward(x, gamma, beta, eps)
        ctx.save_for_backward(x, gamma, *stats)
        ctx.layout, ctx.sinks, ctx.leaf = layout, sinks, leaf
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, gamma, *stats = ctx.saved_tensors
        dx, *leaves = backward(grads[0], x, gamma, tuple(stats), ctx.layout, ctx.leaf)
        out = [
            deliver(
                fold_leaves(part, ctx.layout, ctx.leaf, f"layer_norm.{name}", x.dtype),
                name,
                ctx.sinks,
                gamma.dtype,
            )
            if wanted
            else None
            for name, part, wanted in zip(
                ("weight", "bias"), leaves, ctx.needs_input_grad[1:3], strict=True
            )
        ]
        return dx, *out, None, None, None, None


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    eps: float = 1e-5,
    layout: Layout | None = None,
    sinks: Sinks | None = None,
    leaf: int = LEAF,
) -> Tensor:
    """x (R, D), weight (gamma) and bias (beta) (D,) -> (R, D) in x's dtype.

    layout, leaf: as for rms_norm. sinks: {"weight": Accumulator, "bias": Accumulator}. Raises
    KernelError, LayoutError (UnalignedCut).
    """
    check_sinks("layer_norm", sinks, ["weight", "bias"])
    check_shape("x", x, ("R", "D"))
    layout = resolve(layout, len(x))
    plan_tree(layout, leaf)  # so that a wrong cut is known now, not in backward
    out: Tensor = _LayerNorm.apply(x, weight, bias, eps, layout, sinks, leaf)
    return out
