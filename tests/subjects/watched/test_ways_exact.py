"""What autograd passes between modules: each function once, by line, and whose it is."""

from __future__ import annotations

import pytest
import torch
from sumgrad.record.trace import INTO, LOSS, Trace, read_trace, write_trace
from sumgrad.record.ways import Passed
from sumgrad.subjects.program.watched.watch import ModuleWatch
from sumgrad.subjects.program.watched.ways import ways_between
from torch import nn


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


BACKWARD = Twice.backward.__code__.co_firstlineno


class Model(nn.Module):
    def __init__(self, cut: bool = False):
        super().__init__()
        self.first, self.second, self.cut = nn.Linear(3, 4), nn.Linear(4, 2), cut

    def forward(self, x):
        x = self.first(x).unflatten(-1, (2, 2))
        x = Twice.apply(x)
        x = x.flatten(-2)
        return self.second(x.detach() if self.cut else x)


def traced(model: nn.Module, **options) -> Trace:
    watching = ModuleWatch(model, **{"with_ways": True, **options})
    with watching:
        loss = model(torch.ones(5, 3)).square().sum()
        watching.at_loss(loss)
        loss.backward()
    return watching.trace()


def passed(found: Trace, to: str, start: str) -> list[str]:
    return [p.function for p in found.ways[to][start]]


def test_functions_stand_in_the_order_of_the_forward():
    found = traced(Model())
    assert passed(found, f"{INTO}second", "first") == ["View", "Twice", "View"]
    assert passed(found, "second", "first") == ["View", "Twice", "View", "Addmm"]
    assert passed(found, LOSS, "second") == ["Pow", "Sum"]
    assert f"{INTO}first" not in found.ways


def test_a_function_of_the_user_has_its_backward_and_the_line_that_called_it():
    of = traced(Model()).ways[f"{INTO}second"]["first"]
    own = next(p for p in of if p.function == "Twice")
    assert own.own
    assert own.written == f"{__file__}:{BACKWARD}"
    assert own.code == "x = Twice.apply(x)"
    assert own.line.startswith(f"{__file__}:")
    others = [p for p in of if p is not own]
    assert [(p.own, p.written) for p in others] == [(False, "")] * 2
    assert others[0].code == "x = self.first(x).unflatten(-1, (2, 2))"


def test_two_calls_of_a_module_pass_the_same_functions_once():
    model = Model()
    watching = ModuleWatch(model, with_ways=True)
    with watching:
        for _ in range(2):
            model(torch.ones(5, 3)).sum().backward()
    assert passed(watching.trace(), f"{INTO}second", "first") == ["View", "Twice", "View"]


def test_what_is_cut_has_no_way():
    found = traced(Model(cut=True))
    assert "first" not in found.ways.get("second", {})
    assert f"{INTO}second" not in found.ways


def test_what_goes_straight_into_a_module_passes_nothing():
    found = traced(nn.Sequential(nn.Linear(3, 4), nn.Tanh()))
    assert found.ways[f"{INTO}1"] == {"0": ()}


@pytest.mark.parametrize("before", [(False, True), (True, True), (True, False)])
def test_autograds_mode_is_left_as_it_was(before):
    was = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    torch.set_anomaly_enabled(*before)
    try:
        watching = ModuleWatch(Model(), with_ways=True)
        with watching:
            assert torch.is_anomaly_enabled()
            assert not torch.is_anomaly_check_nan_enabled()
        assert (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()) == before
    finally:
        torch.set_anomaly_enabled(*was)


def test_paths_and_ways_do_not_disturb_each_other():
    both, paths = (
        traced(Model(), with_paths=True),
        traced(Model(), with_paths=True, with_ways=False),
    )
    assert both.takes == paths.takes == {
        "first": (), "second": ("first",), "": ("first",), LOSS: ("second", ""),
    }  # fmt: skip
    assert both.ways == traced(Model()).ways


def test_without_being_asked_nothing_is_kept():
    assert traced(Model(), with_ways=False).ways == {}


class Scaled(nn.Module):
    """One weight by way of a view and a function of the user's, and in a layer of torch's."""

    def __init__(self):
        super().__init__()
        self.embed, self.bias = nn.Embedding(4, 3), nn.Parameter(torch.zeros(4))

    def forward(self, ids):
        weight = Twice.apply(self.embed.weight.t())
        return self.embed(ids) @ weight + self.bias


def test_functions_that_give_a_parameter_its_gradient():
    model = Scaled()
    watching = ModuleWatch(model, with_ways=True)
    with watching:
        loss = model(torch.tensor([1, 2])).square().sum()
        watching.at_loss(loss)
        loss.backward()
    found = watching.trace().makers
    assert {n: [p.function for p in own] for n, own in found.items()} == {
        "embed.weight": ["Twice", "Embedding"], "bias": ["Add"],
    }  # fmt: skip
    assert [p.own for p in found["embed.weight"]] == [True, False]


def test_without_a_loss_nobody_knows_what_gives_gradients():
    watching = ModuleWatch(Scaled(), with_ways=True)
    with watching:
        pass
    assert watching.trace().makers == {}


def test_ways_are_read_back(tmp_path):
    found = traced(Model())
    write_trace(tmp_path / "0_trace", found)
    again = read_trace(tmp_path / "0_trace")
    assert (again.ways, again.makers) == (found.ways, found.makers)
    assert found.makers
    assert isinstance(found.ways["second"]["first"][0], Passed)


class GivesMore(nn.Module):
    """Gives once more what is used inside of it, as transformers' models give hidden states."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        scaled = 3 * self.first(x)
        return self.second(scaled), scaled


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = GivesMore()

    def forward(self, x):
        return self.inner(x)[0]


def test_what_an_outer_module_gives_later_is_on_no_way_to_what_came_before():
    found = traced(Outer())
    assert passed(found, f"{INTO}inner.second", "inner.first") == ["Mul"]
    assert "inner" not in found.ways[f"{INTO}inner.second"]
    assert passed(found, LOSS, "inner") == ["Pow", "Sum"]


def test_what_goes_into_a_module_as_another_gave_it_is_made_of_that_one_alone():
    first = torch.ones(2, requires_grad=True) * 2
    second = first.exp()
    made = [("first", first.grad_fn), ("second", second.grad_fn), (f"{INTO}last", second.grad_fn)]
    found = ways_between(made)
    assert set(found[f"{INTO}last"]) == {"second"}
    assert set(found["second"]) == {"first"}
