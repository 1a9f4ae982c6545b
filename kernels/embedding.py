"""Embedding: y[r] = weight[token[r]], and the sum that flows back into each token's row.

    dweight[t] = sum of dy over the positions whose token is t

Occurrences are sorted by (node, token, sample, position); each token's are added by the tree: a
chain within a leaf, leaves merged as siblings. A token that does not occur is +0, not EMPTY.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sumgrad.kernels.layout import Layout, resolve
from sumgrad.kernels.primitives import make_nodes, push
from sumgrad.kernels.runtime import (
    INTERPRETED,
    TL_DTYPE,
    KernelError,
    accumulator_dtype,
    block_of,
    check_floats,
    check_row,
    check_shape,
    compute,
    compute_dtype,
    first_order,
    launch,
    rows_per_program,
    tl,
    triton,
)
from sumgrad.kernels.sink import Sinks, check_sinks, deliver
from sumgrad.kernels.tree import Nodes, TreeId, TreePlan, plan_tree, stack_schedule
from torch import Tensor

COLUMNS = 4096 if INTERPRETED else 256


def default_leaf(dtype: torch.dtype) -> int:
    """Positions of a leaf: as for products."""
    return 1024 if dtype in (torch.bfloat16, torch.float16) else 256


@triton.jit(do_not_specialize=["num_rows"])
def embedding_fwd(
    weight, tokens, position, y, num_rows,
    LENGTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ROWS rows; padding (position -1) reads nothing and is +0."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    valid = tl.load(position + row, mask=row < num_rows, other=-1) >= 0
    token = tl.load(tokens + row, mask=valid, other=0)
    inside = (column < LENGTH)[None, :]
    value = tl.load(
        weight + token[:, None] * LENGTH + column[None, :], mask=valid[:, None] & inside, other=0.0
    )
    place = row[:, None] * LENGTH + column[None, :]
    tl.store(y + place, value.to(y.dtype.element_ty), mask=(row < num_rows)[:, None] & inside)


@triton.jit(do_not_specialize=["depth"])
def embedding_dweight(
    dy, values, stacks, segment_first, segment_place, rows, merges, depth,
    LENGTH: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One token of one node: its occurrences in key order; merges is -1 inside a leaf."""
    segment = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < LENGTH
    stack = stacks + (segment * tl.num_programs(1) + tl.program_id(1)) * depth * BLOCK
    offset = tl.arange(0, BLOCK)
    chain = tl.zeros((BLOCK,), dtype=ACC)
    top = 0
    for i in range(tl.load(segment_first + segment), tl.load(segment_first + segment + 1)):
        row = tl.load(rows + i)
        chain += tl.load(dy + row * LENGTH + column, mask=inside, other=0.0).to(ACC)
        after = tl.load(merges + i)
        if after >= 0:
            top = push(chain + 0.0, top, after, stack, BLOCK, offset, offset >= 0)
            chain = tl.zeros((BLOCK,), dtype=ACC)
    place = tl.load(segment_place + segment) * LENGTH + column
    tl.store(values + place, tl.load(stack + offset), mask=inside)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Occurrences:
    """first: (segments + 1,); place: node * V + token of each segment; rows and merges: (n,)."""

    first: np.ndarray
    place: np.ndarray
    rows: np.ndarray
    merges: np.ndarray
    depth: int


def _occurrences(
    tokens: np.ndarray, layout: Layout, plan: TreePlan, vocabulary: int
) -> _Occurrences:
    """Sort the valid rows into (node, token) segments, and say when each stack merges."""
    leaf_of = np.repeat(np.arange(len(plan.keys)), plan.count)
    starts = np.repeat(plan.row - (np.cumsum(plan.count) - plan.count), plan.count)
    rows = starts + np.arange(len(leaf_of))
    node_of = np.searchsorted(plan.first, leaf_of, side="right") - 1
    place = node_of * vocabulary + tokens[rows]
    order = np.argsort(place, kind="stable")  # rows are in key order already
    place, rows, leaf_of = place[order], rows[order], leaf_of[order]
    new_segment = np.ones(len(place), dtype=bool)
    new_segment[1:] = place[1:] != place[:-1]
    ends_leaf = np.ones(len(place), dtype=bool)
    ends_leaf[:-1] = new_segment[1:] | (leaf_of[1:] != leaf_of[:-1])
    first = np.append(np.flatnonzero(new_segment), len(place))
    keys = plan.keys[leaf_of[ends_leaf]].tolist()
    leaf_first = np.append(np.cumsum(ends_leaf) - ends_leaf, ends_leaf.sum())[first].tolist()
    schedule, depth = stack_schedule(keys, leaf_first)
    merges = np.full(len(place), -1, dtype=np.int32)
    merges[ends_leaf] = schedule
    return _Occurrences(first=first, place=place[first[:-1]], rows=rows, merges=merges, depth=depth)


