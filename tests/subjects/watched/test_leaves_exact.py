"""Leaves whose gradient is read, and whether it is there still when more of it comes."""

from __future__ import annotations

import pytest
import torch
from sumgrad.record.computed import computed_as_json, computed_from
from sumgrad.subjects.program.watched.computations import Computations
from torch import nn


def keeps(leaf):
    pass


def takes_away(leaf):
    leaf.grad = None


def zeros(leaf):
    leaf.grad.zero_()


def uncleared(after, *, reads=True, make=lambda: torch.zeros(3).requires_grad_()):
    with Computations(lambda: ((), 0)) as computations:
        leaf = make()
        out = []
        for k in range(3):
            (leaf * (k + 1.0)).sum().backward()
            if reads:
                out.append(leaf.grad.clone())
            after(leaf)
    return computations.computed()


@pytest.mark.parametrize("after", [keeps, takes_away, zeros])
def test_a_leaf_that_is_read_after_each_backward(after):
    computed = uncleared(after)
    assert len(computed.uncleared) == (after is keeps)
    for one in computed.uncleared:
        assert one.made[1] == (
            "def uncleared(after, *, reads=True, make=lambda: torch.zeros(3).requires_grad_()):"
        )
        assert one.read[1] == "out.append(leaf.grad.clone())"
    assert computed_from(computed_as_json(computed), {}).uncleared == computed.uncleared


def test_what_is_read_once_at_the_end_may_add_up():
    assert not uncleared(keeps, reads=False).uncleared


def test_parameters_add_up_by_themselves():
    assert not uncleared(keeps, make=lambda: nn.Parameter(torch.zeros(3))).uncleared
