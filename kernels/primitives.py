"""Pieces that several kernels share: sums of fixed order, and the tree's fold.

Two kinds of sum. A tree's fold is a pair tree written out, because its order is part of the
contract. The sum along a row is `tl.sum`: its order follows the layout in registers, and that
follows what the compiler was told about the arguments. So the arguments are pinned instead: every
launch passes 16-byte aligned, contiguous tensors (`runtime.compute` copies others) and no integer
that depends on the batch is specialised, hence there is one binary for each (kernel, dtype, row
length) and one order. A pair tree along the row was measured too: at rows of 4096 it spills 1 to
9 KB a thread and compiles for up to 40 s.
"""

from __future__ import annotations

import torch
from sumgrad.kernels.layout import Layout
from sumgrad.kernels.runtime import launch, tl, triton
from sumgrad.kernels.tree import Nodes, TreeId, TreePlan, plan_tree
from torch import Tensor

FOLD_BLOCK = 256


@triton.constexpr_function
def levels(width):
    """log2 of a power of two."""
    return width.bit_length() - 1


@triton.jit
def pair_sum(x, WIDTH: tl.constexpr):
    """Sum over the last axis of (ROWS, WIDTH): neighbours, then those of neighbours."""
    ROWS: tl.constexpr = x.shape[0]
    for level in tl.static_range(levels(WIDTH)):
        left, right = tl.split(tl.reshape(x, (ROWS, WIDTH >> (level + 1), 2)))
        x = left + right
    return tl.reshape(x, (ROWS,))


@triton.jit
def add_rows(chain, terms, ROWS: tl.constexpr):
    """chain (BLOCK,) + the rows of terms (ROWS, BLOCK), one after another.

    A row is taken out of the tile by adding zeros to it, which is exact; with ROWS = 1, as
    compiled, nothing is added.
    """
    if ROWS == 1:
        chain += tl.reshape(terms, chain.shape)
    else:
        slot = tl.arange(0, ROWS)[:, None]
        for i in tl.static_range(ROWS):
            chain += tl.sum(tl.where(slot == i, terms, 0.0), axis=0)
    return chain


@triton.jit(do_not_specialize=["num_columns"])
def fold_stage(children, table, out, num_columns, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    """out[i] = pair tree over the children named in table[i]; an empty slot is +0."""
    node = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(table + node * SLOTS + tl.arange(0, SLOTS)).to(tl.int64)
    there = (slot >= 0)[None, :] & (column < num_columns)[:, None]
    values = tl.load(
        children + slot[None, :] * num_columns + column[:, None], mask=there, other=0.0
    )
    tl.store(out + node * num_columns + column, pair_sum(values, SLOTS), mask=column < num_columns)


@triton.jit
def push(value, top, merges, stack, stride, offset, mask):
    """Put a partial on a stack in memory and merge its top `merges` times; returns the new top.

    The barrier keeps a store and the load that follows it in order: they may use other threads.
    """
    for _ in range(merges):
        top -= 1
        value = tl.load(stack + top * stride + offset, mask=mask, other=0.0) + value
        tl.debug_barrier()
    tl.store(stack + top * stride + offset, value, mask=mask)
    tl.debug_barrier()
    return top + 1


def empty_rows(x: Tensor, layout: Layout, dtype: torch.dtype) -> Tensor:
    """Memory for a gradient of x (R, D), whose valid rows will be written: 0 in padding rows."""
    make = torch.empty_like if layout.num_tokens == len(x) else torch.zeros_like
    return make(x, dtype=dtype, memory_format=torch.contiguous_format)


def tables(layout: Layout, plan: TreePlan, device: torch.device) -> dict[str, Tensor]:
    """A plan's tables on a device, made once."""

    def make() -> dict[str, Tensor]:
        arrays = {name: getattr(plan, name) for name in ("row", "count", "first", "merges")}
        arrays |= {f"stage{i}": stage for i, stage in enumerate(plan.stages)}
        return {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}

    found: dict[str, Tensor] = layout.derived(("tables", plan.leaf, device), make)
    return found


def fold(leaves: Tensor, layout: Layout, plan: TreePlan, tree: TreeId) -> Nodes:
    """Leaves (n, *shape) in key order -> the plan's nodes."""
    shape = leaves.shape[1:]
    current = leaves.flatten(1)
    table = tables(layout, plan, leaves.device)
    for i, stage in enumerate(plan.stages):
        out = torch.empty(len(stage), current.shape[1], dtype=leaves.dtype, device=leaves.device)
        grid = (len(stage), triton.cdiv(current.shape[1], FOLD_BLOCK))
        launch(
            fold_stage, grid, current, table[f"stage{i}"], out, current.shape[1],
            SLOTS=stage.shape[1], BLOCK=FOLD_BLOCK,
        )  # fmt: skip
        current = out
    return make_nodes(current.reshape(-1, *shape), plan, tree)


def fold_leaves(leaves: Tensor, layout: Layout, leaf: int, use: str, dtype: torch.dtype) -> Nodes:
    """Leaves that are chains over `leaf` positions, folded. use, dtype: see TreeId."""
    tree = TreeId(leaf=leaf, use=use, dtype=str(dtype))
    return fold(leaves, layout, plan_tree(layout, leaf), tree)


def make_nodes(values: Tensor, plan: TreePlan, tree: TreeId) -> Nodes:
    """Values (m, *shape) of the plan's nodes."""
    return Nodes(
        tree=tree,
        num_samples=plan.num_samples,
        keys=plan.nodes,
        empties=plan.empties,
        values=values,
    )
