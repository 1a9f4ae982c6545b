"""The operators that need no layout, as torch custom operators: torch.ops.sumgrad.swiglu, ...

Importing this module registers them, with shapes for torch.compile and torch.export and with their
gradients. All rows count as one sample; for padding, packing, micro-batches and ranks call the
functions of the operators' modules, which take a layout and trees.
"""

from __future__ import annotations

from typing import Any

import torch
from sumgrad.kernels.layer_norm import LEAF as LAYER_NORM_LEAF
from sumgrad.kernels.layer_norm import backward as layer_norm_backward
from sumgrad.kernels.layer_norm import forward as layer_norm_forward
from sumgrad.kernels.layout import Layout
from sumgrad.kernels.linear import column_nodes, default_tiles, product, weight_nodes
from sumgrad.kernels.primitives import fold_leaves
from sumgrad.kernels.rms_norm import LEAF as RMS_NORM_LEAF
from sumgrad.kernels.rms_norm import backward as rms_norm_backward
from sumgrad.kernels.rms_norm import forward as rms_norm_forward
from sumgrad.kernels.runtime import accumulator_dtype
from sumgrad.kernels.swiglu import backward as swiglu_backward
from sumgrad.kernels.swiglu import forward as swiglu_forward
from sumgrad.kernels.tree import sum_nodes
from torch import Tensor
from torch.library import custom_op


def _statistic(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], dtype=accumulator_dtype(x.dtype))


@custom_op("sumgrad::swiglu", mutates_args=())
def swiglu_op(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return swiglu_forward(gate, up)


@custom_op("sumgrad::swiglu_backward", mutates_args=())
def swiglu_backward_op(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return swiglu_backward(dy, gate, up)


@swiglu_op.register_fake
def _(gate: Tensor, up: Tensor) -> Tensor:
    return torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)


@swiglu_backward_op.register_fake
def _(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    made = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (gate, up)]
    return made[0], made[1]


def _swiglu_gradient(ctx: Any, dy: Tensor) -> Any:
    return swiglu_backward_op(dy, *ctx.saved_tensors)


swiglu_op.register_autograd(
    _swiglu_gradient, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


@custom_op("sumgrad::rms_norm", mutates_args=())
def rms_norm_op(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x (R, D), weight (D,) -> y, and 1 / rms (R,)."""
    return rms_norm_forward(x, weight, eps)


@custom_op("sumgrad::rms_norm_backward", mutates_args=())
def rms_norm_backward_op(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    layout = Layout.single(len(x))
    dx, leaves = rms_norm_backward(dy, x, weight, rstd, layout, RMS_NORM_LEAF)
    dweight = sum_nodes(fold_leaves(leaves, layout, RMS_NORM_LEAF, "rms_norm.weight", x.dtype))
    return dx, dweight.to(weight.dtype)


@rms_norm_op.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), _statistic(x)


@rms_norm_backward_op.register_fake
def _(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _rms_norm_context(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0], inputs[1], output[1])
    ctx.mark_non_differentiable(output[1])


def _rms_norm_gradient(ctx: Any, dy: Tensor, _: Any) -> Any:
    return *rms_norm_backward_op(dy, *ctx.saved_tensors), None


rms_norm_op.register_autograd(_rms_norm_gradient, setup_context=_rms_norm_context)


@custom_op("sumgrad::layer_norm", mutates_args=())
def layer_norm_op(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x (R, D), weight and bias (D,) -> y, both parts of the mean, 1 / standard deviation."""
    return layer_norm_forward(x, weight, bias, eps)


@custom_op("sumgrad::layer_norm_backward", mutates_args=())
def layer_norm_backward_op(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, low: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    layout = Layout.single(len(x))
    dx, *leaves = layer_norm_backward(dy, x, weight, (mean, low, rstd), layout, LAYER_NORM_LEAF)
    sums = [
        sum_nodes(fold_leaves(part, layout, LAYER_NORM_LEAF, "layer_norm", x.dtype))
        for part in leaves
    ]
    return dx, sums[0].to(weight.dtype), sums[1].to(weight.dtype)


@layer_norm_op.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Any:
    return x.new_empty(x.shape), _statistic(x), _statistic(x), _statistic(x)


@layer_norm_backward_op.register_fake
def _(dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, low: Tensor, rstd: Tensor) -> Any:
    return x.new_empty(x.shape), weight.new_empty(weight.shape), weight.new_empty(weight.shape)


def _layer_norm_context(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0], inputs[1], *output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _layer_norm_gradient(ctx: Any, dy: Tensor, *_: Any) -> Any:
    return *layer_norm_backward_op(dy, *ctx.saved_tensors), None


layer_norm_op.register_autograd(_layer_norm_gradient, setup_context=_layer_norm_context)


@custom_op("sumgrad::linear", mutates_args=())
def linear_op(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x (R, K), weight (N, K), bias (N,) -> (R, N)."""
    return product(x, weight, bias, default_tiles(x.dtype), transposed=True)


@custom_op("sumgrad::linear_backward", mutates_args=())
def linear_backward_op(dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    tiles, layout = default_tiles(x.dtype), Layout.single(len(x))
    dx = product(dy, weight, None, tiles, transposed=False)
    dweight = sum_nodes(weight_nodes(dy, x, layout, tiles))
    dbias = sum_nodes(column_nodes(dy, layout, "linear.bias"))
    return dx, dweight.to(weight.dtype), dbias.to(weight.dtype)


@linear_op.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@linear_backward_op.register_fake
def _(dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape), weight.new_empty(weight.shape[0])


def _linear_gradient(ctx: Any, dy: Tensor) -> Any:
    return linear_backward_op(dy, *ctx.saved_tensors)


linear_op.register_autograd(
    _linear_gradient,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0], inputs[1]),
)
