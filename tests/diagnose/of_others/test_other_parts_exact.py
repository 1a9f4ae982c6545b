"""Other parts of a parameter that are added up, from what ranks' backwards gave."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sumgrad.diagnose.explainers.of_others.other_parts import _summed

G = torch.Generator().manual_seed(4)
NUM = 12
OWN = torch.randn(4, 2, NUM, generator=G, dtype=torch.float64)  # of two backwards each
FIRST = torch.arange(NUM)
HALVES = {0: FIRST, 1: FIRST, 2: FIRST + NUM, 3: FIRST + NUM}  # ranks 0-1 and 2-3 hold one half


def given(places=HALVES, own=OWN):
    return {rank: ({"w": own[rank]}, {"w": at}) for rank, at in places.items()}


def cell(measured, rank=0, at=HALVES):
    wanted = SimpleNamespace(threshold=1e-12)
    return SimpleNamespace(name="w", rank=rank, index=at[rank], measured=measured, wanted=wanted)


def total(*ranks):
    return OWN[list(ranks)].sum((0, 1))


def test_a_sum_over_the_other_axis():
    found = _summed(cell(total(0, 2)), given())
    assert (found.ranks, found.alike) == ((0, 2), (0, 1))
    found = _summed(cell(total(1, 2, 3), rank=3), given())
    assert (found.ranks, found.alike) == ((1, 2, 3), (2, 3))


def test_elements_in_another_order():
    """What a rank holds need not be held in the order of the whole parameter."""
    at = {rank: places.flip(0) for rank, places in HALVES.items()}
    found = _summed(cell(total(0, 2), at=at), given(at))
    assert (found.ranks, found.alike) == ((0, 2), (0, 1))


@pytest.mark.parametrize(
    ("measured", "places", "own"),
    [
        (total(0, 1), HALVES, OWN),  # as it has to be
        (total(0), HALVES, OWN),  # not reduced
        (total(2), HALVES, OWN),  # its own is not in it
        (2 * total(0, 2), HALVES, OWN),  # not each once
        (total(0, 2) + 1e-9, HALVES, OWN),  # something else, too
        (total(0, 2), dict.fromkeys(range(4), FIRST), OWN),  # all hold all of it
        (total(0, 2), HALVES, OWN[:1].repeat(4, 1, 1)),  # which of them cannot be told
    ],
)
def test_what_is_none(measured, places, own):
    assert _summed(cell(measured, at=places), given(places, own)) is None


def test_of_few_elements_any_sum_is_possible():
    places = {rank: at[:5] for rank, at in HALVES.items()}
    assert _summed(cell(total(0, 2)[:5], at=places), given(places, OWN[..., :5])) is None
