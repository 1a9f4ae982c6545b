"""Whether vectors that were found by their values stand where the single process has them."""

from __future__ import annotations

import math

import torch
from sumgrad.diagnose.modules.values.matching import Match
from sumgrad.diagnose.modules.values.whole import Whole, vectors_a_row


def in_order(where: Match, wanted: Whole, shape: tuple[int, ...]) -> bool:
    """Whether each row of a rank's output is a stretch of one row of the single process's.

    shape: of that output, rows first: (rows, ..., C). Vectors that do not count, as padding, are
    not asked. False where another order could be the right one, as with rows dealt out in turn.
    """
    if len(shape) < 2:
        return True
    own = math.prod(shape[1:-1])
    theirs = 0 if wanted.rows is None else vectors_a_row(wanted.rows)
    if not theirs:  # rows and positions are one dimension
        own, theirs = math.prod(shape[:-1]), where.found.shape[1]
    counts = where.found.any(1)
    found = where.found.reshape(len(where.found), -1, theirs)
    for row in (where.picked // own)[counts].unique():
        mine = (where.picked // own == row) & counts
        if not _is_a_stretch(found[mine], where.picked[mine] % own, theirs):
            return False
    return True


def _is_a_stretch(found: torch.Tensor, at: torch.Tensor, theirs: int) -> bool:
    """found: (n, rows, theirs) bool, of the vectors at the places `at`, (n,), of one row."""
    each = torch.arange(len(at))
    low, high = int(at.min()), int(at.max())
    return any(
        bool(found[each, :, at + start].all(0).any()) for start in range(-low, theirs - high)
    )
