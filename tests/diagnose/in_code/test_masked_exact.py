"""A softmax in which more numbers count than in the single process, or fewer."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from sumgrad.diagnose.explainers.by_modules.in_code.masked import masked_in_words
from sumgrad.diagnose.modules.in_code.masked_otherwise import known_rows, masked_otherwise
from sumgrad.subjects.program.watched.computations import Computations

SCORES = torch.randn(4, 6, 6, generator=torch.Generator().manual_seed(3)).double()
PLACE = torch.arange(6)
BACK = PLACE[:, None] - PLACE
LEAST = torch.finfo(torch.float64).min


def recorded(scores, window, below=float("-inf"), used=6, width=6):
    """Attention that sees `window` places, of which the first `used` enter the loss."""
    with Computations(lambda: ((), 0)) as computations:
        x = scores[..., :width].clone().requires_grad_()
        hidden = ((BACK < 0) | (window <= BACK))[:, :width]
        weights = x.masked_fill(hidden, below).softmax(-1)
        (weights * torch.arange(1.0, 1.0 + width).double())[:, :used].sum().backward()
    return computations.computed()


def told(mine, whole):
    c = next(c for c in mine.computations if c.function == "softmax")
    one = masked_otherwise(c, mine, known_rows(c.function, whole))
    return None if one is None else (one.row, one.now, one.was, one.num)


WHOLE = recorded(SCORES, 3, LEAST)


@pytest.mark.parametrize(("mine", "found"), [
    (recorded(SCORES[1:3], 3), None),
    (recorded(SCORES[1:3], 4), (3, 4, 3, 6)),
    (recorded(SCORES[1:3], 2), (2, 2, 3, 8)),
    (recorded(SCORES[1:3], 4, used=5), (3, 4, 3, 4)),  # of what no gradient reaches nothing
    (recorded(SCORES[1:3], 4, used=3), None),
    (recorded(SCORES[1:3] + 0.5, 4), None),  # other numbers
    (recorded(SCORES[1:3], 3, width=2), None),  # a part of the keys
])  # fmt: skip
def test_how_many_numbers_count(mine, found):
    assert told(mine, WHOLE) == found


def test_numbers_that_are_others_too_are_not_told():
    odd = SCORES[1:3].clone()
    odd[1, 5, 5] += 0.25
    assert told(recorded(odd, 4), WHOLE) is None


def test_in_words():
    mine = recorded(SCORES[1:3], 4)
    c = next(c for c in mine.computations if c.function == "softmax")
    traces = SimpleNamespace(
        ranks={2: SimpleNamespace(computed=mine)}, single=SimpleNamespace(computed=WHOLE)
    )
    case = SimpleNamespace(traces=traces)
    assert masked_in_words(case, [SimpleNamespace(rank=2, mine=c)]) == [
        "on rank 2 more numbers count in what it takes: at place 3 of 6 4 of them, and in the "
        "single process 3 of the same, and so in 5 more of its rows: look at the mask that is "
        "added or filled in before"
    ]
    other = replace(c, site="elsewhere")
    assert masked_in_words(case, [SimpleNamespace(rank=2, mine=other)]) == []
    assert masked_in_words(case, []) == []
