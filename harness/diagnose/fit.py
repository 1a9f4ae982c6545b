"""Least squares on partials: coefficients with their errors, or null where the data cannot tell."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

NULL_SPACE = 1e-9  # singular values below this part of the largest are no information
MAX_DENOMINATOR = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """values[i] is None where column i is not identifiable. residual: y - A c, as y."""

    values: list[float | None]
    sigmas: list[float | None]
    residual: Tensor
    explained: float


def fit_deviation(columns: Sequence[Tensor], deviation: Tensor) -> Fit:
    """Fit deviation = sum (c_i - 1) column_i. All (m,), float64, already scaled by tensor.

    Columns are normalised; the truncated SVD leaves out directions without information, and a
    column that has a part in one of them has no coefficient.
    """
    if not columns:
        return Fit(values=[], sigmas=[], residual=deviation, explained=0.0)
    matrix = torch.stack(list(columns), dim=1)
    lengths = matrix.norm(dim=0)
    safe = torch.where(lengths > 0, lengths, torch.ones_like(lengths))
    u, s, vh = torch.linalg.svd(matrix / safe, full_matrices=False)
    keep = s > NULL_SPACE * s[0] if s[0] > 0 else torch.zeros_like(s, dtype=torch.bool)
    inverse = torch.where(keep, 1 / torch.where(keep, s, torch.ones_like(s)), torch.zeros_like(s))
    solved = vh.T @ (inverse * (u.T @ deviation))
    residual = deviation - (matrix / safe) @ solved
    freedom = max(len(deviation) - int(keep.sum()), 1)
    noise = float(residual.square().sum() / freedom) ** 0.5
    sigma = noise * ((vh.T * inverse).square().sum(1)).sqrt() / safe
    lost = 1 - (vh.T[:, keep]).square().sum(1) if bool(keep.any()) else torch.ones_like(lengths)
    known = (lengths > 0) & (lost < 1e-6)
    values = [
        float(1 + v / n) if ok else None
        for v, n, ok in zip(solved, safe, known.tolist(), strict=True)
    ]
    size = float(deviation.square().sum())
    explained = 1 - float(residual.square().sum()) / size if size else 0.0
    return Fit(
        values=values,
        sigmas=[float(x) if ok else None for x, ok in zip(sigma, known.tolist(), strict=True)],
        residual=residual,
        explained=explained,
    )


def as_fraction(value: float | None, sigma: float | None) -> Fraction | None:
    """The simplest fraction within the error, if there is one that is clearly simpler."""
    if value is None or sigma is None or not math.isfinite(value):
        return None
    error = max(4 * sigma, 1e-12 * max(1.0, abs(value)))
    for limit in (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, MAX_DENOMINATOR):
        guess = Fraction(value).limit_denominator(limit)
        if abs(float(guess) - value) <= error:
            # A fraction is evidence only if few others of that size would have fitted.
            return guess if error * guess.denominator**2 < 0.05 else None
    return None
