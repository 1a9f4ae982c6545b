"""What a rank's own backwards give a parameter, kept before it is reduced."""

from __future__ import annotations

import torch
from sumgrad.subjects.own_gradients import OwnGradients


def watched(*leaves):
    own = OwnGradients()
    for leaf, index in leaves:
        own.look_at("w", leaf, index)
        leaf.sum().backward()
    return own.taken(["w"])


def test_every_backward_has_its_line():
    leaf = torch.nn.Parameter(torch.ones(4))
    passes, at = watched((leaf, None), (leaf, None))
    assert passes["w"].tolist() == [[1.0] * 4] * 2
    assert at["w"].tolist() == [0, 1, 2, 3]


def test_a_parameter_that_is_cut_otherwise_in_some_backwards_is_not_told_of():
    """As under FSDP, where one backward gives the whole of it and another one's own shard."""
    whole, shard = torch.nn.Parameter(torch.ones(6)), torch.nn.Parameter(torch.ones(2))
    assert watched((whole, None), (shard, torch.tensor([4, 5]))) == ({}, {})
    assert watched((shard, torch.tensor([4, 5])), (whole, None)) == ({}, {})
