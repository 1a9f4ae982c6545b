"""Gradients that an optimizer finds elsewhere than in `.grad`, and changes without any."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sumgrad.launch.script.watched.gradients import (
    Without,
    is_placed_otherwise,
    is_same_gradient,
    second_gradient,
)
from sumgrad.subjects.script.models import Held
from torch import nn

GRAD = torch.tensor([1.0, -2.0, 3.0])


def parameter(**more):
    p = nn.Parameter(torch.ones(3))
    vars(p).update(more)
    return p


@pytest.mark.parametrize(
    ("held", "is_one"),
    [
        (GRAD, True),
        (GRAD.reshape(3, 1), True),
        (GRAD[:2], False),
        (torch.ones(3, dtype=torch.int64), False),
        (None, False),
        ([1.0, 2.0, 3.0], False),
    ],
)
def test_a_second_gradient_is_a_floating_tensor_of_as_many_numbers(held, is_one):
    assert second_gradient(parameter()) is None
    found = second_gradient(parameter(main_grad=held))
    assert found is (held if is_one else None)


@pytest.mark.parametrize(
    ("beside", "same"),
    [
        (GRAD.clone(), True),
        (torch.zeros(3), True),  # a buffer that is not used
        (2 * GRAD, False),
        (GRAD + torch.tensor([0.0, 0.0, 1e-3]), False),
    ],
)
def test_two_gradients_are_the_same_or_the_second_holds_nothing(beside, same):
    assert is_same_gradient(GRAD, beside) is same


@pytest.mark.parametrize(
    ("param", "grad", "otherwise"),
    [
        (None, None, False),
        (None, ("S(0)",), False),  # of a tensor that is cut by hand
        (("S(0)",), None, False),
        (("S(0)",), ("S(0)",), False),
        (("S(0)",), ("R",), True),
        (("R",), ("P",), True),
    ],
)
def test_a_gradient_that_does_not_lie_as_its_parameter(param, grad, otherwise):
    tensors = [SimpleNamespace(**({} if p is None else {"placements": p})) for p in (param, grad)]
    assert is_placed_otherwise(*tensors) is otherwise


def test_what_a_step_changes_without_a_gradient_is_told_once():
    params = {n: parameter() for n in "abc"}
    held = {n: Held(name=n, param=p, index=None, shape=(3,)) for n, p in params.items()}
    without = Without()
    assert without.after() == []
    without.before({n: held[n] for n in "ab"})
    with torch.no_grad():
        params["b"].add_(1e-12 * params["b"])  # less than a rounding: no change
        params["c"].add_(1.0)  # it had a gradient
    assert without.after() == []
    without.before({n: held[n] for n in "ab"})
    with torch.no_grad():
        params["b"].add_(1e-6)
    assert without.after() == ["b"]
    assert without.after() == []
