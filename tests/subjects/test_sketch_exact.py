"""Projections of a kept run: what they see of a change, and what they let be."""

from __future__ import annotations

import pytest
import torch
from sumgrad.record.reference import write_tensors
from sumgrad.subjects.script.reference import Single
from sumgrad.subjects.script.sketch import (
    PROJECTIONS,
    Sketch,
    compare,
    project,
    read_sketch,
    sketch_of,
    write_sketch,
)

SHAPES = {"a": (40, 30), "b": (30,)}


def grads(*, off=0.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    out = {n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in SHAPES.items()}
    noise = torch.Generator().manual_seed(99)
    return {
        n: g + off * torch.randn(g.shape, generator=noise, dtype=torch.float64)
        for n, g in out.items()
    }


def single(*steps, rows="x"):
    return Single(
        params=SHAPES, dtype="float64", grads=tuple(steps), after=(), buffers=(),
        steps=tuple({"rows": {"": [[rows]]}} for _ in steps), unknown=(),
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    write_tensors(tmp_path / "weights_start_0.safetensors", grads(seed=5))
    return tmp_path


@pytest.fixture
def kept(folder):
    run = single(grads(seed=1), grads(seed=2))
    other = single(grads(seed=1, off=1e-13), grads(seed=2, off=1e-13))
    return sketch_of(run, [other], folder)


def since(kept, folder, *steps, **more):
    return compare(kept, single(*steps, **more), folder, name="k", made="then")


def test_a_projection_is_the_sum_of_all_elements_with_signs():
    tensor = torch.arange(1.0, 6.0, dtype=torch.float64)
    units = torch.stack([torch.tensor(project("n", row)) for row in torch.eye(5).double()])
    assert units.abs().eq(1).all()
    torch.testing.assert_close(
        torch.tensor(project("n", tensor)), (tensor @ units.double()).float()
    )
    tiny = torch.tensor([1.0, 1e-15], dtype=torch.float64)
    assert {abs(x) for x in project("n", tiny)} == {1 + 1e-15, 1 - 1e-15}, "in float64"
    assert len(project("n", tensor)) == PROJECTIONS
    assert project("n", tensor) != project("m", tensor)


def test_signs_do_not_depend_on_how_a_tensor_is_laid_out():
    tensor = torch.randn(7, 9).double()
    assert project("n", tensor) == project("n", tensor.T.contiguous().T)
    long = torch.randn(300_000).double()  # longer than what is drawn at once
    a, b = torch.tensor(project("n", long)), torch.tensor(project("n", 2 * long))
    torch.testing.assert_close(2 * a, b)


def test_the_same_run_and_one_as_far_off_as_noise_are_as_they_were(kept, folder):
    for off in (0.0, 1e-13):
        found = since(kept, folder, grads(seed=1, off=off), grads(seed=2, off=off))
        assert found.changed == ()
        assert found.tensors == 2


def test_one_element_and_a_factor_are_seen_at_their_first_step(kept, folder):
    moved = grads(seed=2)
    moved["a"][3, 4] += 1e-9
    found = since(kept, folder, grads(seed=1), moved)
    assert [(c.step, c.name) for c in found.changed] == [(1, "a")]
    scaled = {n: g * (1 + 1e-9) for n, g in grads(seed=1).items()}
    found = since(kept, folder, scaled, moved)
    assert [(c.step, c.name) for c in found.changed] == [(0, "a"), (0, "b")]
    (first, _) = found.changed
    assert first.off == pytest.approx(1e-9 * first.size, rel=1e-3)


def test_a_gradient_that_is_gone_or_not_a_number_is_a_change(kept, folder):
    lost = grads(seed=1)
    del lost["b"]
    assert [c.name for c in since(kept, folder, lost).changed] == ["b"]
    broken = grads(seed=1)
    broken["b"][0] = float("nan")
    assert [c.name for c in since(kept, folder, broken).changed] == ["b"]


def test_a_gradient_of_mere_noise_is_not_called_changed(folder):
    run, other = grads(seed=1), grads(seed=1, off=1e-13)
    run["b"], other["b"] = 1e-15 * run["b"], 1e-15 * grads(seed=7)["b"]
    kept = sketch_of(single(run), [single(other)], folder)
    found = since(kept, folder, {**run, "b": 1e-15 * grads(seed=8)["b"]})
    assert found.changed == ()


@pytest.mark.parametrize("what", ["start", "rows", "names", "steps"])
def test_runs_that_did_not_begin_alike_are_not_compared(kept, folder, what):
    if what == "start":
        write_tensors(folder / "weights_start_0.safetensors", grads(seed=6))
    if what == "names":
        write_tensors(folder / "weights_start_1.safetensors", {"c": torch.ones(2)})
    steps = [grads(seed=1)] * (3 if what == "steps" else 1)
    found = since(kept, folder, *steps, rows="y" if what == "rows" else "x")
    words = {
        "start": "other weights",
        "rows": "other rows",
        "names": "parameters",
        "steps": "3 steps",
    }
    assert words[what] in found


def test_it_is_read_as_it_was_written(kept, tmp_path):
    write_sketch(tmp_path, kept)
    assert read_sketch(tmp_path) == kept
    assert isinstance(kept, Sketch)
