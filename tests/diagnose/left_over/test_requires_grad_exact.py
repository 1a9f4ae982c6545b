"""Parameters that do not require a gradient when it should come."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.explainers.left_over.frozen import with_frozen
from sumgrad.subjects.program.watched.watch import ModuleWatch
from torch import nn

ZERO, OTHER = torch.zeros(3), torch.ones(3)


def told(cells, frozen, there=()):
    """cells: (rank, name, gradient). frozen: by rank."""
    ranks = {r: SimpleNamespace(frozen=own) for r, own in enumerate(frozen)}
    single = SimpleNamespace(frozen=dict.fromkeys(there, ("forward",)))
    traces = SimpleNamespace(tier="t", step=0, ranks=ranks, single=single)
    case = SimpleNamespace(
        traces=traces,
        failing_cells=[SimpleNamespace(rank=r, name=n, measured=g) for r, n, g in cells],
    )  # fmt: skip
    return with_frozen(case, Diagnosis(cause="what", kind="backward", because=("b",)))


def test_it_is_the_cause_where_it_is_all_that_is_wrong():
    frozen = {"a.w": ("backward",)}
    one = told([(0, "a.w", ZERO), (1, "a.w", ZERO)], [frozen, frozen])
    assert one.cause == (
        "a.w: requires_grad is False on rank 0-1 when the backward reaches its module, and is not "
        "in the single process: autograd gives it no gradient"
    )
    assert (one.kind, one.standing, one.ranks) == ("frozen", "proved", (0, 1))
    early = told([(1, "a.w", ZERO)], [{}, {"a.w": ("forward", "backward")}])
    assert "on rank 1 when its module is called" in early.cause


def test_it_is_beside_the_cause_of_others():
    one = told([(0, "a.w", ZERO), (0, "b.w", OTHER)], [{"a.w": ("backward",)}])
    assert (one.cause, one.kind) == ("what", "backward")
    assert one.because[0].startswith("a.w: requires_grad is False on rank 0")
    assert one.because[1:] == ("b",)
    elsewhere = told([(0, "a.w", ZERO), (1, "a.w", OTHER)], [{"a.w": ("backward",)}, {}])
    assert (elsewhere.cause, elsewhere.standing) == ("what", "likely")  # wrong on rank 1, too


@pytest.mark.parametrize(
    ("gradient", "frozen", "there"),
    [(OTHER, ["a.w"], ()), (ZERO, [], ()), (ZERO, ["a.w"], ("a.w",)), (ZERO, ["b.w"], ())],
)
def test_nothing_is_said_where_it_explains_nothing(gradient, frozen, there):
    held = dict.fromkeys(frozen, ("backward",))
    assert told([(0, "a.w", gradient)], [held], there).because == ("b",)


def test_when_a_parameter_required_no_gradient_is_recorded():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2))
    model[0].bias.requires_grad_(False)
    with ModuleWatch(model) as watching:
        out = model(torch.ones(2, 3)).sum()
        model[1].weight.requires_grad_(False)
        out.backward()
    assert watching.trace().frozen == {"0.bias": ("forward", "backward"), "1.weight": ("backward",)}
