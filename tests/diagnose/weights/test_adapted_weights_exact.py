"""Calls with another weight than the single process's calls that get the same."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sumgrad.diagnose.explainers.by_modules.forwards.other_weights import handed_other_weights
from sumgrad.diagnose.modules.weights.adapted_weights import weights_of_calls
from sumgrad.diagnose.modules.where.first_wrong import FirstWrong
from sumgrad.record.computed import MODULE, Computation, Computed

G = torch.Generator().manual_seed(3)
X = torch.randn(6, 5, generator=G).double()
OWN, FAST, OTHER = (torch.randn(4, 5, generator=G).double() for _ in range(3))
LINE = ("step.py:3", "w = w - g")


def computed(*calls, module="one"):
    """Of calls of a module: what enters, the weight, and whether a line of the step made it."""
    values, computations = [], []
    for x, weight, made in calls:
        at = len(values)
        values += [x, weight]
        lines = ("", ""), LINE if made else ("", "")
        computations.append(
            Computation(
                function=MODULE + module, line="", code="", takes=(at, at + 1), made_at=lines
            )
        )
    return Computed(computations=tuple(computations), values=tuple(values))


def traces(mine, single):
    return SimpleNamespace(
        ranks={0: SimpleNamespace(computed=mine)},
        single=SimpleNamespace(computed=single, params={"one.weight": OWN}),
    )


SINGLE = computed((X, OWN, False), (X, FAST, True))


@pytest.mark.parametrize(("weight", "made", "told"), [
    (OTHER, True, True),
    (FAST, True, False),  # the second call's
    (OWN.clone(), False, False),
    (OTHER[:2], True, False),  # a part: told elsewhere
    (OTHER, False, False),  # a parameter: told elsewhere
])  # fmt: skip
def test_a_weight_of_no_call_that_gets_the_same(weight, made, told):
    mine = computed((X[:3], OWN, False), (X[3:], weight, made))
    found = list(weights_of_calls(traces(mine, SINGLE), "one", 0))
    assert [(one.call, one.num, one.made, one.of_the_model) for one in found] == (
        [(1, 2, LINE, True)] if told else []
    )


def test_calls_of_others_and_of_what_is_not_there_tell_nothing():
    mine = computed((X[:3] + 1, OTHER, True))
    assert not list(weights_of_calls(traces(mine, SINGLE), "one", 0))
    assert not list(weights_of_calls(traces(mine, SINGLE), "two", 0))
    other = computed((X, OWN, False), module="two")
    assert not list(weights_of_calls(traces(computed((X, OTHER, True)), other), "one", 0))


def said(mine, single, *numbers):
    calls = [SimpleNamespace(rank=0, call=SimpleNamespace(number=n)) for n in numbers]
    spec = SimpleNamespace(tiers={"structure": "float64"})
    case = SimpleNamespace(
        traces=traces(mine, single), tier="structure", record=SimpleNamespace(spec=spec)
    )
    return handed_other_weights(case, FirstWrong(wrong="one", seen=tuple(calls)))


def test_in_words():
    mine = computed((X[:3], OWN, False), (X[3:], OTHER, True), (X[2:], OTHER, True))
    assert said(mine, SINGLE, 1, 2) == (
        "in call 1 on rank 0 it computes with another weight, made at step.py:3 `w = w - g`, than "
        "any of the single process's 2 calls that get the same, of which the first has the model's "
        "own; so in 1 more of its calls: it may be left of what ran before"
    )
    assert said(mine, SINGLE, 0) is None
    assert said(mine, computed((X, FAST, True)), 2) == (
        "in call 2 on rank 0 it computes with another weight, made at step.py:3 `w = w - g`, than "
        "the single process's call that gets the same, which has another: it may be left of what "
        "ran before"
    )
