"""What is said to be wrong of a gradient that several backwards give."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sumgrad.diagnose.explainers.by_modules.backward import _what_is_wrong
from sumgrad.diagnose.modules.where.first_wrong import FirstWrong


@pytest.mark.parametrize(("arrivals", "said"), [
    ((1, 1), "the gradient that reaches the output of gate is wrong on rank 0-1"),
    ((3, 3), "the gradient that reaches the output of gate, summed over the 3 backwards that reach "
             "it, is wrong on rank 0-1"),
    ((3, 2), "the gradient that reaches the output of gate, summed over all backwards that reach "
             "it, is wrong on rank 0-1"),
])  # fmt: skip
def test_how_many_backwards_where_that_is_so_on_all_ranks(arrivals, said):
    seen = tuple(
        SimpleNamespace(rank=rank, call=SimpleNamespace(arrivals=often))
        for rank, often in enumerate(arrivals)
    )
    look = SimpleNamespace(sources={})
    assert _what_is_wrong(look, FirstWrong(wrong="gate", seen=seen), "") == said
