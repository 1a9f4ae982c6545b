"""The mathematics of every operator in float64 numpy, forward and backward, one row after another.

Written from the formulas, not from the kernels: nothing is tiled, fused or keyed. Rows are packed,
sample after sample; `lengths` says where samples end where that matters. Each function returns
what the kernel returns and its gradients, by name.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]


def rms_norm(x: F64, weight: F64, dy: F64, *, eps: float = 1e-6) -> dict[str, F64]:
    """x, dy (R, D), weight (D,). y_i = x_i r w_i with r = (mean(x^2) + eps)^-1/2."""
    r = (np.mean(x**2, axis=1, keepdims=True) + eps) ** -0.5
    dyw = dy * weight
    # d r / d x_j = -r^3 x_j / D
    dx = r * dyw - x * r**3 * np.mean(dyw * x, axis=1, keepdims=True)
    return {"y": x * r * weight, "dx": dx, "dweight": np.sum(dy * x * r, axis=0)}


def layer_norm(x: F64, weight: F64, bias: F64, dy: F64, *, eps: float = 1e-5) -> dict[str, F64]:
    """x, dy (R, D), weight and bias (D,). y = (x - mean) s weight + bias, s = (var + eps)^-1/2."""
    length = x.shape[1]
    centred = x - x.mean(axis=1, keepdims=True)
    s = (np.mean(centred**2, axis=1, keepdims=True) + eps) ** -0.5
    unit = centred * s
    dunit = dy * weight
    total = dunit.sum(axis=1, keepdims=True)
    along = (dunit * unit).sum(axis=1, keepdims=True)
    return {
        "y": unit * weight + bias,
        "dx": s / length * (length * dunit - total - unit * along),
        "dweight": np.sum(dy * unit, axis=0),
        "dbias": dy.sum(axis=0),
    }


def linear(x: F64, weight: F64, bias: F64, dy: F64) -> dict[str, F64]:
    """x (R, K), weight (N, K), bias (N,), dy (R, N). y = x W^T + b."""
    return {
        "y": x @ weight.T + bias,
        "dx": dy @ weight,
        "dweight": dy.T @ x,
        "dbias": dy.sum(axis=0),
    }


def attention(q: F64, k: F64, v: F64, do: F64, *, lengths: Sequence[int]) -> dict[str, F64]:
    """q, do (R, H, D), k and v (R, G, D): causal softmax attention inside each sample."""
    heads, groups, dim = q.shape[1], k.shape[1], q.shape[2]
    out = {"y": np.zeros_like(q), "dq": np.zeros_like(q)}
    out |= {"dk": np.zeros_like(k), "dv": np.zeros_like(v)}
    begin = 0
    for length in lengths:
        rows = slice(begin, begin + length)
        begin += length
        hidden = np.triu(np.ones((length, length), dtype=bool), 1)
        for head in range(heads):
            g = head // (heads // groups)
            qs, ks, vs, seed = q[rows, head], k[rows, g], v[rows, g], do[rows, head]
            s = np.where(hidden, -np.inf, qs @ ks.T / dim**0.5)
            p = np.exp(s - s.max(axis=1, keepdims=True, initial=-np.inf))
            p /= p.sum(axis=1, keepdims=True)
            dp = seed @ vs.T
            ds = p * (dp - (p * dp).sum(axis=1, keepdims=True)) / dim**0.5
            out["y"][rows, head] = p @ vs
            out["dq"][rows, head] = ds @ ks
            out["dk"][rows, g] += ds.T @ qs
            out["dv"][rows, g] += p.T @ seed
    return out


def embedding(tokens: I64, weight: F64, dy: F64) -> dict[str, F64]:
    """tokens (R,), weight (V, D), dy (R, D)."""
    one_hot = (tokens[:, None] == np.arange(len(weight))).astype(np.float64)
    return {"y": one_hot @ weight, "dweight": one_hot.T @ dy}


def swiglu(gate: F64, up: F64, dy: F64) -> dict[str, F64]:
    """Any shape. y = gate sigmoid(gate) up."""
    s = 1 / (1 + np.exp(-gate))
    return {"y": gate * s * up, "dgate": dy * up * (s + gate * s * (1 - s)), "dup": dy * gate * s}


def rope(x: F64, dy: F64, *, lengths: Sequence[int], base: float = 10000.0) -> dict[str, F64]:
    """x, dy (R, H, D). The pair (i, i + D/2) as a complex number, times exp(i angle)."""
    half = x.shape[2] // 2
    position = np.concatenate([np.arange(0.0), *(np.arange(n) for n in lengths)])
    turn = np.exp(1j * position[:, None, None] * base ** (-np.arange(half) / half))

    def turned(pairs: F64, by: NDArray[np.complex128]) -> F64:
        z = (pairs[..., :half] + 1j * pairs[..., half:]) * by
        return np.concatenate([z.real, z.imag], axis=-1)

    return {"y": turned(x, turn), "dx": turned(dy, turn.conj())}


def cross_entropy(logits: F64, targets: I64, dloss: float) -> dict[str, F64]:
    """logits (R, V), targets (R,), negative where a row does not count. The SUM over rows."""
    counted = targets >= 0
    shifted = logits - logits.max(axis=1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    one_hot = targets[:, None] == np.arange(logits.shape[1])
    loss = -log_p[one_hot].sum()
    return {
        "loss": np.array(loss),
        "dlogits": np.where(counted[:, None], (np.exp(log_p) - one_hot) * dloss, 0.0),
    }
