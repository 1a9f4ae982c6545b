"""Ranks that scale what they hold by numbers of their own."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.explainers.of_factors import uniform
from sumgrad.diagnose.row_fit import Factors


def cause(monkeypatch, values, held):
    """values: by rank its factor; held: by rank the parameters that it has."""
    monkeypatch.setattr(uniform, "declared_clip", lambda case: None)
    cells = [SimpleNamespace(rank=r, name=n) for r, names in held.items() for n in names]
    case = SimpleNamespace(cells=cells, reference=SimpleNamespace(factor=1.0))
    factors = {r: Factors(level="parameter", units=(), values=(v,), sigmas=(0.0,))
               for r, v in values.items()}  # fmt: skip
    return uniform.rank_scale(case, factors, ["w", "b"]).cause


@pytest.mark.parametrize(
    ("values", "held", "said"),
    [
        ({0: 1.5}, {0: "wb", 1: "wb"}, "rank 0 has 1.5 times the gradient of w, b; rank 1 holds it "
                                       "right"),
        ({0: 1.5}, {0: "wb", 1: "vx"}, "rank 0 has 1.5 times the gradient of w, b"),  # a stage
        ({0: 1.5, 2: 1.5}, {0: "w", 1: "w", 2: "w"}, "rank 0, 2 has 1.5 times the gradient of w, b;"
                                                     " rank 1 holds it right"),
    ],
)  # fmt: skip
def test_one_factor_of_some_ranks_is_said_with_those_that_hold_it_right(
    monkeypatch, values, held, said
):
    assert cause(monkeypatch, values, held) == said


def test_factors_that_differ_are_listed(monkeypatch):
    said = cause(monkeypatch, {0: 1.5, 1: 0.5}, {0: "w", 1: "w"})
    assert said.startswith("each rank's gradients are the right ones times a number of its own ("
                           "rank 0: 1.5, rank 1: 0.5)")  # fmt: skip


def all_of_it(monkeypatch, own, value, lines=("step.py:9", "step.py:9"), given=True):
    """own: what each backward gave of one parameter, (passes, n), where 1, 2, 3 is right."""
    wanted, gave = torch.tensor([1.0, 2.0, 3.0]).double(), torch.tensor(own).double()
    columns = SimpleNamespace(own=gave, wanted=wanted, passes=len(gave))
    monkeypatch.setattr(uniform, "given_by_ranks", lambda case: {0: ({}, {})} if given else None)
    monkeypatch.setattr(uniform, "columns_of", lambda cell, given: columns)
    monkeypatch.setattr(uniform, "lines_of_backwards", lambda case, rank, name: lines)
    case = SimpleNamespace(failing_cells=[SimpleNamespace(rank=0, name="scale")])
    return uniform._all_of_it_each_time(case, value, "scale", "it fits")


def test_backwards_that_each_give_all_of_it(monkeypatch):
    found = all_of_it(monkeypatch, [[1, 2, 3]] * 2, 2.0)
    assert found.cause == (
        "scale is counted 2 times: each of the 2 backwards of a rank, called at step.py:9, gives "
        "all of it, and they are added up"
    )
    assert (found.kind, found.factor, found.because[0]) == ("factor", "2", "it fits")
    assert "called" not in all_of_it(monkeypatch, [[1, 2, 3]] * 2, 2.0, lines=("", "")).cause


@pytest.mark.parametrize(
    ("own", "value", "given"),
    [
        ([[1, 2, 3], [1, 2, 4]], 2.0, True),  # not all of it
        ([[1, 2, 3]] * 3, 2.0, True),  # more of them than it is counted
        ([[1, 2, 3]], 1.0, True),
        ([[1, 2, 3]] * 2, 2.0, False),  # not known
    ],
)
def test_what_is_not_given_whole_each_time(monkeypatch, own, value, given):
    assert all_of_it(monkeypatch, own, value, given=given) is None


STEPS = {  # by step, what a gradient that should be 1, 2, 3 is
    "the same": ([2.0, 4.0, 6.0], [2.0, 4.0, 6.0]),
    "right": ([2.0, 4.0, 6.0], None),
    "another": ([2.0, 4.0, 6.0], [3.0, 6.0, 9.0]),
    "none": ([2.0, 4.0, 6.0], [2.0, 4.0, 7.0]),
}


@dataclass(frozen=True)
class OfSteps:
    steps: object
    step: int
    record: object
    known: dict = field(default_factory=dict)

    @property
    def failing_cells(self):
        got = self.steps[self.step]
        wanted = SimpleNamespace(value=torch.tensor([1.0, 2.0, 3.0]).double(), threshold=1e-9)
        every = [SimpleNamespace(measured=torch.tensor(got or []).double(), wanted=wanted)]
        return every if got else []


@pytest.mark.parametrize(("steps", "is_one"), [
    ("the same", True), ("right", True), ("another", False), ("none", False),
])  # fmt: skip
def test_a_factor_of_one_step_alone_is_none(steps, is_one):
    case = OfSteps(STEPS[steps], 0, SimpleNamespace(spec=SimpleNamespace(steps=2)))
    told = Diagnosis(cause="every gradient is multiplied by 2", kind="factor")
    found = uniform._unless_later_steps_differ(case, 2.0, told)
    if is_one:
        assert found is told
    else:
        assert found.standing == "open"
        assert found.cause == ("at step 0 every gradient is multiplied by 2; at step 1 it is "
                               "another, or none that all share")  # fmt: skip


@pytest.mark.parametrize(("sizes", "whole"), [
    ({"w": 1.0, "b": 2.0}, True),
    ({"w": 1.0, "b": 2.0, "key.bias": 1e-18}, True),  # as much times nothing
    ({"w": 1.0, "b": 2.0, "v": 1e-6}, False),
])  # fmt: skip
def test_what_is_zero_has_every_factor(sizes, whole):
    cells = [SimpleNamespace(name=n, wanted=SimpleNamespace(size=size, threshold=1e-12))
             for n, size in sizes.items()]  # fmt: skip
    assert uniform._is_every_gradient(SimpleNamespace(cells=cells), ["w", "b"]) == whole
