"""Cross entropy as a SUM and a count: loss = sum over counted rows of lse(logits) - logits[target].

    dlogits = (softmax(logits) - one_hot(target)) * dloss, 0 for rows that do not count

Rows alone over blocks of the vocabulary of fixed size; the sum over rows by the canonical tree. No
mean: whoever averages divides by the honest global count, where the loss seeds its gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from sumgrad.kernels.embedding import check_tokens
from sumgrad.kernels.layout import Layout, resolve
from sumgrad.kernels.linear import column_nodes
from sumgrad.kernels.runtime import (
    INTERPRETED,
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
from sumgrad.kernels.sink import Sinks, check_sinks
from sumgrad.kernels.tree import plan_tree, sum_nodes
from torch import Tensor

LEAF = 32
VOCABULARY_BLOCK = 1024
IGNORED = -1


@triton.jit(do_not_specialize=["num_rows"])
def cross_entropy_fwd(
    logits, targets, loss, lse, num_rows,
    VOCABULARY: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """loss and lse of ROWS rows; a row with target -1 has loss +0."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    target = tl.load(targets + row, mask=row < num_rows, other=-1)
    top = tl.full((ROWS,), float("-inf"), dtype=ACC)
    total = tl.zeros((ROWS,), dtype=ACC)
    for start in range(0, VOCABULARY, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = (row < num_rows)[:, None] & (column < VOCABULARY)[None, :]
        place = row[:, None] * VOCABULARY + column[None, :]
        value = tl.load(logits + place, mask=inside, other=float("-inf")).to(ACC)
        higher = tl.maximum(top, tl.max(value, axis=1))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        part = tl.sum(tl.exp(value - safe[:, None]), axis=1)
        total = total * tl.exp(top - safe) + part
        top = higher
    level = top + tl.log(tl.where(row < num_rows, total, 1.0))
    counted = target >= 0
    chosen = tl.load(logits + row * VOCABULARY + target, mask=counted, other=0.0).to(ACC)
    tl.store(loss + row, tl.where(counted, level - chosen, 0.0), mask=row < num_rows)
    tl.store(lse + row, level, mask=row < num_rows)


@triton.jit(do_not_specialize=["num_rows"])
def cross_entropy_bwd(
    logits, targets, lse, seed, dlogits, num_rows,
    VOCABULARY: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """dlogits of ROWS rows and one block of the vocabulary."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(targets + row, mask=row < num_rows, other=-1)
    counted = (target >= 0)[:, None]
    level = tl.load(lse + row, mask=row < num_rows, other=0.0)
    inside = (row < num_rows)[:, None] & (column < VOCABULARY)[None, :]
    place = row[:, None] * VOCABULARY + column[None, :]
    value = tl.load(logits + place, mask=inside & counted, other=0.0).to(ACC)
    one_hot = (column[None, :] == target[:, None]).to(ACC)
    out = (tl.exp(value - level[:, None]) - one_hot) * tl.load(seed)
    out = tl.where(counted, out, 0.0)
    tl.store(dlogits + place, out.to(dlogits.dtype.element_ty), mask=inside)


def _shape(vocabulary: int) -> tuple[int, int]:
    """Rows and columns of a program's tile."""
    block = min(VOCABULARY_BLOCK, block_of(vocabulary))
    return (max(1, min(128, 65536 // block)) if INTERPRETED else max(1, 2048 // block)), block


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, layout: Layout, sinks: Sinks | None, leaf: int
    ) -> Tensor:
        num_rows, vocabulary = logits.shape
        acc = accumulator_dtype(logits.dtype)
        rows, block = _shape(vocabulary)
        loss = torch.empty(num_rows, dtype=acc, device=logits.device)
        lse = torch.empty_like(loss)
        launch(
            cross_entropy_fwd, (triton.cdiv(num_rows, rows),),
            compute(logits), compute(targets), loss, lse, num_rows,
            VOCABULARY=vocabulary, ROWS=rows, BLOCK=block, ACC=TL_DTYPE[acc],
        )  # fmt: skip
        ctx.save_for_backward(logits, targets, lse)
        nodes = column_nodes(loss[:, None], layout, "cross_entropy.loss", leaf)
        if sinks is not None:
            sinks["loss"].add(nodes)
        return sum_nodes(nodes).reshape(())

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> Any:
        logits, targets, lse = ctx.saved_tensors
        num_rows, vocabulary = logits.shape
        rows, block = _shape(vocabulary)
        dlogits = torch.empty(logits.shape, dtype=compute_dtype(logits.dtype), device=logits.device)
        launch(
            cross_entropy_bwd, (triton.cdiv(num_rows, rows), triton.cdiv(vocabulary, block)),
            compute(logits), compute(targets), lse, compute(grads[0].to(lse.dtype)), dlogits,
            num_rows,
            VOCABULARY=vocabulary, ROWS=rows, BLOCK=block, ACC=TL_DTYPE[lse.dtype],
        )  # fmt: skip
        return dlogits.to(logits.dtype), None, None, None, None


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    layout: Layout | None = None,
    sinks: Sinks | None = None,
    ignore_index: int = -100,
    leaf: int = LEAF,
) -> tuple[Tensor, int]:
    """logits (R, V), targets (R,) int -> (SUM of the loss in the accumulator's dtype, count).

    Rows with ignore_index and padding rows do not count. sinks: {"loss": Accumulator} takes the
    nodes of the SUM, in forward: do not recompute it by checkpointing. Raises KernelError (a
    target out of range too), LayoutError.
    """
    check_floats(logits=logits)
    check_shape("logits", logits, ("R", "V"))
    if not logits.shape[1]:
        raise KernelError("logits: got an empty vocabulary")
    if targets.device != logits.device:
        raise KernelError(f"targets on {targets.device}, logits on {logits.device}")
    check_shape("targets", targets, (len(logits),))
    check_sinks("cross_entropy", sinks, ["loss"])
    layout = resolve(layout, len(logits))
    plan_tree(layout, leaf)
    counted = (layout.positions >= 0).to(targets.device) & (targets != ignore_index)
    ids = check_tokens("targets", targets, len(logits), logits.shape[1], counted)
    ids = torch.where(counted, ids, IGNORED)
    loss: Tensor = _CrossEntropy.apply(logits, ids, layout, sinks, leaf)
    return loss, int(counted.sum())
