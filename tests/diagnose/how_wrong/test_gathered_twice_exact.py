"""A tensor that has some vectors twice on a rank, and each once on another."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sumgrad.diagnose.explainers.by_modules.backwards.gathered_twice import vectors_twice
from sumgrad.diagnose.modules.how_wrong import gathered_twice as module
from sumgrad.diagnose.modules.how_wrong.gathered_twice import Vector, gathered_twice
from sumgrad.record.computed import Computation, Computed

OUT = [torch.randn(2, 3, generator=torch.Generator().manual_seed(r)) for r in range(3)]
CAT = "/x/a.py:4"


def line(gives, site=CAT):
    return Computation(
        function="cat", line=CAT, code="torch.cat(all)", takes=(), made_at=(), gives=gives,
        site=site,
    )  # fmt: skip


def traces(*of_ranks, outputs=OUT, sites=(CAT, "b", "c")):
    """of_ranks: what each rank's line gives, one tensor for each time that it runs."""
    ranks = {}
    for rank, given in enumerate(of_ranks):
        values = given if isinstance(given, list) else [given]
        ranks[rank] = SimpleNamespace(
            calls=[SimpleNamespace(module="text", number=0)],
            outputs=[outputs[rank]],
            computed=Computed(
                computations=tuple(line((i,)) for i in range(len(values))), values=tuple(values)
            ),
        )
    return SimpleNamespace(ranks=ranks)


def of(*ranks):
    return torch.cat([OUT[r] for r in ranks])


def vector(rank, number):
    return Vector(module="text", rank=rank, call=0, number=number)


def test_the_own_part_in_anothers_place():
    (one,) = gathered_twice(traces(of(0, 1, 2), of(1, 1, 2), of(0, 1, 2)))
    assert (one.rank, one.like) == (1, 0)
    assert one.twice == (vector(1, 0), vector(1, 1))
    assert one.never == (vector(0, 0), vector(0, 1))
    assert one.computation.line == CAT


@pytest.mark.parametrize(
    "given",
    [
        [of(0, 1, 2)] * 3,
        [of(1, 1, 2)] * 3,  # on all: it may be meant
        [of(0, 1, 2), of(2, 1, 0), of(1, 0, 2)],  # another order
        [of(0, 1, 2), of(1, 1), of(0, 1, 2)],  # fewer
        [of(0, 1, 2), of(1, 1, 2) * 2, of(0, 1, 2)],  # of no module
        [of(0, 1, 2)[:, :1], of(1, 1, 2)[:, :1], of(0, 1, 2)[:, :1]],
        [of(0, 1, 2)[0], of(1, 1, 2)[0], of(0, 1, 2)[0]],
        [torch.zeros(3, 3), OUT[0][[0, 0, 1]], torch.ones(3, 3)],  # no rank has the same
    ],
)
def test_what_each_has_once_or_all_have_twice_is_not_told(given):
    assert not [*gathered_twice(traces(*given))]


def test_the_rank_that_shares_most_is_what_it_is_held_against():
    other = [*OUT, torch.randn(2, 3), torch.randn(2, 3)]
    given = [torch.cat([other[i] for i in own]) for own in ((3, 4, 0), (1, 1, 2), (0, 1, 2))]
    found = traces(*given, torch.zeros(1, 2), torch.zeros(1, 2), outputs=other)
    (one,) = gathered_twice(found)
    assert (one.rank, one.like) == (1, 2)


def test_a_line_is_told_once_and_turn_by_turn():
    right, wrong = of(0, 1, 2), of(1, 1, 2)
    (one,) = gathered_twice(traces([right, right], [right, wrong], [right, right]))
    assert one.rank == 1
    assert len([*gathered_twice(traces([right] * 2, [wrong] * 2, [right] * 2))]) == 1
    assert not [*gathered_twice(traces([right, wrong], [right, wrong], [right, wrong]))]


def test_of_replicas_the_own_is_named():
    same = [OUT[0], OUT[0], OUT[2]]
    found = traces(of(0, 2), OUT[0].repeat(2, 1), of(0, 2), outputs=same)
    (one,) = gathered_twice(found)
    assert one.twice == (vector(1, 0), vector(1, 1))
    assert one.never == (vector(2, 0), vector(2, 1))


def test_large_tensors_are_left_out(monkeypatch):
    monkeypatch.setattr(module, "MOST_VECTORS", 5)
    assert not [*gathered_twice(traces(of(0, 1, 2), of(1, 1, 2), of(0, 1, 2)))]


def said(given, ranks):
    return vectors_twice(SimpleNamespace(traces=traces(*given)), ranks)


def test_in_words():
    given = of(0, 1, 2), of(1, 1, 2), of(0, 1, 2)
    assert said(given, (1,)) == [
        "a.py:4 `torch.cat(all)` gives on rank 1 vectors 0-1 of what text gives on rank 1 in call "
        "0 twice and vectors 0-1 of what text gives on rank 0 in call 0 not at all; on rank 0 each "
        "once"
    ]
    assert not said(given, (2,))  # which is right there
    assert not said(given, (0, 1))  # what it is held against is wrong
    assert not vectors_twice(SimpleNamespace(traces=None), (1,))


def test_of_many_ranks_two_are_shown():
    other = [torch.randn(2, 3, generator=torch.Generator().manual_seed(10 + i)) for i in range(5)]
    given = [torch.cat(other)] + [torch.cat([*other[:4], other[0]])] * 4
    (text,) = vectors_twice(SimpleNamespace(traces=traces(*given, outputs=other)), (1, 2, 3, 4))
    assert "; and the like on 2 more; on rank 0 each once" in text
