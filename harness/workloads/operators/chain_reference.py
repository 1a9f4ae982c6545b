"""The chain in torch, float64, one sample after another: it shares no code with the kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def chain_reference(
    chain: Any, values: Mapping[str, Any], seed: float, lengths: Sequence[int]
) -> dict[str, Tensor]:
    """Loss, logits (y), gradients by name. values: weights, tokens, targets; chain: sizes."""
    weights = {name: torch.tensor(values[name]).requires_grad_() for name in chain.shapes()}
    tokens, targets = torch.tensor(values["tokens"]), torch.tensor(values["targets"])
    loss = torch.zeros((), dtype=torch.float64)
    rows = []
    for ids, wanted in zip(tokens.split(list(lengths)), targets.split(list(lengths)), strict=True):
        logits = _logits(chain, weights, ids)
        rows.append(logits.detach())
        loss = loss + functional.cross_entropy(logits, wanted, reduction="sum")
    (loss * seed).backward()
    found = {"d" + name: w.grad for name, w in weights.items() if w.grad is not None}
    return {"loss": loss.detach().reshape(1), "y": torch.cat(rows), **found}


def _logits(chain: Any, w: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
    """(T, V) of one sample."""
    length, heads, groups = len(tokens), chain.heads, chain.kv_heads

    def norm(x: Tensor, name: str) -> Tensor:
        return functional.rms_norm(x, (chain.width,), w[name], 1e-6)

    h = w["embed"][tokens]
    for layer in range(chain.layers):
        qkv = norm(h, f"{layer}.norm1") @ w[f"{layer}.qkv"].T
        q, k, v = qkv.view(length, heads + 2 * groups, chain.head).split(
            [heads, groups, groups], dim=1
        )
        q, k = _turned(q), _turned(k)
        k, v = (t.repeat_interleave(heads // groups, dim=1) for t in (k, v))
        mixed = functional.scaled_dot_product_attention(
            q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=True
        )
        h = h + mixed.transpose(0, 1).flatten(1) @ w[f"{layer}.o"].T
        gate, up = (norm(h, f"{layer}.norm2") @ w[f"{layer}.up"].T).chunk(2, dim=1)
        h = h + (functional.silu(gate) * up) @ w[f"{layer}.down"].T
    return norm(h, "norm") @ w["unembed"].T


def _turned(x: Tensor) -> Tensor:
    half = x.shape[2] // 2
    rate = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(len(x), dtype=torch.float64)[:, None, None] * rate
    low, high = x[..., :half], x[..., half:]
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)
