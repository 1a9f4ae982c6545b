"""Linear layer: y = x W^T + b, as matrix products of fixed tiles and fixed order.

    dX = dY W                       every row alone, the same tiles as forward
    dW = sum over rows of dY^T X    leaves in key order, a stack of partials in memory
    db = sum over rows of dY        leaves as chains, folded

A tile never depends on the number of rows and no sum is split, except at nodes of the tree. In
float32 products are exact float32 ("ieee"), not tf32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sumgrad.kernels.layout import Layout, resolve
from sumgrad.kernels.primitives import fold_leaves, make_nodes, tables
from sumgrad.kernels.runtime import (
    KIND,
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
    tl,
    triton,
)
from sumgrad.kernels.sink import Sinks, check_sinks, deliver
from sumgrad.kernels.tree import Nodes, TreeId, TreePlan, plan_tree
from torch import Tensor

BIAS_LEAF = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """Tile of a product: BM x BN results, BK deep; leaf: positions of a leaf of dW.

    weight: those of dW where they are others: its tile has a second accumulator, the tree's.
    """

    rows: int
    columns: int
    depth: int
    leaf: int
    num_warps: int = 4
    num_stages: int = 2
    weight: Tiles | None = None

    def __post_init__(self) -> None:
        sides = (self.rows, self.columns, self.depth, self.leaf)
        if any(side < 16 or side & (side - 1) for side in sides) or self.leaf % self.depth:
            raise KernelError(f"{self}: expected powers of two >= 16, leaf a multiple of depth")
        if self.weight is not None and self.weight.leaf != self.leaf:
            raise KernelError(f"{self}: expected the same leaf in `weight`")


def default_tiles(dtype: torch.dtype, leaf: int | None = None, kind: str = KIND) -> Tiles:
    """One tile for each dtype, and for the interpreter large ones: it pays by the program."""
    if kind == "interpreted":
        chosen = leaf or 256
        return Tiles(rows=128, columns=128, depth=min(128, chosen), leaf=chosen)
    if dtype in (torch.float64, torch.float32):
        return Tiles(rows=64, columns=64, depth=16, leaf=leaf or 256, num_stages=3)
    chosen = leaf or 1024
    stages = 2 if kind == "hip" else 3
    shape: dict[str, Any] = {"depth": min(64, chosen), "leaf": chosen, "num_warps": 8}
    weight = None if kind == "hip" else Tiles(rows=64, columns=256, num_stages=4, **shape)
    return Tiles(rows=128, columns=128, num_stages=stages, weight=weight, **shape)


@triton.jit(do_not_specialize=["num_rows"])
def matmul(
    a, b, bias, out, num_rows,
    N: tl.constexpr, K: tl.constexpr, TRANSPOSED: tl.constexpr, BIAS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """out (rows, N) = a (rows, K) b + bias; b is (K, N), or (N, K) if TRANSPOSED.

    K ascends in one accumulator.
    """
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    column = tl.program_id(1).to(tl.int64) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), dtype=ACC)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        left = tl.load(
            a + row[:, None] * K + k[None, :],
            mask=(row < num_rows)[:, None] & (k < K)[None, :], other=0.0,
        )  # fmt: skip
        right = tl.load(
            b + (column[None, :] * K + k[:, None] if TRANSPOSED
                 else k.to(tl.int64)[:, None] * N + column[None, :]),
            mask=(k < K)[:, None] & (column < N)[None, :], other=0.0,
        )  # fmt: skip
        acc = tl.dot(left, right, acc, input_precision="ieee", out_dtype=ACC)
    if BIAS:
        acc += tl.load(bias + column, mask=column < N, other=0.0).to(ACC)[None, :]
    inside = (row < num_rows)[:, None] & (column < N)[None, :]
    tl.store(out + row[:, None] * N + column[None, :], acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def outer_leaf(
    dy, x, row0, count, out_column, in_column, N: tl.constexpr, K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """dY^T X over one leaf: depth tiles ascending, one accumulator, those past the end skipped.

    Full tiles need no mask along the rows, which changes no bit.
    """
    acc = tl.zeros((BM, BN), dtype=ACC)
    slot = tl.arange(0, BK)
    left_at = dy + row0 * N + (slot[None, :] * N + out_column[:, None])
    right_at = x + row0 * K + (slot[:, None] * K + in_column[None, :])
    for _ in range(0, count // BK):
        left = tl.load(left_at, mask=(out_column < N)[:, None], other=0.0)
        right = tl.load(right_at, mask=(in_column < K)[None, :], other=0.0)
        acc = tl.dot(left, right, acc, input_precision="ieee", out_dtype=ACC)
        left_at += BK * N
        right_at += BK * K
    rest = count % BK
    if rest > 0:
        left = tl.load(left_at, mask=(slot < rest)[None, :] & (out_column < N)[:, None], other=0.0)
        right = tl.load(right_at, mask=(slot < rest)[:, None] & (in_column < K)[None, :], other=0.0)
        acc = tl.dot(left, right, acc, input_precision="ieee", out_dtype=ACC)
    return acc + 0.0


@triton.jit(do_not_specialize=["depth"])
def linear_dweight(
    dy, x, values, stacks, leaf_row, leaf_count, node_first, merges, depth,
    N: tl.constexpr, K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One tile of one node of dW (N, K): its leaves in key order, siblings merged on a stack.

    The stack's top stays in registers, and goes to memory when another comes on it.
    """
    node = tl.program_id(2).to(tl.int64)
    out_column = tl.program_id(0) * BM + tl.arange(0, BM)
    in_column = tl.program_id(1) * BN + tl.arange(0, BN)
    program = (node * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0)
    stack = stacks + (program + tl.program_id(0)) * depth * BM * BN
    offset = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
    first, end = tl.load(node_first + node), tl.load(node_first + node + 1)
    below = 0
    top = tl.zeros((BM, BN), dtype=ACC)
    for leaf in range(first, end):
        part = outer_leaf(
            dy, x, tl.load(leaf_row + leaf), tl.load(leaf_count + leaf), out_column, in_column,
            N, K, BM, BN, BK, ACC,
        )  # fmt: skip
        times = tl.load(merges + leaf)
        if leaf == first:
            top = part
        elif times == 0:
            tl.store(stack + below * BM * BN + offset, top)
            tl.debug_barrier()
            below += 1
            top = part
        else:
            top = top + part
            for _ in range(times - 1):
                below -= 1
                top = tl.load(stack + below * BM * BN + offset) + top
                tl.debug_barrier()
    place = node * N * K + out_column[:, None].to(tl.int64) * K + in_column[None, :]
    inside = (out_column < N)[:, None] & (in_column < K)[None, :]
    tl.store(values + place, top, mask=inside)


