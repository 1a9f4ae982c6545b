"""Operators that are wrong on purpose, each in its own way: the matrix must turn red for each.

Together they turn every property red, so no column of the matrix is one that cannot fail.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from sumgrad.invariance.arrangement import PROPERTIES, Arrangement, Call
from sumgrad.invariance.operator_run import Tensors
from sumgrad.invariance.protocol import Operator, Rows
from sumgrad.invariance.runs import PlainOperator
from sumgrad.kernels.planted import column_sum_with_atomics
from sumgrad.kernels.rms_norm import rms_norm
from sumgrad.kernels.runtime import accumulator_dtype
from torch import Tensor

WIDTH = 24
BLOCKS = 4


class _Planted(PlainOperator):
    """With weights of at least 32 bits: rounded to 16, a gradient seldom shows its order."""

    def begin(
        self, lengths: Sequence[int], arrangement: Arrangement, weights: Tensors, dtype: torch.dtype
    ) -> Any:
        wide = {
            name: w.detach().to(accumulator_dtype(dtype)).requires_grad_()
            for name, w in weights.items()
        }
        return super().begin(lengths, arrangement, wide, dtype)

    def forward(self, state: Any, call: Call, rows: Tensors) -> Tensor:
        return super().forward(state, call, rows).to(state["dtype"])


class _Scale(torch.autograd.Function):
    """y = x * weight, with a chosen way to sum the weight's gradient over rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, column_sum: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.column_sum = column_sum
        return x * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return (grads[0] * weight).to(x.dtype), ctx.column_sum(grads[0] * x), None


def _per_multiprocessor(values: Tensor) -> Tensor:
    """One partial for each of BLOCKS workers, rows dealt in turn."""
    partials = [values[i::BLOCKS].sum(0) for i in range(BLOCKS)]
    return torch.stack(partials).sum(0)


def _scaled(column_sum: Any) -> Any:
    def function(rows: Tensors, weights: Tensors, call: Call) -> Tensor:
        out: Tensor = _Scale.apply(rows["x"], weights["weight"], column_sum)
        return out

    return function


def _split_by_batch(rows: Tensors, weights: Tensors, call: Call) -> Tensor:
    """The split of a row's sum follows the number of rows, as a heuristic of a GPU library does."""
    splits = 2 if call.num_rows < 100 else 3 if call.num_rows < 360 else 4
    parts = rows["x"].unflatten(1, (splits, -1)).sum(2)
    total = parts[:, 0]
    for i in range(1, splits):
        total = total + parts[:, i]
    return total[:, None] * weights["weight"]


def _by_alignment(rows: Tensors, weights: Tensors, call: Call) -> Tensor:
    """A vectorised path for aligned rows and another order for the rest."""
    x = rows["x"]
    aligned = x.storage_offset() % 4 == 0
    total = torch.zeros(len(x), dtype=x.dtype, device=x.device)
    for i in range(WIDTH) if aligned else reversed(range(WIDTH)):
        total = total + x[:, i]
    return total[:, None] * weights["weight"]


def _unsteady() -> Any:
    """Every second call adds from the other end: no two runs agree."""
    turn = itertools.count()

    def function(rows: Tensors, weights: Tensors, call: Call) -> Tensor:
        x = rows["x"].flip(1) if next(turn) % 2 else rows["x"]
        total = torch.zeros(len(x), dtype=x.dtype, device=x.device)
        for i in range(WIDTH):
            total = total + x[:, i]
        return total[:, None] * weights["weight"]

    return function


def _hole(rows: Tensors, weights: Tensors, call: Call) -> Tensor:
    """Forgets the last column of its output."""
    y = rows["x"].new_empty(len(rows["x"]), WIDTH)
    y[:, :-1] = rows["x"][:, :-1] * weights["weight"][:-1]
    return y


def _next_to_padding(rows: Tensors, weights: Tensors, call: Call) -> Tensor:
    """Forgets the mask: the row that physically follows, whose ever it is, leaks in."""
    return (rows["x"] + 1e-6 * rows["x"].roll(-1, 0)) * weights["weight"]


def planted() -> list[Operator]:
    """Every planted operator; what it does wrong is its name."""
    common: dict[str, Any] = {
        "rows": {"x": Rows((WIDTH,))},
        "weights": {"weight": (WIDTH,)},
        "output": (WIDTH,),
        "chunks": True,
        "expect": "planted",
    }
    weight = [("dweight", prop) for prop in PROPERTIES if prop not in ("misaligned", "repeat")]
    split = [("y", prop) for prop in ("batch", "pad left", "pad right", "chunked", "dp 2")]
    leak = [("y", prop) for prop in ("order", "packed", "pad right", "micro", "dp 3")]
    everywhere = [("y", prop) for prop in PROPERTIES]
    cases: dict[str, tuple[Any, list[tuple[str, str]]]] = {
        "rms_norm last_block": (_last_block, weight),
        "planted: float atomics": (_scaled(column_sum_with_atomics), weight),
        "planted: partials per multiprocessor": (_scaled(_per_multiprocessor), weight),
        "planted: sum over physical rows": (_scaled(lambda values: values.sum(0)), weight),
        "planted: split depends on batch": (_split_by_batch, split),
        "planted: order follows alignment": (_by_alignment, [("y", "misaligned")]),
        "planted: order changes between runs": (_unsteady(), [("y", "repeat")]),
        "planted: neighbour leaks in": (_next_to_padding, leak),
        "planted: output not written": (_hole, everywhere),
    }
    return [
        _Planted(name=name, function=function, must_differ=cells, **common)
        for name, (function, cells) in cases.items()
    ]


def _last_block(rows: Tensors, weights: Tensors, call: Call) -> Tensor:
    """Ours, in the mode that is deterministic and no more."""
    x, weight = rows["x"], weights["weight"]
    return rms_norm(x.to(weight.dtype), weight, mode="last_block")
