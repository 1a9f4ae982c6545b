"""Kernels that are wrong on purpose: the certificate and the matrix must catch them.

Never call these for anything else. A float atomic adds in arrival order; the interpreter has only
one order, that of the programs, so there the order of the physical rows shows instead.
"""

from __future__ import annotations

import torch
from sumgrad.kernels.runtime import block_of, compute, launch, tl, triton
from torch import Tensor


@triton.jit(do_not_specialize=["num_rows"])
def column_sum_by_float_atomics(
    x, out, num_rows, LENGTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Every block adds its rows' sum to `out` by a float atomic."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < num_rows)[:, None] & (column < LENGTH)[None, :]
    value = tl.load(x + row[:, None] * LENGTH + column[None, :], mask=inside, other=0.0)
    tl.atomic_add(out + column, tl.sum(value, axis=0), mask=column < LENGTH, sem="relaxed")


def column_sum_with_atomics(x: Tensor) -> Tensor:
    """Sum over the rows of x (R, D), in the order in which blocks arrive."""
    out = torch.zeros(x.shape[1], dtype=x.dtype, device=x.device)
    launch(
        column_sum_by_float_atomics, (triton.cdiv(len(x), 8),), compute(x), out, len(x),
        LENGTH=x.shape[1], ROWS=8, BLOCK=block_of(x.shape[1]),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_rows"])
def column_sum_behind_a_lock(
    x, out, lock, num_rows, LENGTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """No float atomic, but blocks add in the order in which they get the lock. Never launched."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < num_rows)[:, None] & (column < LENGTH)[None, :]
    value = tl.load(x + row[:, None] * LENGTH + column[None, :], mask=inside, other=0.0)
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    total = tl.load(out + column, mask=column < LENGTH, other=0.0) + tl.sum(value, axis=0)
    tl.store(out + column, total, mask=column < LENGTH)
    tl.debug_barrier()
    tl.atomic_xchg(lock, 0)


@triton.jit
def tile_sum_by_bulk_reduce(x, out, BLOCK: tl.constexpr):
    """Adds its tile by the tensor memory accelerator, whose instruction names no dtype."""
    start = tl.program_id(0) * BLOCK
    value = tl.load(x + start + tl.arange(0, BLOCK))[None, :]
    target = tl.make_tensor_descriptor(out, [1, BLOCK], [BLOCK, 1], [1, BLOCK])
    target.atomic_add([0, 0], value)
