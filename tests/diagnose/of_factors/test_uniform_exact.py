"""Ranks that scale what they hold by numbers of their own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
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
