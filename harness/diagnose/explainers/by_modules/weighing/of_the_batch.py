"""Factors of tokens that are a field of the batch: a weight that is there once more, or not."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from sumgrad.diagnose.modules.where.loss_weights import Share
from torch import Tensor

FIT = 1e-6  # a part of each factor
FEWEST = 3  # factors that differ
POWERS = {1.0: "{}", -1.0: "one by {}", 2.0: "the square of {}", 0.5: "the square root of {}",
          -2.0: "one by the square of {}", -0.5: "one by the square root of {}"}  # fmt: skip


def field_with_these(batch: Mapping[str, Tensor] | None, shares: Sequence[Share]) -> str | None:
    """In words; None where no field has a number for each row, or place of one, that is a vector's
    factor but for one that all have."""
    vectors = [*_vectors(shares)]
    if len(vectors) < sum(len(s.vectors) for s in shares) or not vectors:
        return None  # of some the row is not known
    rows, places, factors = zip(*vectors, strict=True)
    told = torch.tensor(factors, dtype=torch.float64)
    for name, field in (batch or {}).items():
        if field.is_complex() or field.dtype is torch.bool or not field.dim():
            continue
        for here in _at(field.double(), rows, places):
            for power, words in POWERS.items():
                if _is_it(here**power, told):
                    return (f"these factors are {words.format(f'`{name}`')} of the batch, at the "
                            f"same rows and places: as where it weighs once more, or once less"
                           )  # fmt: skip
    return None


def _vectors(shares: Sequence[Share]) -> Iterator[tuple[int, tuple[int, int], float]]:
    """Row, its place and of how many, factor."""
    for s in shares:
        each = max(math.prod(s.shape[1:-1]), 1)
        for at, factor in s.vectors.items():
            if at in s.row_of:
                yield s.row_of[at], (at % each, each), factor


def _at(field: Tensor, rows: Sequence[int], places: Sequence[tuple[int, int]]) -> Iterator[Tensor]:
    """A field's numbers there: one for each place, for several beside each other, or in turn."""
    flat = field.reshape(len(field), -1)
    size = flat.shape[1]
    if max(rows) >= len(flat) or any(each % size for _, each in places):
        return
    row = torch.tensor(rows)
    yield flat[row, torch.tensor([at * size // each for at, each in places])]
    if size > 1:
        yield flat[row, torch.tensor([at % size for at, _ in places])]


def _is_it(here: Tensor, told: Tensor) -> bool:
    """Whether these are the factors, but for one that all have."""
    known = (told != 0) & here.isfinite()
    if not bool(known.all()) or len(here.round(decimals=6).unique()) < FEWEST:
        return False
    ratio = here / told
    return bool(((ratio - ratio[0]).abs() <= FIT * ratio[0].abs()).all())
