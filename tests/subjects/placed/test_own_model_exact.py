"""The reference's model: the one that build() gives, unless somebody else has its memory."""

from __future__ import annotations

import pytest
import torch
from sumgrad.subjects.program.reference.single import own_model
from torch import nn


class Fresh:
    """With what a copy would lose, and a buffer that has no memory of the usual kind."""

    def build(self) -> nn.Module:
        model = nn.Linear(3, 2)
        model.weight.scale_by = 3.0
        model.weight.register_hook(lambda grad: 0 * grad)
        model.register_buffer("edges", torch.eye(3).to_sparse())
        model.register_buffer("nothing", torch.empty(0))  # in no memory, as that of the next model
        model.register_buffer("elsewhere", torch.empty(3, device="meta"))
        return model


class Cached:
    def __init__(self) -> None:
        self.model = nn.Linear(3, 2)

    def build(self) -> nn.Module:
        return self.model


class Loaded(Cached):
    """Another model each time, over weights that are loaded once."""

    def build(self) -> nn.Module:
        model = nn.Linear(3, 2, device="meta")
        model.load_state_dict(self.model.state_dict(), assign=True)
        return model


def test_a_fresh_model_keeps_its_hooks_and_attributes():
    model = own_model(Fresh())
    assert model.weight.scale_by == 3.0
    model(torch.ones(3)).sum().backward()
    assert not model.weight.grad.any()
    assert model.bias.grad.all()


@pytest.mark.parametrize("kind", [Cached, Loaded])
def test_what_others_have_is_copied(kind):
    program = kind()
    before = program.model.weight.detach().clone()
    for _ in range(2):  # what was found out once holds
        with torch.no_grad():
            own_model(program).weight.mul_(2)
        assert torch.equal(program.model.weight, before)
