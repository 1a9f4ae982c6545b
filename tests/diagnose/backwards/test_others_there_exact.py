"""What the vectors beside wrong ones have in common."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from sumgrad.diagnose.explainers.by_modules.backwards.others_there import the_others, zero_on_others
from sumgrad.diagnose.modules.values.matching import Match
from sumgrad.diagnose.modules.values.seen import Seen
from sumgrad.diagnose.modules.where.first_wrong import FirstWrong
from sumgrad.record.trace import Call

NAN = float("nan")
CALL = Call(module="m", number=2, part=0, operation=0, operation_back=0, recomputed=False)


def found(*factors, **more):
    seen = []
    for rank, own in enumerate(factors):
        n = len(own)
        where = Match(found=torch.eye(n).bool(), columns=(0, 3), picked=torch.arange(10, 10 + n),
                      empty=torch.zeros(n).bool())  # fmt: skip
        seen.append(Seen(rank=rank, call=CALL, shape=(n, 3), where=where, backward="wrong",
                         factors=torch.tensor(own, dtype=torch.float64)))  # fmt: skip
    return FirstWrong(wrong="m", seen=tuple(seen), **more)


@pytest.mark.parametrize(
    ("factors", "said"),
    [
        (([1, NAN, 1], [1, 1, NAN]), []),
        (([NAN, NAN], [NAN, NAN]), []),
        (([3, NAN, 3], [NAN, 3, 3]), ["the others there have the factor 3"]),
        (([3, NAN, 3], [NAN, 2, 2]), ["the others there have the factor 3"]),  # of what is told
        (([1, NAN, 1], [1, 1, 0, 1, NAN]), []),
        (
            ([1, 1, 0, 1, NAN], [1, NAN, 1]),
            ["the others there are right but for factors, on rank 0 in call 2: 1 at 10-11, 13, 0 "
             "at 12"],
        ),
        (
            ([1, 2, 3, 4, 5, NAN],),
            ["the others there are right but for factors of their own, on rank 0 in call 2"],
        ),
    ],
)  # fmt: skip
def test_only_what_is_so_is_said_of_the_others(factors, said):
    assert list(the_others(found(*factors))) == said


def test_beside_vectors_that_no_gradient_reaches():
    assert list(the_others(found([1, NAN], emptied=True))) == ["the others there are right"]


def test_what_ddp_divides_by_is_said():
    said = "the others there have the factor 3, and DDP divides by 3 later"
    assert list(the_others(found([3, NAN, 3]), 3)) == [said]
    assert list(the_others(found([3, NAN, 3]), 1)) == [said.partition(",")[0]]


@pytest.mark.parametrize(("others", "said"), [
    ([[0, 0], [NAN, 0]], ["on rank 1-2 it is zero, and in the single process it is not"]),
    ([[0, 0], [0, 3]], ["on rank 1 it is zero, and in the single process it is not"]),
    ([[3, 3], [NAN, NAN]], []),
])  # fmt: skip
def test_other_ranks_that_get_nothing(others, said):
    wrong = found([3, NAN])
    right = [replace(s, rank=i + 1, backward="right")
             for i, s in enumerate(found(*others).seen)]  # fmt: skip
    look = SimpleNamespace(seen={"m": [*wrong.seen, *right]})
    assert list(zero_on_others(look, wrong)) == said
    several = [*look.seen["m"], replace(right[0], factors=torch.tensor([2.0, 2.0]).double())]
    told = list(zero_on_others(SimpleNamespace(seen={"m": several}), wrong))
    assert not any("rank 1" in text for text in told)  # in another call it gets some
