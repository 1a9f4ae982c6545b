"""Which gradients a flat buffer holds, by value."""

from __future__ import annotations

import pytest
import torch
from sumgrad.ledger.evidence import GradientWatch, segments
from torch import nn

A, B = torch.tensor([1.0, -2.0, 3.0]), torch.tensor([[0.0, 5.0], [7.0, 0.5]])
GRADS = {"a": A, "one": torch.tensor([4.0]), "none": torch.zeros(6), "b": B}


def flat(*parts):
    return torch.cat([p.reshape(-1) for p in parts])


@pytest.mark.parametrize(
    ("buffer", "found"),
    [
        (flat(A, B), [("a", 1.0), ("b", 1.0)]),
        (flat(2 * B, A / 2), [("b", 2.0), ("a", 0.5)]),
        (flat(A, torch.tensor([9.0]), B), [("a", 1.0), ("b", 1.0)]),  # a gradient of one number
        (flat(A, torch.zeros(6), B), [("a", 1.0), ("b", 1.0)]),  # and one of zeros
        (flat(A, torch.tensor([9.0, 8.0]), B), []),  # no two of one number are there
        (flat(A, torch.zeros(20)), [("a", 1.0)]),  # padding
        (flat(A, torch.arange(1.0, 4.0)), [("a", 1.0)]),  # half of it
        (flat(A, torch.arange(1.0, 5.0)), []),  # less: by chance
        (flat(A).long(), []),
        (torch.zeros(4), []),
    ],
)
def test_the_gradients_that_a_buffer_is_made_of(buffer, found):
    assert segments(buffer, GRADS) == found


def test_gradients_whose_squares_are_nothing_are_found():
    tiny = A.double() * 1e-170
    assert segments(flat(tiny / 2), {"a": tiny}) == [("a", 0.5)]


def test_a_gradient_that_goes_in_itself_is_no_other_of_the_same_values():
    """Two norms that weigh one product have one gradient while their weights are alike."""
    params = {n: nn.Parameter(torch.ones(3, dtype=torch.float64)) for n in ("k", "q")}
    watch = GradientWatch(params)
    x = torch.tensor([1.0, -2.0, 3.0]).double()
    (params["k"] * params["q"] * x).sum().backward()
    assert torch.equal(params["k"].grad, params["q"].grad)

    def carried(buffer):
        return watch.observe("allreduce", ([buffer],))[0]["grads"]

    for name, param in params.items():
        assert carried(param.grad) == [[name, 1.0]]
    params["q"].grad /= 4
    assert carried(params["q"].grad) == [["q", 0.25]]
    assert carried(params["k"].grad.clone()) == [["k", 1.0]]  # a copy is any of them
    params["q"].grad.fill_(1.0)  # nothing that a backward gave
    assert carried(params["q"].grad) == []
    watch.begin_step()
    for param in params.values():
        param.grad = None
    (0 * params["k"] * params["q"] * x).sum().backward()
    assert carried(params["q"].grad) == []  # zeros tell nothing
    watch.close()
