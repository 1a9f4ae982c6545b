"""A small decoder made of these operators only: forward, and backward to every weight.

embedding; blocks of rms_norm, linear (q, k, v in one), rope, attention, linear, residual, rms_norm,
linear (gate and up in one), swiglu, linear, residual; rms_norm, linear, cross_entropy as a SUM.
Between operators there are only additions and views, so a token's bits depend on its sample alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from sumgrad.kernels.attention import AttentionTiles, attention
from sumgrad.kernels.cross_entropy import cross_entropy
from sumgrad.kernels.embedding import embedding
from sumgrad.kernels.kv_cache import KeyValueCache
from sumgrad.kernels.layout import Layout
from sumgrad.kernels.linear import Tiles, linear
from sumgrad.kernels.rms_norm import rms_norm
from sumgrad.kernels.rope import rope
from sumgrad.kernels.swiglu import swiglu
from sumgrad.kernels.tree import Accumulator
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Sizes, and the tree: leaf, tiles of the products, tiles of attention (None: the defaults)."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    leaf: int
    tiles: Tiles | None = None
    attention_tiles: AttentionTiles | None = None

    @property
    def head(self) -> int:
        return self.width // self.heads

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every weight, in the order in which roots fold."""
        w = self.width
        out: dict[str, tuple[int, ...]] = {"embed": (self.vocabulary, w)}
        for layer in range(self.layers):
            out |= {
                f"{layer}.norm1": (w,),
                f"{layer}.qkv": ((self.heads + 2 * self.kv_heads) * self.head, w),
                f"{layer}.o": (w, w),
                f"{layer}.norm2": (w,),
                f"{layer}.up": (2 * self.mlp, w),
                f"{layer}.down": (w, self.mlp),
            }
        return out | {"norm": (w,), "unembed": (self.vocabulary, w)}

    def caches(
        self, layout: Layout, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> list[KeyValueCache]:
        """One key/value cache a layer, for whole samples."""
        return [
            KeyValueCache(
                layout, num_heads=self.kv_heads, head=self.head, dtype=dtype, device=device
            )
            for _ in range(self.layers)
        ]

    def forward(
        self,
        weights: Mapping[str, Tensor],
        tokens: Tensor,
        targets: Tensor,
        *,
        layout: Layout,
        sinks: Mapping[str, Accumulator],
        caches: Sequence[KeyValueCache] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """tokens, targets (R,) -> logits (R, V) and the SUM of the loss; `sinks` has every weight.

        targets: -100 where nothing is predicted. caches: as from `caches`, when rows are a chunk.
        """

        def product(x: Tensor, name: str) -> Tensor:
            sink = {"weight": sinks[name]}
            return linear(x, weights[name], layout=layout, sinks=sink, tiles=self.tiles)

        def norm(x: Tensor, name: str) -> Tensor:
            sink = {"weight": sinks[name]}
            return rms_norm(x, weights[name], layout=layout, sinks=sink, leaf=self.leaf)

        sink = {"weight": sinks["embed"]}
        h = embedding(tokens, weights["embed"], layout=layout, sinks=sink, leaf=self.leaf)
        for layer in range(self.layers):
            qkv = product(norm(h, f"{layer}.norm1"), f"{layer}.qkv")
            q, k, v = qkv.unflatten(1, (-1, self.head)).split(
                [self.heads, self.kv_heads, self.kv_heads], dim=1
            )
            mixed = attention(
                rope(q, layout=layout),
                rope(k, layout=layout),
                v,
                layout=layout,
                cache=caches[layer] if caches else None,
                tiles=self.attention_tiles,
            )
            h = h + product(mixed.flatten(1), f"{layer}.o")
            gate, up = product(norm(h, f"{layer}.norm2"), f"{layer}.up").chunk(2, dim=1)
            h = h + product(swiglu(gate, up), f"{layer}.down")
        logits = product(norm(h, "norm"), "unembed")
        sink = {"loss": sinks["loss"]}
        loss, _ = cross_entropy(logits, targets, layout=layout, sinks=sink, leaf=self.leaf)
        return logits, loss