@triton.jit
def column_leaf(
    dy, leaves, leaf_row, leaf_count, LENGTH: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr
):
    """Column sums of one leaf's rows, positions ascending in one chain from +0."""
    leaf = tl.program_id(0).to(tl.int64)
    first = tl.load(leaf_row + leaf)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    chain = tl.zeros((BLOCK,), dtype=ACC)
    for i in range(tl.load(leaf_count + leaf)):
        chain += tl.load(dy + (first + i) * LENGTH + column, mask=column < LENGTH, other=0.0).to(
            ACC
        )
    tl.store(leaves + leaf * LENGTH + column, chain + 0.0, mask=column < LENGTH)


def column_nodes(dy: Tensor, layout: Layout, use: str, leaf: int = BIAS_LEAF) -> Nodes:
    """The nodes of the sum of dy (R, D) over valid rows: a bias's gradient, a loss's sum."""
    plan = plan_tree(layout, leaf)
    table = tables(layout, plan, dy.device)
    acc, length = accumulator_dtype(dy.dtype), dy.shape[1]
    block = min(256, block_of(length))
    leaves = torch.empty(len(plan.keys), length, dtype=acc, device=dy.device)
    launch(
        column_leaf, (len(plan.keys), triton.cdiv(length, block)),
        compute(dy), leaves, table["row"], table["count"],
        LENGTH=length, BLOCK=block, ACC=TL_DTYPE[acc],
    )  # fmt: skip
    return fold_leaves(leaves, layout, leaf, use, dy.dtype)


