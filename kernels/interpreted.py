"""Triton's interpreter, made even: a product of tiles that treats every row and column alike.

It multiplies tiles by numpy's matmul, that is by the BLAS that numpy came with, and that one has
kernels (OpenBLAS's for Haswell, float32) that round a row by where in the tile it stands. A GPU's
tl.dot does not. So tiles are multiplied here as the sum over k of outer products, element by
element: the same bits at every place, whatever the CPU.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt


def product(a: npt.NDArray[Any], b: npt.NDArray[Any], dtype: Any) -> npt.NDArray[Any]:
    """(..., M, K) times (..., K, N) in a dtype, k after k, each product and each sum rounded."""
    a, b = a.astype(dtype, copy=False), b.astype(dtype, copy=False)
    shape = (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    total, part = np.zeros(shape, dtype), np.empty(shape, dtype)
    for k in range(a.shape[-1]):
        np.multiply(a[..., :, k, None], b[..., None, k, :], out=part)
        np.add(total, part, out=total)
    return total


@functools.cache
def use_even_products() -> None:
    """Have the interpreter multiply tiles by `product`, in this process."""
    from triton.runtime import interpreter

    theirs = interpreter.InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        narrow = any(x.dtype.is_floating() and x.dtype.primitive_bitwidth == 8 for x in (a, b))
        if narrow or not np.issubdtype(d.data.dtype, np.floating):
            return theirs(self, a, b, d, *options)
        total = product(a.data, b.data, d.data.dtype) + d.data
        return interpreter.TensorHandle(total, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot
