"""The mathematics of the three-pool workload: a frozen target, masked sites, and the CI function.

Pure functions of tensors. Shapes: n rows, T positions, D model width, G copies, H heads. No sum
over ranks, no count and no normaliser appears in this file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

Tensors = Mapping[str, Tensor]
SiteFn = Callable[[str, Tensor], Tensor]
LEAK = 0.01
KINDS = ("v", "o", "up", "down")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of target and CI function. components: C, the rank of each site's U V."""

    rows: int
    length: int
    vocabulary: int
    width: int
    layers: int
    heads: int
    mlp: int
    components: int
    ci_width: int

    @cached_property
    def sites(self) -> tuple[str, ...]:
        return tuple(f"{layer}.{kind}" for layer in range(self.layers) for kind in KINDS)

    def site_shape(self, site: str) -> tuple[int, int]:
        """(d_out, d_in) of a site's frozen weight."""
        kind = site.split(".")[1]
        return {"up": (self.mlp, self.width), "down": (self.width, self.mlp)}.get(
            kind, (self.width, self.width)
        )


class _Lower(torch.autograd.Function):
    """clamp(z, 0, 1); the backward leaks below 0 for any sign of the gradient, so it is linear."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        ctx.save_for_backward(z)
        return z.clamp(0, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (z,) = ctx.saved_tensors
        leaked = torch.where(z < 0, LEAK * grad, grad)
        return torch.where(z > 1, torch.zeros_like(grad), leaked)


def lower(z: Tensor) -> Tensor:
    """The hard sigmoid with a leak below 0 in its backward: a causal importance in [0, 1]."""
    return _Lower.apply(z)


def upper(z: Tensor) -> Tensor:
    """clamp(z, 0, 1), continued with slope 0.01 above 1."""
    return z.clamp(0, 1) + LEAK * (z - 1).clamp(min=0)


def wide(x: Tensor) -> Tensor:
    """Norms, softmax, residual stream and losses are float32 at least, as in mixed precision."""
    return x if x.dtype == torch.float64 else x.float()


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x weight^T in the weight's dtype."""
    return x.to(weight.dtype) @ weight.T


def rms_norm(x: Tensor, weight: Tensor | None = None) -> Tensor:
    """x / sqrt(mean(x^2) + 1e-6), times weight; wide."""
    x = wide(x)
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    return y if weight is None else y * weight


def attention(q: Tensor, k: Tensor, v: Tensor, valid: Tensor, heads: int) -> Tensor:
    """Causal softmax attention. q, k, v: (..., n, T, D); valid: (n, T), padding on the right."""
    allowed = allowed_keys(valid)

    def split(x: Tensor) -> Tensor:  # (..., n, H, T, D / H)
        return x.unflatten(-1, (heads, -1)).transpose(-3, -2)

    scores = split(q) @ split(k).transpose(-1, -2) / (q.shape[-1] // heads) ** 0.5
    weights = wide(scores).masked_fill(~allowed, float("-inf")).softmax(-1).to(v.dtype)
    return (weights @ split(v)).transpose(-3, -2).flatten(-2)


def allowed_keys(valid: Tensor) -> Tensor:
    """(n, 1, T, T): causal, padded keys masked; a padded query sees itself, so no row is empty."""
    length = valid.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=valid.device).tril()
    itself = torch.eye(length, dtype=torch.bool, device=valid.device)
    return ((causal & valid[:, None, :]) | itself)[:, None]


@dataclass(frozen=True, kw_only=True)
class Operators:
    """The three operators of the model that exist in more than one implementation."""

    linear: Callable[[Tensor, Tensor], Tensor]
    rms_norm: Callable[[Tensor, Tensor | None], Tensor]
    attention: Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]


TORCH = Operators(linear=linear, rms_norm=rms_norm, attention=attention)


def target(
    frozen: Tensors, tokens: Tensor, valid: Tensor, sizes: Sizes, site: SiteFn, ops: Operators
) -> Tensor:
    """Logits (..., n, T, vocabulary) of the frozen model; `site` computes each site's output."""
    h = wide(frozen["embed"][tokens] + frozen["position"])
    for layer in range(sizes.layers):
        x = ops.rms_norm(h, None)
        q, k = ops.linear(x, frozen[f"{layer}.q"]), ops.linear(x, frozen[f"{layer}.k"])
        mixed = ops.attention(q, k, site(f"{layer}.v", x), valid, sizes.heads)
        h = h + site(f"{layer}.o", mixed)
        h = h + site(f"{layer}.down", silu(site(f"{layer}.up", ops.rms_norm(h, None))))
    return ops.linear(ops.rms_norm(h, None), frozen["unembed"])


def masked_site(
    x: Tensor, weight: Tensor, v: Tensor, u: Tensor, mask: Tensor, d: Tensor, ops: Operators
) -> Tensor:
    """U (m * (V x)) + d * ((W - U V) x). mask: (..., C); d: (..., 1)."""
    delta = (wide(weight) - wide(u) @ wide(v)).to(weight.dtype)
    return ops.linear(mask * ops.linear(x, v), u) + d * ops.linear(x, delta)


def recon_sum(logits: Tensor, frozen_logits: Tensor, valid: Tensor) -> Tensor:
    """Squared error, mean over the vocabulary, summed over valid positions and copies."""
    error = (wide(logits) - wide(frozen_logits)).square().mean(-1)
    return error.masked_fill(~valid, 0).sum()


def ci_logits(
    params: Tensors, inputs: Tensor, valid: Tensor, sizes: Sizes, ops: Operators
) -> Tensor:
    """The CI function: every site's input at every position -> z (n, T, S, C)."""
    h = wide(ops.linear(inputs, params["ci.in.weight"])) + params["ci.in.bias"]
    x = ops.rms_norm(h, params["ci.norm1.weight"])
    q, k, v = (ops.linear(x, params[f"ci.{name}.weight"]) for name in ("q", "k", "v"))
    mixed = ops.attention(q, k, v, valid, 2)
    h = h + ops.linear(mixed, params["ci.o.weight"])
    x = ops.rms_norm(h, params["ci.norm2.weight"])
    h = h + ops.linear(silu(ops.linear(x, params["ci.up.weight"])), params["ci.down.weight"])
    z = ops.linear(h, params["ci.head.weight"]) + params["ci.head.bias"]
    return z.unflatten(-1, (len(sizes.sites), sizes.components))
