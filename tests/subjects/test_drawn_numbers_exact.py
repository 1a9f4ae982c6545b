"""What a script draws by numpy and by Python's own generator, and how its draws are told apart."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from sumgrad.subjects.script import draws as module
from sumgrad.subjects.script.draws import Draws
from sumgrad.subjects.script.other_generators import see_other_generators


@pytest.fixture
def draws(monkeypatch):
    """All names of both modules come back afterwards."""
    for place in (np.random, random):
        for name, value in list(vars(place).items()):
            if not name.startswith("_"):
                monkeypatch.setattr(place, name, value)
    draws = Draws()
    see_other_generators(draws)
    return draws


@pytest.mark.parametrize(
    "draw",
    [
        lambda: np.random.beta(2.0, 2.0),
        lambda: np.random.randn(3, 2),
        lambda: np.random.default_rng(5).normal(size=4),
        lambda: np.random.default_rng(seed=5).random(),
        lambda: random.random(),  # noqa: PLW0108 (the name is looked up when it is called)
        lambda: random.gauss(0.0, 1.0),
        lambda: torch.randn(3, dtype=torch.bfloat16),
    ],
)
def test_numbers_are_draws_and_the_same_seed_gives_the_same(draws, draw):
    seen = []
    for seed in (0, 0, 1):
        np.random.seed(seed)
        random.seed(seed)
        torch.manual_seed(seed)
        draws.seen(torch.randn, value) if isinstance(value := draw(), torch.Tensor) else None
        taken = draws.taken()
        seen.append([digest for digests in taken.values() for digest in digests])
    assert seen[0]
    assert seen[0] == seen[1]


@pytest.mark.parametrize(
    "draw",
    [
        lambda: np.random.permutation(5),
        lambda: np.random.randint(3, size=4),
        lambda: np.random.default_rng(5).integers(7, size=3),
        lambda: np.random.default_rng(5).permutation(7),
        lambda: random.randint(0, 5),
        lambda: random.sample(range(9), 3),
        lambda: random.shuffle([1, 2, 3]),
    ],
)
def test_integers_are_none(draws, draw):
    draw()
    assert draws.taken() == {}


def test_a_generator_is_what_numpy_makes_of_its_seed(draws):
    given = np.random.Generator(np.random.PCG64(3))
    assert np.random.default_rng(given) is given
    made = np.random.default_rng(3)
    assert isinstance(made, np.random.Generator)
    assert made.normal() == given.normal()


def test_rows_of_one_draw_for_all_are_among_its_own(draws):
    rows = np.arange(12.0).reshape(6, 2)
    found = []
    for kept in (slice(0, 6), slice(2, 4)):
        draws.of_numbers(rows[kept])
        found += draws.taken().values()
    assert [len(digests) for digests in found] == [6, 2]
    assert set(found[1]) < set(found[0])


def test_a_line_that_draws_without_end_is_not_looked_at(draws, monkeypatch):
    monkeypatch.setattr(module, "MOST", 10)
    for _ in range(20):
        random.random()
    np.random.rand()
    assert [len(found) for found in draws.taken().values()] == [1]
