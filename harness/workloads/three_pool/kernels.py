"""The three-pool model's linear layers, norms and attention on sumgrad.kernels.

The reference keeps torch's operators, so a check with these kernels also checks the kernels.
"""

from __future__ import annotations

import torch
from sumgrad.kernels import attention as triton_attention
from sumgrad.kernels import linear as triton_linear
from sumgrad.kernels import rms_norm as triton_rms_norm
from sumgrad.kernels.attention import AttentionTiles
from sumgrad.kernels.layout import Layout
from sumgrad.kernels.linear import Tiles
from sumgrad.workloads.three_pool.model import Operators, wide
from torch import Tensor


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x weight^T in the weight's dtype. x: (..., K)."""
    rows = x.to(weight.dtype).reshape(-1, x.shape[-1])
    out = triton_linear(rows, weight, tiles=_tiles(rows, weight))
    return out.view(*x.shape[:-1], -1)


def _tiles(rows: Tensor, weight: Tensor) -> Tiles | None:
    """Interpreted, a tile as large as the work: fewer programs, and no more memory than needed."""
    if rows.device.type != "cpu":
        return None
    side = max(16, 1 << (max(weight.shape) - 1).bit_length())
    height = max(16, min(512, 1 << (max(1, len(rows)) - 1).bit_length()))
    side = min(side, 128)
    return Tiles(rows=max(side, height), columns=side, depth=side, leaf=max(side, 256))


def rms_norm(x: Tensor, weight: Tensor | None = None) -> Tensor:
    """x / sqrt(mean(x^2) + 1e-6), times weight; wide. x: (..., D)."""
    x = wide(x)
    scale = x.new_ones(x.shape[-1]) if weight is None else weight.to(x.dtype)
    return triton_rms_norm(x.reshape(-1, x.shape[-1]), scale, leaf=256).view(x.shape)


class _Attention:
    """Keeps the layouts: every layer of a step asks for the same."""

    def __init__(self) -> None:
        self._layouts: dict[tuple[int, tuple[int, ...]], Layout] = {}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor, heads: int) -> Tensor:
        """Causal softmax attention. q, k, v: (..., n, T, D); valid: (n, T); padding gives 0."""
        shape = torch.broadcast_shapes(q.shape, k.shape, v.shape)
        length = valid.shape[1]
        copies = shape[:-2].numel() // max(1, len(valid))
        assert bool((valid[:, 1:] <= valid[:, :-1]).all()), "padding must be on the right"
        lengths = tuple(valid.sum(1).tolist() * copies)
        if (length, lengths) not in self._layouts:
            self._layouts[length, lengths] = Layout.padded(lengths, width=length)
        layout = self._layouts[length, lengths]
        q, k, v = (t.expand(shape).reshape(-1, heads, shape[-1] // heads) for t in (q, k, v))
        side = max(16, min(128, 1 << (length - 1).bit_length()))
        tiles = AttentionTiles(query=side, key=side) if q.device.type == "cpu" else None
        return triton_attention(q, k, v, layout=layout, tiles=tiles).reshape(shape)


def triton_operators() -> Operators:
    """Raises ImportError where there is no Triton."""
    return Operators(linear=linear, rms_norm=rms_norm, attention=_Attention())
