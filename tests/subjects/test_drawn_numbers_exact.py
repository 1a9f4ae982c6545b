"""What a script draws by numpy and by Python's own generator, and how its draws are told apart."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
import torch
from sumgrad.base.outcome import IN_WORKERS
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


def test_what_a_forked_process_draws_is_read_where_it_was_forked(draws, tmp_path):
    draws.file = tmp_path / "draws"
    random.random()
    here = draws.taken()
    assert draws.of_workers() == {}
    if (child := os.fork()) == 0:
        random.seed(3)
        random.random()
        np.random.default_rng(5).normal(size=(2, 3))
        os._exit(0)
    os.waitpid(child, 0)
    (place, number), (other, numbers) = sorted(draws.of_workers().items(), key=lambda p: len(p[1]))
    assert place.endswith(IN_WORKERS)
    assert other.endswith(IN_WORKERS)
    assert (len(number), len(numbers)) == (1, 2)  # of rows
    assert draws.taken() == {}
    random.seed(3)
    random.random()
    (again,) = draws.taken().values()
    assert again == number != next(iter(here.values()))


def test_a_forked_rank_that_calls_a_model_draws_for_itself(draws, tmp_path):
    draws.file = tmp_path / "draws"
    told = tmp_path / "told"
    if (child := os.fork()) == 0:
        draws.entering()
        draws.leaving("Net")
        random.random()
        told.write_text(f"{len(draws.taken())} {draws.file.name}")
        os._exit(0)
    os.waitpid(child, 0)
    assert told.read_text() == f"1 draws_{child}"
    assert draws.of_workers() == {}


def test_of_too_many_draws_nothing_is_told(draws, tmp_path, monkeypatch):
    draws.file = tmp_path / "draws"
    draws.file.write_text("abc train.py:3\nabd train.py:3\n")
    assert draws.of_workers() == {f"train.py:3{IN_WORKERS}": ["abc", "abd"]}
    monkeypatch.setattr(module, "MOST_WRITTEN", 8)
    assert draws.of_workers() == {}
