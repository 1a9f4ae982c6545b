"""Parameters of one shape that hold one sum, of what belongs to each of them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sumgrad.diagnose.explainers.of_others import one_sum_for_all as module
from sumgrad.diagnose.explainers.of_others.one_sum_for_all import one_sum_for_all
from sumgrad.diagnose.explanation import Left

DRAWN = torch.Generator().manual_seed(5)
RIGHT = {n: torch.randn(4, 3, generator=DRAWN).double() for n in ("a.w", "b.w", "c.w")}
RIGHT |= {n: torch.randn(1, generator=DRAWN).double() for n in ("a.b", "b.b")}


def causes(monkeypatch, held, *, exact=True, right=RIGHT):
    """held: by name what each of two ranks has."""
    monkeypatch.setattr(module, "explained", lambda case, diagnosis: diagnosis)
    cells = [
        SimpleNamespace(name=name, rank=rank, measured=value,
                        wanted=SimpleNamespace(value=right[name], threshold=1e-13))
        for rank in (0, 1) for name, value in held.items()
    ]  # fmt: skip
    case = SimpleNamespace(exact=exact, failing_cells=cells)
    return list(one_sum_for_all(case, Left(())))


def one_sum(*names):
    total = sum(RIGHT[n] for n in names)
    return {n: total * (1 + 1e-15 * i) for i, n in enumerate(names)}  # summed in other orders


def test_one_buffer_for_several_is_told(monkeypatch):
    (told,) = causes(monkeypatch, one_sum("a.w", "b.w", "c.w") | one_sum("a.b", "b.b"))
    assert told.cause == (
        "a.w, b.w, c.w all hold the same, the sum of the right gradients of all 3; and so a.b, "
        "b.b, each with those of its shape: look for one buffer, or one key, that is used for all "
        "of them"
    )
    assert (told.kind, told.standing, told.ranks) == ("shared_buffer", "proved", (0, 1))


@pytest.mark.parametrize(
    "held",
    [
        {"a.w": RIGHT["a.w"] + RIGHT["b.w"]},  # alone
        {"a.w": RIGHT["a.w"]},  # and no more than rounding away from its own
        {n: 2 * v for n, v in one_sum("a.w", "b.w").items()},
        {n: RIGHT["a.w"] for n in ("b.w", "c.w")},  # a third one's
        one_sum("a.w", "b.w") | {"c.w": 2 * RIGHT["c.w"]},  # another mistake beside it
        {},
    ],
)
def test_what_is_no_such_sum_is_not(monkeypatch, held):
    assert causes(monkeypatch, held) == []


def test_of_fewer_digits_or_of_nothing_nothing_is_told(monkeypatch):
    assert causes(monkeypatch, one_sum("a.w", "b.w"), exact=False) == []
    right = {**RIGHT, "b.w": torch.zeros(4, 3).double()}
    assert causes(monkeypatch, {n: RIGHT["a.w"] for n in ("a.w", "b.w")}, right=right) == []
