"""The canonical tree over rows: nodes of any cut, and one root of all of them."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sumgrad.base.tree import TreeError, node, node_keys, root

ROWS = (
    torch.randn(33, 5, generator=torch.Generator().manual_seed(3))
    * torch.logspace(-6, 6, 33)[:, None]
)


def cut_root(cuts, num):
    """The root from what owners of [a, b) bring, each his nodes."""
    held = {}
    for a, b in itertools.pairwise(cuts):
        own = {(0, row): ROWS[row] for row in range(a, b)}
        for key in node_keys(a, b, num):
            assert key not in held
            held[key] = node(key, own, num)
    return root(held, num)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 33), st.data())
def test_every_cut_gives_the_same_bits(num, data):
    inner = data.draw(st.lists(st.integers(0, num), max_size=8))
    alone = root({(0, row): ROWS[row] for row in range(num)}, num)
    assert torch.equal(cut_root([0, *sorted(inner), num], num), alone)


def test_plain_sums_do_not():
    whole = root({(0, row): ROWS[row] for row in range(29)}, 29)
    assert not torch.equal(ROWS[:29].sum(0), whole)
    halves = ROWS[:13].sum(0) + ROWS[13:29].sum(0)
    assert not torch.equal(halves, whole)


@pytest.mark.parametrize(("a", "b", "num", "keys"), [
    (0, 8, 8, ((3, 0),)),
    (0, 7, 7, ((3, 0),)),  # nothing follows the last row
    (0, 7, 8, ((2, 0), (1, 2), (0, 6))),
    (3, 8, 8, ((0, 3), (2, 1))),
    (25, 27, 27, ((0, 25), (1, 13))),  # and no node lies behind it
    (4, 4, 8, ()), (8, 8, 8, ()), (0, 1, 1, ((0, 0),)),
])  # fmt: skip
def test_an_owner_brings_the_largest_complete_nodes(a, b, num, keys):
    assert node_keys(a, b, num) == keys


def test_order_and_shape_of_the_tree_are_these():
    """((0 + 1) + (2 + 3)) + 4 of five: written down, so that another tree is noticed."""
    words = {(0, row): Word(str(row)) for row in range(5)}
    assert root(words, 5).text == "(((0+1)+(2+3))+4)"
    assert root({(0, 0): Word("0")}, 1).text == "0"


class Word:
    def __init__(self, text):
        self.text = text

    def __add__(self, other):
        return Word(f"({self.text}+{other.text})")


def test_a_row_that_nobody_brought_is_said():
    held = {(0, row): ROWS[row] for row in range(6) if row != 4}
    with pytest.raises(TreeError, match="nobody brought row 4"):
        root(held, 6)


def test_what_is_brought_is_not_changed():
    held = {(0, row): ROWS[row].clone() for row in range(4)}
    root(held, 4)
    assert all(torch.equal(value, ROWS[row]) for (_, row), value in held.items())
