"""Rows of a gradient that lack what some ranks gave."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from records_in_memory import compared, program_record
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.of_others.lacking_rows import rows_lack_ranks
from sumgrad.diagnose.explanation import Left
from sumgrad.record.ranks import OWN, OWN_AT

AT, RANKS, ROWS, WIDTH = ("structure", 0), 3, 5, 7
TOUCHED = [(0, 1, 4), (1, 2), (1, 3, 4)]  # by each rank


def own_of(rank, passes=2, width=WIDTH):
    drawn = torch.Generator().manual_seed(rank)
    own = torch.zeros(passes, ROWS, width).double()
    for row in TOUCHED[rank]:
        own[:, row] = torch.randn(passes, width, generator=drawn).double()
    return own


def case_of(held, *, wanted=1.0, width=WIDTH, keep=True):
    """held: what each rank ends with of the sums that the ranks gave."""
    record = program_record(tiers={"structure": "float64"}, ranks=RANKS)
    own = [own_of(rank, width=width) for rank in range(RANKS)]
    sums = torch.stack([o.sum(0) for o in own])
    whole = {"w": wanted * sums.sum(0)}
    (reference,) = record.references["structure"]
    reference = replace(
        reference, grads=whole, scale={"w": 4.0}, same_dtype={}, partials={},
        by_term={"loss": whole}, resolution={"loss": {"w": 1e-20}}, kinds={"loss": "coupled"},
        counts={"loss": 1},
    )  # fmt: skip
    at = {"w": torch.arange(ROWS * width)}
    ranks = {}
    for rank, one in record.ranks.items():
        more = {(OWN, 0): {"w": own[rank].reshape(2, -1)}, (OWN_AT, 0): at} if keep else {}
        ranks[rank] = replace(one, grads={AT: {"w": held(sums, rank)}, **more})
    facts = replace(record.spec.facts, params={"w": (ROWS, width)}, terms=("loss",), num_rows=1)
    record = replace(record, spec=replace(record.spec, facts=facts), ranks=ranks,
                     references={"structure": [reference]})  # fmt: skip
    return Case(record=record, tier="structure", step=0, diffs=compared(record).diffs)


def causes(*args, **more):
    return [e.diagnosis for e in rows_lack_ranks(case_of(*args, **more), Left(()))]


def without(*lost):
    """On a rank, in a row, without what some ranks gave."""

    def held(sums, rank):
        total = sums.sum(0).clone()
        for on, row, ranks in lost:
            if on == rank:
                total[row] -= sums[list(ranks), row].sum(0)
        return total

    return held


def test_each_row_is_told_by_itself():
    (told,) = causes(without((0, 1, (1, 2)), (0, 3, (2,)), (2, 1, (1,))))
    assert told.cause == (
        "some rows of w are a sum over too few ranks, the others are whole: w on rank 0 lacks what "
        "rank 1-2 gave in rows 1; w on rank 0 lacks what rank 2 gave in rows 3; w on rank 2 lacks "
        "what rank 1 gave in rows 1"
    )
    assert (told.kind, told.ranks, told.standing) == ("too_few_ranks", (0, 2), "proved")


def test_of_a_mean_and_of_many_places():
    lost = without((0, 0, (0,)), (0, 1, (1,)), (0, 4, (2,)), (1, 0, (0,)), (2, 4, (0,)))
    (told,) = causes(lambda sums, rank: lost(sums, rank) / 3, wanted=1 / 3)
    assert told.cause.endswith("; and 1 more")


def times(factor):
    def held(sums, rank):
        total = sums.sum(0).clone()
        total[1] *= factor
        return total

    return held


@pytest.mark.parametrize(
    ("held", "more"),
    [
        (times(0.5), {}),
        (times(2.0), {}),
        (lambda sums, rank: sums.sum(0) + 0.1, {}),
        (without((0, 1, (1,))), {"wanted": torch.arange(1.0, 6.0).double()[:, None]}),
        (without((0, 1, (1,))), {"width": 2}),  # too few numbers
        (without((1, 2, (1,))), {"width": 1}),
        (without((0, 1, (1,))), {"keep": False}),
    ],
)
def test_what_is_no_such_sum_is_not_said_to_be(held, more):
    assert not causes(held, **more)