def embedding_nodes(
    dy: Tensor, tokens: Tensor, vocabulary: int, layout: Layout, leaf: int
) -> Nodes:
    """The nodes of dweight: (m, V, D) unrounded."""
    plan = plan_tree(layout, leaf)
    found = _occurrences(tokens.cpu().numpy(), layout, plan, vocabulary)
    acc, length = accumulator_dtype(dy.dtype), dy.shape[1]
    block = min(COLUMNS, block_of(length))
    values = torch.zeros(len(plan.nodes), vocabulary, length, dtype=acc, device=dy.device)
    grid = (len(found.place), triton.cdiv(length, block))
    stacks = torch.empty(grid[0] * grid[1] * found.depth * block, dtype=acc, device=dy.device)
    first, place, rows, merges = (
        torch.from_numpy(t).to(dy.device)
        for t in (found.first, found.place, found.rows, found.merges)
    )
    launch(
        embedding_dweight, grid,
        compute(dy), values, stacks, first, place, rows, merges, found.depth,
        LENGTH=length, BLOCK=block, ACC=TL_DTYPE[acc],
    )  # fmt: skip
    return make_nodes(
        values,
        plan,
        TreeId(leaf=leaf, use="embedding.weight", dtype=str(dy.dtype), instruction="one-hot chain"),
    )


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, tokens: Tensor, layout: Layout, sinks: Sinks | None, leaf: int
    ) -> Tensor:
        num_rows, length = len(tokens), weight.shape[1]
        block = block_of(length)
        rows = rows_per_program(block)
        y = torch.empty(num_rows, length, dtype=compute_dtype(weight.dtype), device=weight.device)
        launch(
            embedding_fwd, (triton.cdiv(num_rows, rows),),
            compute(weight), compute(tokens), layout.positions.to(weight.device), y, num_rows,
            LENGTH=length, ROWS=rows, BLOCK=block,
        )  # fmt: skip
        ctx.save_for_backward(tokens)
        ctx.shape, ctx.dtype = weight.shape, weight.dtype
        ctx.layout, ctx.sinks, ctx.leaf = layout, sinks, leaf
        return y.to(weight.dtype)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (tokens,) = ctx.saved_tensors
        nodes = embedding_nodes(grads[0], tokens, ctx.shape[0], ctx.layout, ctx.leaf)
        return deliver(nodes, "weight", ctx.sinks, ctx.dtype), None, None, None, None


def check_tokens(name: str, tokens: Tensor, num_rows: int, limit: int, counted: Tensor) -> Tensor:
    """int64, contiguous; ids of the rows in `counted` (bool) within 0 to limit - 1."""
    if tokens.dtype not in (torch.int64, torch.int32):
        raise KernelError(f"{name}: got {tokens.dtype}, expected int64 or int32")
    check_shape(name, tokens, (num_rows,))
    ids = tokens.to(torch.int64).contiguous()
    wrong = counted.to(ids.device) & ((ids < 0) | (ids >= limit))
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise KernelError(f"{name}[{row}]: got {int(ids[row])}, expected 0 to {limit - 1}")
    return ids


def embedding(
    tokens: Tensor,
    weight: Tensor,
    *,
    layout: Layout | None = None,
    sinks: Sinks | None = None,
    leaf: int | None = None,
) -> Tensor:
    """tokens (R,) int, weight (V, D) -> (R, D) in weight's dtype. Padding rows are 0, any id.

    sinks: {"weight": Accumulator}. Raises KernelError (an id out of range too), LayoutError.
    """
    check_floats(weight=weight)
    check_shape("weight", weight, ("V", "D"))
    check_row("weight", weight.shape[1])
    if tokens.device != weight.device:
        raise KernelError(f"tokens on {tokens.device}, weight on {weight.device}")
    layout = resolve(layout, len(tokens))
    ids = check_tokens("tokens", tokens, len(tokens), weight.shape[0], layout.positions >= 0)
    chosen = leaf or default_leaf(weight.dtype)
    check_sinks("embedding", sinks, ["weight"])
    plan_tree(layout, chosen)  # so that a wrong cut is known now, not in backward
    out: Tensor = _Embedding.apply(weight, ids, layout, sinks, chosen)
    return out
