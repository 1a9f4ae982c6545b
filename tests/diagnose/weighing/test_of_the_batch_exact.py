"""Factors of tokens that are numbers of the batch; weights that something later makes good."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sumgrad.diagnose.explainers.by_modules.weighing import weights
from sumgrad.diagnose.explainers.by_modules.weighing.of_the_batch import field_with_these
from sumgrad.diagnose.modules.where.loss_weights import Share

VISIBLE = torch.tensor([[1.0, 0.3], [0.6, 1.0], [0.3, 0.6]]).double()
EACH = 4  # places in a row: two for each number


def shares(factor, rows=((0, 1), (2,)), unknown=()):
    """factor: of a row and a place; on two ranks."""
    found = []
    for rank, own in enumerate(rows):
        at = {i * EACH + p: (row, p) for i, row in enumerate(own) for p in range(EACH)}
        found.append(Share(
            rank=rank, number=0, rows=tuple(own), factor=None, by_row={},
            shape=(len(own), EACH, 5),
            vectors={n: factor(*place) for n, place in at.items()},
            row_of={n: row for n, (row, _) in at.items() if row not in unknown},
        ))  # fmt: skip
    return found


def beside(row, place):
    return float(VISIBLE[row, place // 2])


def in_turn(row, place):
    return float(VISIBLE[row, place % 2])


@pytest.mark.parametrize(("factor", "said"), [
    (beside, "these factors are `visible` of the batch"),
    (in_turn, "these factors are `visible` of the batch"),
    (lambda r, p: 7 * beside(r, p), "these factors are `visible` of the batch"),
    (lambda r, p: 1 / in_turn(r, p), "these factors are one by `visible` of the batch"),
    (lambda r, p: beside(r, p) ** 2, "these factors are the square of `visible`"),
    (lambda r, p: beside(r, p) ** 0.5, "these factors are the square root of `visible`"),
])  # fmt: skip
def test_factors_that_are_a_field(factor, said):
    batch = {"other": torch.randn(3, 4), "visible": VISIBLE, "mask": VISIBLE > 0.5}
    assert field_with_these(batch, shares(factor)).startswith(said)


@pytest.mark.parametrize(("batch", "found"), [
    ({"visible": VISIBLE}, shares(lambda r, p: beside(r, p) + 0.01 * (r == 2))),
    ({"visible": VISIBLE}, shares(beside, unknown=(1,))),
    ({"visible": VISIBLE}, shares(lambda r, p: 0.0 if p == 3 else beside(r, p))),
    ({"visible": VISIBLE[:2]}, shares(beside)),
    ({"visible": torch.randn(3, 3)}, shares(beside)),  # three in a row of four
    ({"one": torch.ones(3)}, shares(lambda r, p: 1.0)),  # what all have tells nothing
    ({"two": torch.tensor([1.0, 2.0, 1.0])}, shares(lambda r, p: [1.0, 2.0, 1.0][r])),
    ({"number": torch.tensor(3.0)}, shares(beside)), (None, shares(beside)),
    ({"flags": VISIBLE > 0.5}, shares(beside)), ({"visible": VISIBLE}, []),
])  # fmt: skip
def test_factors_that_are_none(batch, found):
    assert field_with_these(batch, found) is None


def test_numbers_of_rows():
    years = torch.tensor([3, 5, 9])
    found = field_with_these({"years": years}, shares(lambda r, p: 2.0 / int(years[r])))
    assert found.startswith("these factors are one by `years` of the batch")


def made_good(factors=(1.0, 2.0, 0.5), wrong=(), live=True, calls=((0, 0), (0, 1), (1, 0))):
    """Of a head that is called for each share; what is wrong, by name."""
    held = [Share(rank=r, number=n, rows=(), factor=f, by_row={})
            for (r, n), f in zip(((0, 0), (0, 1), (1, 0)), factors, strict=True)]  # fmt: skip
    cells = [SimpleNamespace(name=name, measured=torch.full((3,), float(live)))
             for name in ("encoder.weight", "head.weight", "head.bias")]  # fmt: skip
    case = SimpleNamespace(
        cells=cells, failing_cells=[c for c in cells if c.name in wrong],
    )  # fmt: skip
    seen = [SimpleNamespace(rank=r, call=SimpleNamespace(number=n, recomputed=False))
            for r, n in calls]  # fmt: skip
    look = SimpleNamespace(modules=("encoder", "head", "squash"), seen={"head": seen})
    return weights._is_made_good(case, look, held)


@pytest.mark.parametrize(("good", "more"), [
    (True, {"wrong": ("encoder.weight",)}),
    (False, {"wrong": ("head.bias",)}),
    (False, {"wrong": ("encoder.weight",), "factors": (1.0, None, 0.5)}),  # within a call
    (False, {"wrong": ("encoder.weight",), "factors": (2.0, 2.0, 2.0)}),
    (False, {"wrong": ("encoder.weight",), "live": False}),
    (False, {"wrong": ("encoder.weight",), "calls": ((0, 0), (0, 1))}),  # not for all of them
])  # fmt: skip
def test_weights_that_what_follows_makes_good_are_no_cause(good, more):
    assert made_good(**more) is good
