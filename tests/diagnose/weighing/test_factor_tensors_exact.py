"""Factors of rows and tokens that are what a line gives, on the ranks or in the single process."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from sumgrad.diagnose.explainers.by_modules.weighing.weights import _as_lines_give
from sumgrad.diagnose.modules.in_code.factor_tensors import lines_with_these_factors
from sumgrad.diagnose.modules.where.loss_weights import Share
from sumgrad.record.computed import Computation, Computed

COUNTS, OTHERS = torch.tensor([2, 3, 7, 4]), torch.tensor([3.0, 8.0, 5.0, 6.0])
ROWS = {0: [0, 1], 1: [2, 3]}  # of the ranks


def line(number, value, at, path="/x/a.py"):
    return Computation(
        function="sum", line=f"{path}:{number}", code=f"v{number}", takes=(), gives=(at,),
        made_at=(), site=f"{path}:{number}:0",
    )  # fmt: skip


def process(*lines, path="/x/a.py"):
    """Of (number of a line, what it gives)."""
    return SimpleNamespace(computed=Computed(
        computations=tuple(line(n, v, at, path) for at, (n, v) in enumerate(lines)),
        values=tuple(v for _, v in lines),
    ))  # fmt: skip


def shares(factors, *, number=0):
    """Of each rank in one call. factors: by row, or by token of each."""
    found, tokens = [], factors[0].numel()
    for rank, rows in ROWS.items():
        each = factors[rows].flatten().tolist()
        found.append(Share(
            rank=rank, number=number, rows=tuple(rows), factor=None, by_row={},
            shape=(len(rows), tokens, 5), vectors=dict(enumerate(each)),
            row_of={at: rows[at // tokens] for at in range(len(each))},
        ))  # fmt: skip
    return found


def told(made, ranks, single=(), path="/x/a.py"):
    traces = SimpleNamespace(
        ranks={rank: process(*lines, path=path) for rank, lines in enumerate(ranks)},
        single=process(*single, path=path),
    )
    found, said = (
        lines_with_these_factors(traces, made),
        _as_lines_give(SimpleNamespace(traces=traces), made),
    )
    assert (found is None) == (said == [])
    if found is None:
        return None
    begin, end = (
        "but for one number that all have, these factors are ",
        ", at the same rows and places: look at how that enters the loss",
    )
    (text,) = said
    assert text.startswith(begin)
    assert text.endswith(end)
    return text.removeprefix(begin).removesuffix(end)


def of_ranks(number, value):
    return [[(number, value[rows])] for rows in ROWS.values()]


X, Y = COUNTS.double(), OTHERS.double()
MINE, THEIRS = "what a.py:3 `v3` gives", "what a.py:9 `v9` gives in the single process"


@pytest.mark.parametrize(("factors", "words"), [
    (X, MINE),
    (0.25 / X, f"one over {MINE}"),
    (3 * X.sqrt(), f"the square root of {MINE}"),
    (X**2, f"the square of {MINE}"),
    (Y, THEIRS),
    (1 / Y, f"one over {THEIRS}"),
    (2 * X / Y, f"{MINE} over {THEIRS}"),
    (Y / X, f"{THEIRS} over {MINE}"),
    (X * Y, f"{MINE} times {THEIRS}"),
    (1 / (X * Y), f"one over {MINE} times {THEIRS}"),
    ((Y / X).sqrt(), f"the square root of {THEIRS} over {MINE}"),
    (X + 1e-3, None),
    (X.clamp(max=3), None),  # two that differ say too little
    (torch.tensor([2.0, 3.0, 7.0, 0.0]), None),
    (-X, None),
])  # fmt: skip
def test_the_simplest_that_makes_all_factors_is_told(factors, words):
    """Of whole numbers, too."""
    assert told(shares(factors.double()), of_ranks(3, COUNTS), [(9, OTHERS)]) == words


def test_of_factors_of_which_few_differ_any_line_may_tell():
    assert told(shares(X.clamp(max=3)), of_ranks(3, X.clamp(max=3))) is None
    assert told(shares(X.clamp(max=4)), of_ranks(3, X.clamp(max=4))) == MINE


def test_a_line_that_the_ranks_run_is_told_before_others():
    ranks = [[(2, X[rows] * 2), (3, X[rows])] for rows in ROWS.values()]
    assert told(shares(X), ranks, [(9, X)]) == "what a.py:2 `v2` gives"


def test_each_token_has_its_own():
    factors = torch.stack([X, Y], 1)  # of 4 rows of 2 tokens
    for shape in ((2, 2), (4,), (2, 1, 2)):
        ranks = [[(3, factors[rows].reshape(shape))] for rows in ROWS.values()]
        assert told(shares(factors), ranks) == MINE
    assert told(shares(factors), [[], []], [(9, factors)]) == THEIRS
    assert told(shares(factors), [[], []], [(9, factors[:3])]) is None
    assert told(shares(torch.stack([X, X], 1)), of_ranks(3, X)) == MINE


def test_a_loop_over_the_rows_gives_one_number_each():
    each = [(9, x) for x in OTHERS]
    assert told(shares(Y), [[], []], each) == THEIRS
    assert told(shares(Y), [[], []], each[:3]) is None


def test_every_rank_with_factors_gives_them():
    assert told(shares(X), [*of_ranks(3, X)[:1], [(3, X[:2])]]) is None
    assert told(shares(X), [*of_ranks(3, X)[:1], []]) is None
    assert told(shares(X), of_ranks(3, X), path="/y/site-packages/a.py") is None
    assert told(shares(X), [[(3, X[rows] * 0)] for rows in ROWS.values()]) is None


def test_calls_and_what_is_computed_for_them_go_together():
    made = [*shares(X), *shares(Y, number=1)]
    ranks = [[(3, X[rows]), (3, Y[rows])] for rows in ROWS.values()]
    assert told(made, ranks) == MINE
    assert told(made, [[*own, (3, X[:2])] for own in ranks]) is None  # one more than calls
    assert told(made, [own[::-1] for own in ranks]) is None


def test_of_a_row_that_is_not_known_nothing_is_told():
    first, second = shares(X)
    assert told([first, replace(second, row_of={0: 2})], of_ranks(3, X)) is None
    assert told([], of_ranks(3, X)) is None
