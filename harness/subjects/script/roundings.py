"""Other roundings in one process: every sum as far off as another order of its terms may put it.

Ranks add the same terms in another order, and a script gives no way to cut its rows anew. So in a
noise run each product of matrices and each sum gets an error of one rounding of the sum of its
absolute terms, drawn for every element: what another order can do, also where the terms cancel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nested._internal.nested_tensor import NestedTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
# Each is a sum of products of its arguments: on absolute values it gives the sum of absolute terms.
_SUMS = {
    _aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten.mv, _aten.dot, _aten.sum, _aten.mean,
    _aten.embedding_dense_backward, _aten.convolution, _aten.convolution_backward, _aten.linear,
    _aten.matmul, _aten.index_add, _aten.scatter_add, _aten._grouped_mm,
}  # fmt: skip
_LAYER_NORM_BACKWARD = _aten.native_layer_norm_backward


class OtherRoundings(TorchDispatchMode):
    """See above. seed: of the errors, drawn apart from the script's own random numbers."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.drawn = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor | NestedTensor) for kind in types):
            return NotImplemented  # what it is made of comes here by itself
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet = func.overloadpacket
        if packet in _SUMS:
            absolute = func(*pytree.tree_map(_absolute, args), **pytree.tree_map(_absolute, kwargs))
            return self._moved(out, absolute)
        if packet is _LAYER_NORM_BACKWARD:
            return self._layer_norm(out, args)
        return out

    def _moved(self, out: Any, sizes: Any) -> Any:
        def move(value: Any, size: Any) -> Any:
            if not isinstance(value, Tensor) or not value.is_floating_point():
                return value
            errors = torch.empty(size.shape, dtype=size.dtype)
            errors.uniform_(-1, 1, generator=self.drawn)
            return value + errors.to(size.device) * size * torch.finfo(value.dtype).eps

        return pytree.tree_map(move, out, sizes)

    def _layer_norm(self, out: Any, args: Any) -> Any:
        """Its weight's and bias's gradients are sums over rows; its input's is a row's own."""
        grad, x, shape, mean, rstd, *_ = args
        dims = list(range(grad.dim() - len(shape)))
        if not dims:
            return out
        sizes = [None, (grad * (x - mean) * rstd).abs().sum(dims), grad.abs().sum(dims)]
        return tuple(
            value if value is None or size is None else self._moved(value, size.to(value.dtype))
            for value, size in zip(out, sizes, strict=True)
        )


def _absolute(value: Any) -> Any:
    return value.abs() if isinstance(value, Tensor) and value.is_floating_point() else value
