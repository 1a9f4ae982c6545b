"""Zeros that a rank puts into a sum, which explain only what is wrong on ranks that get it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sumgrad.diagnose.explainers.by_modules.over_ranks.sums import zeros_put_in

ONES, ZEROS = torch.ones(4), torch.zeros(4)


def looking(rank, wrong, off=ONES):
    return SimpleNamespace(
        rank=rank, back=False, found=SimpleNamespace(ranks=wrong),
        look=SimpleNamespace(sources={"m": "Linear"}),
        truths=lambda op: [SimpleNamespace(module="m")], off_by=lambda op, truth: off,
        goes_into=lambda module, rank: True, shown=lambda op: "the sum",
    )  # fmt: skip


def summed(*given, first=2):
    by_rank = {first + i: SimpleNamespace(given=g) for i, g in enumerate(given)}
    return SimpleNamespace(ranks=tuple(by_rank), by_rank=by_rank, is_sum=True)


@pytest.mark.parametrize(("rank", "wrong", "off", "told"), [
    (2, (2, 3), ONES, True),
    (2, (0, 1, 2, 3), ONES, False),  # ranks 0 and 1 do not get it, and are wrong, too
    (2, (2, 3), ZEROS, False),
])  # fmt: skip
def test_zeros_are_told_where_they_explain_the_first_wrong_rank(rank, wrong, off, told):
    found = zeros_put_in(looking(rank, wrong, off), summed(ONES, ZEROS))
    assert (found is not None) == told
    if found is not None:
        assert found.cause.startswith("rank 3 puts zeros into the sum, although its part of m")
    assert zeros_put_in(looking(rank, wrong, off), summed(ONES, ONES)) is None
