"""Measures what docs/layer_norm.md says about accuracy, and writes docs/data/layer_norm.json.

    python scripts/layer_norm_stability.py

Rows of 1024 float32 elements; errors are max |got - exact| / max |exact| against float64.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")

import numpy as np
import torch
from sumgrad.kernels import oracle
from sumgrad.kernels.layer_norm import layer_norm

ROWS, LENGTH, EPS = 32, 1024, 1e-5
OUT = Path(__file__).resolve().parent.parent / "docs" / "data" / "layer_norm.json"


def inputs(name: str) -> tuple[np.ndarray, float]:
    """x (ROWS, LENGTH) in float64 and eps."""
    x = np.random.default_rng(0).standard_normal((ROWS, LENGTH))
    return {
        "standard normal": (x, EPS),
        "offset 1e4": (x + 1e4, EPS),
        "tiny variance (1e-10), eps 1e-12": (x * 1e-5, 1e-12),
        "offset 1, tiny variance, eps 1e-12": (1 + x * 1e-3, 1e-12),
        "constant rows of 3": (np.full_like(x, 3.0), EPS),
        "constant rows of 1e4 + 0.1": (np.full_like(x, 1e4 + 0.1), EPS),
    }[name]


CASES = [
    "standard normal",
    "offset 1e4",
    "tiny variance (1e-10), eps 1e-12",
    "offset 1, tiny variance, eps 1e-12",
    "constant rows of 3",
    "constant rows of 1e4 + 0.1",
]


def one_pass(x: np.ndarray, eps: float) -> np.ndarray:
    """float32, var = E[x^2] - E[x]^2: what not to do."""
    mean = x.mean(1, keepdims=True)
    variance = (x * x).mean(1, keepdims=True) - mean * mean
    with np.errstate(invalid="ignore"):
        return (x - mean) / np.sqrt(variance + np.float32(eps))


def relative(got: np.ndarray, exact: np.ndarray) -> float | str:
    if not np.isfinite(got).all():
        return "NaN"
    scale = np.abs(exact).max()
    return float(np.abs(got - exact).max() / (scale if scale > 1e-12 else 1.0))


def measure(name: str) -> dict[str, object]:
    wide, eps = inputs(name)
    x = wide.astype(np.float32)
    rng = np.random.default_rng(1)
    weight, bias = (rng.standard_normal(LENGTH).astype(np.float32) for _ in range(2))
    dy = rng.standard_normal(x.shape).astype(np.float32)
    ones, zeros = np.ones(LENGTH), np.zeros(LENGTH)
    unit = oracle.layer_norm(x.astype(float), ones, zeros, dy.astype(float), eps=eps)["y"]
    exact = oracle.layer_norm(*(t.astype(float) for t in (x, weight, bias, dy)), eps=eps)
    out: dict[str, object] = {"case": name, "one-pass y": relative(one_pass(x, eps), unit)}

    def run(function) -> dict[str, float | str]:
        leaves = [torch.from_numpy(t.copy()).requires_grad_() for t in (x, weight, bias)]
        y = function(*leaves)
        y.backward(torch.from_numpy(dy))
        found = {"y": y.detach(), **dict(zip(("dx", "dweight", "dbias"),
                                             (t.grad for t in leaves), strict=True))}  # fmt: skip
        return {key: relative(value.numpy().astype(float), exact[key])
                for key, value in found.items()}  # fmt: skip

    out["ours"] = run(lambda x, w, b: layer_norm(x, w, b, eps=eps))
    out["torch"] = run(lambda x, w, b: torch.nn.functional.layer_norm(x, (LENGTH,), w, b, eps))
    return out


def finite_differences() -> list[dict[str, float]]:
    """Central differences of <y, dy> along one direction against the oracle's dx, by h."""
    rng = np.random.default_rng(2)
    x, direction, dy = (rng.standard_normal((4, 64)) for _ in range(3))
    weight, bias = rng.standard_normal(64), rng.standard_normal(64)
    exact = (oracle.layer_norm(x, weight, bias, dy)["dx"] * direction).sum()
    rows = []
    for h in (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-9, 1e-11):
        row = {"h": h}
        for name, dtype in (("float64", np.float64), ("float32", np.float32)):
            values = []
            for sign in (1, -1):
                moved = (x + sign * h * direction).astype(dtype)
                y = torch.nn.functional.layer_norm(
                    torch.from_numpy(moved), (64,),
                    *(torch.from_numpy(t.astype(dtype)) for t in (weight, bias)),
                )  # fmt: skip
                values.append(float((y.numpy() * dy.astype(dtype)).sum(dtype=dtype)))
            row[name] = abs((values[0] - values[1]) / (2 * h) - exact) / abs(exact)
        rows.append(row)
    return rows


def main() -> None:
    data = {
        "rows": ROWS, "length": LENGTH, "dtype": "float32", "torch": torch.__version__,
        "cases": [measure(name) for name in CASES],
        "finite_differences": finite_differences(),
    }  # fmt: skip
    OUT.write_text(json.dumps(data, indent=1) + "\n")
    print(OUT.read_text())


if __name__ == "__main__":
    main()
