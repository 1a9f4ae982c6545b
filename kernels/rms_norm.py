"""RMS norm: y = x / sqrt(mean(x^2) + eps) * weight, row by row.

With r = 1 / sqrt(mean(x^2) + eps) and xh = x r:
    dx      = r (dy w - xh mean(dy w xh))
    dweight = sum over rows of dy xh

Two backward modes for dweight:
    tree        a leaf is a chain over its positions, leaves fold in the canonical tree: invariant
    last_block  every block writes its partial, fences and bumps a counter; the last to arrive folds
                all partials 0..n-1 in the same launch (up to rows of 8192, above that in a second
                launch). Deterministic, not invariant: the partials follow the number of rows.
"""

from __future__ import annotations

from typing import Any

import torch
from sumgrad.kernels.layout import Layout, resolve
from sumgrad.kernels.primitives import add_rows, empty_rows, fold_leaves, tables
from sumgrad.kernels.runtime import (
    INTERPRETED,
    TL_DTYPE,
    KernelError,
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
FUSED_ROW = 8192
MODES = ("tree", "last_block")


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_fwd(
    x, weight, y, rstd, num_rows, EPS: tl.constexpr,
    LENGTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """y and rstd of ROWS rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < num_rows)[:, None] & (column < LENGTH)[None, :]
    place = row[:, None] * LENGTH + column[None, :]
    value = tl.load(x + place, mask=inside, other=0.0).to(ACC)
    scale = tl.load(weight + column, mask=column < LENGTH, other=0.0).to(ACC)
    mean = tl.sum(value * value, axis=1) / LENGTH
    inverse = 1.0 / tl.sqrt(mean + EPS)
    tl.store(rstd + row, inverse, mask=row < num_rows)
    out = value * inverse[:, None] * scale[None, :]
    tl.store(y + place, out.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _rms_rows(
    dy, x, scale, rstd, row, there, LENGTH: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr
):
    """dx (ROWS, BLOCK) of some rows, and dy * xh for dweight; rows not there give 0."""
    column = tl.arange(0, BLOCK)[None, :]
    inside = there[:, None] & (column < LENGTH)
    value = tl.load(x + row[:, None] * LENGTH + column, mask=inside, other=0.0).to(ACC)
    seed = tl.load(dy + row[:, None] * LENGTH + column, mask=inside, other=0.0).to(ACC)
    inverse = tl.load(rstd + row, mask=there, other=0.0)[:, None]
    unit = value * inverse
    scaled = seed * scale
    mean = tl.sum(scaled * unit, axis=1) / LENGTH
    return inverse * (scaled - unit * mean[:, None]), seed * unit


@triton.jit
def rms_norm_bwd_leaf(
    dy, x, weight, rstd, dx, leaves, leaf_row, leaf_count,
    LENGTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """One leaf: dx of its rows, ROWS at a time, and its dweight as one chain from +0."""
    leaf = tl.program_id(0).to(tl.int64)
    first = tl.load(leaf_row + leaf)
    count = tl.load(leaf_count + leaf)
    column = tl.arange(0, BLOCK)[None, :]
    scale = tl.load(weight + column, mask=column < LENGTH, other=0.0).to(ACC)
    chain = tl.zeros((BLOCK,), dtype=ACC)
    for start in tl.range(0, count, ROWS, num_stages=STAGES):
        slot = start + tl.arange(0, ROWS)
        row, there = first + slot, slot < count
        dx_rows, terms = _rms_rows(dy, x, scale, rstd, row, there, LENGTH, BLOCK, ACC)
        place = row[:, None] * LENGTH + column
        inside = there[:, None] & (column < LENGTH)
        tl.store(dx + place, dx_rows.to(dx.dtype.element_ty), mask=inside)
        chain = add_rows(chain, terms, ROWS)
    tl.store(leaves + leaf * LENGTH + column, (chain + 0.0)[None, :], mask=column < LENGTH)


@triton.jit(do_not_specialize=["num_rows", "num_blocks"])
def rms_norm_bwd_last_block(
    dy, x, weight, rstd, dx, partials, dweight, counter, num_rows, num_blocks,
    FUSED: tl.constexpr, LENGTH: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Rows block, block + num_blocks, ...; the last block to arrive folds all partials."""
    block = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    inside = column < LENGTH
    scale = tl.load(weight + column, mask=inside, other=0.0).to(ACC)
    chain = tl.zeros((1, BLOCK), dtype=ACC)
    for i in range(0, (num_rows - tl.program_id(0) + num_blocks - 1) // num_blocks):
        row = block + i * num_blocks + tl.zeros((1,), dtype=tl.int64)
        dx_row, term = _rms_rows(dy, x, scale, rstd, row, row >= 0, LENGTH, BLOCK, ACC)
        tl.store(dx + row[:, None] * LENGTH + column, dx_row.to(dx.dtype.element_ty), mask=inside)
        chain += term
    tl.store(partials + block * LENGTH + column, chain, mask=inside)
    if FUSED:
        tl.debug_barrier()
        arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
        if arrived == num_blocks - 1:
            tl.debug_barrier()
            total = tl.zeros((1, BLOCK), dtype=ACC)
            for i in range(num_blocks):
                total += tl.load(
                    partials + i * LENGTH + column,
                    mask=inside, other=0.0, cache_modifier=".cg",
                )  # fmt: skip
            tl.store(dweight + column, total, mask=inside)


@triton.jit(do_not_specialize=["num_blocks"])
def sum_partials(partials, dweight, num_blocks, LENGTH: tl.constexpr, BLOCK: tl.constexpr):
    """The second stage of last_block above FUSED_ROW: fixed order 0..n-1, BLOCK columns."""
    column = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=dweight.dtype.element_ty)
    for i in range(num_blocks):
        total += tl.load(partials + i * LENGTH + column, mask=column < LENGTH, other=0.0)
    tl.store(dweight + column, total, mask=column < LENGTH)


def forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """y in x's dtype and rstd (rows,) in the accumulator's. Raises KernelError."""
    check_floats(x=x, weight=weight)
    check_shape("x", x, ("R", "D"))
    check_row("x", x.shape[1])
    check_shape("weight", weight, (x.shape[1],))
    check_eps(eps)
    num_rows, length = x.shape
    block = block_of(length)
    rows = rows_per_program(block)
    y = torch.empty(x.shape, dtype=compute_dtype(x.dtype), device=x.device)
    rstd = torch.empty(num_rows, dtype=accumulator_dtype(x.dtype), device=x.device)
    launch(
        rms_norm_fwd, (triton.cdiv(num_rows, rows),),
        compute(x), compute(weight), y, rstd, num_rows, eps,
        LENGTH=length, ROWS=rows, BLOCK=block, ACC=TL_DTYPE[rstd.dtype], num_warps=warps_for(block),
    )  # fmt: skip
    return y.to(x.dtype), rstd


def num_partials(num_rows: int, device: torch.device) -> int:
    """Partials of last_block: two for each multiprocessor; interpreted, 1 to 8."""
    if INTERPRETED:
        return max(1, min(8, num_rows // 8))
    return max(1, min(num_rows, 2 * torch.cuda.get_device_properties(device).multi_processor_count))


def _backward_last_block(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """dx, and dweight in the accumulator's dtype."""
    num_rows, length = x.shape
    block, blocks = block_of(length), num_partials(num_rows, x.device)
    dx = torch.empty(x.shape, dtype=compute_dtype(x.dtype), device=x.device)
    partials = torch.empty(blocks, length, dtype=rstd.dtype, device=x.device)
    dweight = torch.empty(length, dtype=rstd.dtype, device=x.device)
    counter = torch.zeros(1, dtype=torch.int32, device=x.device)
    fused = length <= FUSED_ROW
    launch(
        rms_norm_bwd_last_block, (blocks,),
        compute(dy), compute(x), compute(weight), rstd, dx, partials, dweight, counter,
        num_rows, blocks,
        FUSED=fused, LENGTH=length, BLOCK=block, ACC=TL_DTYPE[rstd.dtype],
        num_warps=warps_for(block),
    )  # fmt: skip
    if not fused:
        grid = (triton.cdiv(length, 256),)
        launch(sum_partials, grid, partials, dweight, blocks, LENGTH=length, BLOCK=256)
    return dx, dweight


def backward(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, layout: Layout, leaf: int
) -> tuple[Tensor, Tensor]:
    """dx in x's dtype, and dweight's leaves (n, D) in the accumulator's."""
    length = x.shape[1]
    block, plan = block_of(length), plan_tree(layout, leaf)
    table = tables(layout, plan, x.device)
    dx = empty_rows(x, layout, compute_dtype(x.dtype))
    leaves = torch.empty(len(plan.keys), length, dtype=rstd.dtype, device=x.device)
    launch(
        rms_norm_bwd_leaf, (len(plan.keys),),
        compute(dy), compute(x), compute(weight), rstd, dx, leaves, table["row"], table["count"],
        LENGTH=length, ROWS=rows_of_leaf(leaf), BLOCK=block, STAGES=stages_of(x.dtype),
        ACC=TL_DTYPE[rstd.dtype],
        num_warps=warps_for(block),
    )  # fmt: skip
    return dx.to(x.dtype), leaves


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        eps: float,
        layout: Layout,
        sinks: Sinks | None,
        mode: str,
        leaf: int,
    ) -> Tensor:
        y, rstd = forward(x, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        ctx.layout, ctx.sinks, ctx.mode, ctx.leaf = layout, sinks, mode, leaf
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight, rstd = ctx.saved_tensors
        (dy,) = grads
        if ctx.mode == "last_block":
            dx, dweight = _backward_last_block(dy, x, weight, rstd)
            return dx.to(x.dtype), dweight.to(weight.dtype), None, None, None, None, None
        dx, leaves = backward(dy, x, weight, rstd, ctx.layout, ctx.leaf)
        delivered = None
        if ctx.needs_input_grad[1]:
            nodes = fold_leaves(leaves, ctx.layout, ctx.leaf, "rms_norm.weight", x.dtype)
            delivered = deliver(nodes, "weight", ctx.sinks, weight.dtype)
        return dx, delivered, None, None, None, None, None


def rms_norm(
    x: Tensor,
    weight: Tensor,
    *,
    eps: float = 1e-6,
    layout: Layout | None = None,
    sinks: Sinks | None = None,
    mode: str = "tree",
    leaf: int = LEAF,
) -> Tensor:
    """x (R, D), weight (D,) -> (R, D) in x's dtype; float32 inside for 16-bit inputs.

    layout: which (sample, position) each row is (default: the rows are one sample); gradients of
    padding rows are 0. sinks: {"weight": Accumulator}; then weight.grad stays untouched. leaf:
    positions of a leaf. Raises KernelError, LayoutError (UnalignedCut).
    """
    if mode not in MODES or (mode == "last_block" and sinks is not None):
        raise KernelError(f"mode: got {mode!r}, expected tree, or last_block without sinks")
    check_sinks("rms_norm", sinks, ["weight"])
    check_shape("x", x, ("R", "D"))
    layout = resolve(layout, len(x))
    plan_tree(layout, leaf)  # so that a wrong cut is known now, not in backward
    if mode == "last_block" and layout.num_tokens != len(x):
        raise KernelError("layout: last_block sums physical rows and knows no padding; use tree")
    out: Tensor = _RmsNorm.apply(x, weight, eps, layout, sinks, mode, leaf)
    return out