def product(a: Tensor, b: Tensor, bias: Tensor | None, tiles: Tiles, *, transposed: bool) -> Tensor:
    """a (R, K) b + bias (N,) -> (R, N) in a's dtype; b is (K, N), or (N, K) if transposed."""
    check_floats(**({"x": a, "weight": b} | ({} if bias is None else {"bias": bias})))
    check_shape("x", a, ("R", "K"))
    check_shape("weight", b, ("N", a.shape[1]) if transposed else (a.shape[1], "N"))
    if bias is not None:
        check_shape("bias", bias, (b.shape[0] if transposed else b.shape[1],))
    if 0 in b.shape:
        raise KernelError(f"weight: got shape {tuple(b.shape)}, expected no empty side")
    num_rows, depth = a.shape
    width = b.shape[0] if transposed else b.shape[1]
    acc = accumulator_dtype(a.dtype)
    if transposed and turns_weights(a.dtype):
        b, transposed = b.t(), False
    out = torch.empty(num_rows, width, dtype=compute_dtype(a.dtype), device=a.device)
    grid = (triton.cdiv(num_rows, tiles.rows), triton.cdiv(width, tiles.columns))
    launch(
        matmul, grid,
        compute(a), compute(b), out if bias is None else compute(bias), out, num_rows,
        N=width, K=depth, TRANSPOSED=transposed, BIAS=bias is not None,
        BM=tiles.rows, BN=tiles.columns, BK=max(16, min(tiles.depth, block_of(depth))),
        ACC=TL_DTYPE[acc], num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return out.to(a.dtype)


def turns_weights(dtype: torch.dtype) -> bool:
    """Whether a transposed weight is copied before the product: 3 to 4 times faster on an H200.

    Matrix units read 16 bits both ways; a product of wider numbers reads them one by one.
    """
    return dtype in (torch.float32, torch.float64)


def weight_nodes(dy: Tensor, x: Tensor, layout: Layout, tiles: Tiles) -> Nodes:
    """The nodes of dY^T X: (m, N, K) unrounded. dy (R, N), x (R, K)."""
    tiles = tiles.weight or tiles
    plan: TreePlan = plan_tree(layout, tiles.leaf)
    table = tables(layout, plan, x.device)
    acc = accumulator_dtype(x.dtype)
    n, k, m = dy.shape[1], x.shape[1], len(plan.nodes)
    grid = (triton.cdiv(n, tiles.rows), triton.cdiv(k, tiles.columns), m)
    values = torch.empty(m, n, k, dtype=acc, device=x.device)
    area = tiles.rows * tiles.columns
    stacks = torch.empty(grid[0] * grid[1] * m * plan.depth * area, dtype=acc, device=x.device)
    launch(
        linear_dweight, grid,
        compute(dy), compute(x), values, stacks,
        table["row"], table["count"], table["first"], table["merges"], plan.depth,
        N=n, K=k, BM=tiles.rows, BN=tiles.columns, BK=tiles.depth,
        ACC=TL_DTYPE[acc], num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    tile = (tiles.rows, tiles.columns, tiles.depth)
    return make_nodes(
        values,
        plan,
        TreeId(
            leaf=tiles.leaf, use="linear.weight", dtype=str(x.dtype), tile=tile, instruction="dot"
        ),
    )


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        layout: Layout,
        sinks: Sinks | None,
        tiles: Tiles,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layout, ctx.sinks, ctx.tiles = layout, sinks, tiles
        return product(x, weight, bias, tiles, transposed=True)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        (dy,) = grads
        dx = dweight = dbias = None
        if ctx.needs_input_grad[0]:
            dx = product(dy, weight, None, ctx.tiles, transposed=False)
        if ctx.needs_input_grad[1]:
            nodes = weight_nodes(dy, x, ctx.layout, ctx.tiles)
            dweight = deliver(nodes, "weight", ctx.sinks, weight.dtype)
        if ctx.needs_input_grad[2]:
            nodes = column_nodes(dy, ctx.layout, "linear.bias", min(BIAS_LEAF, ctx.tiles.leaf))
            dbias = deliver(nodes, "bias", ctx.sinks, weight.dtype)
        return dx, dweight, dbias, None, None, None


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    layout: Layout | None = None,
    sinks: Sinks | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """x (R, K), weight (N, K), bias (N,) or None -> (R, N) in x's dtype.

    Gradients of padding rows are dY W as dY has them; padding takes no part in dW and db. sinks:
    {"weight": Accumulator, "bias": Accumulator}. Raises KernelError, LayoutError (UnalignedCut).
    """
    names = ["weight"] if bias is None else ["weight", "bias"]
    check_sinks("linear", sinks, names)
    check_shape("x", x, ("R", "K"))
    check_shape("weight", weight, ("N", "K"))
    layout = resolve(layout, len(x))
    chosen = tiles or default_tiles(x.dtype)
    plan_tree(layout, chosen.leaf)  # so that a wrong cut is known now, not in backward
    out: Tensor = _Linear.apply(x, weight, bias, layout, sinks, chosen)
    return out
