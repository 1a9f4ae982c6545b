"""What passes and what does not, just above and just below every bound, in plain numbers."""

from __future__ import annotations

import math

import pytest
import torch
from sumgrad.base.tolerances import noise_floor, threshold, with_kernels, zero_factor
from sumgrad.subjects.noise_floor import (
    FEW_ROWS,
    Run,
    differences,
    error,
    floor_runs,
    measure_floor,
    norm,
    raise_floor,
)

EPS64, EPS32 = 2.0**-52, 2.0**-23


@pytest.mark.parametrize(
    ("dtype", "factor"), [("float64", 1e3), ("float32", 1e3), ("float16", 10.24), ("bfloat16", 4.0)]
)
def test_less_noise_is_called_zero_where_there_are_fewer_digits(dtype, factor):
    assert zero_factor(dtype) == factor


@pytest.mark.parametrize(
    ("floor", "scale", "dtype", "wanted"),
    [
        (0.0, 3.0, "float64", 3 * EPS64),
        (0.0, 3.0, "float32", 3 * EPS32),
        (0.0, 3.0, "bfloat16", 3 * 2.0**-7),
        (3.1 * EPS64, 3.0, "float64", 3.1 * EPS64),
        (2.9 * EPS64, 3.0, "float64", 3 * EPS64),
        (1.0, 3.0, "float32", 1.0),
    ],
)
def test_a_floor_is_never_under_one_rounding_of_the_scale(floor, scale, dtype, wanted):
    assert noise_floor(floor, scale, dtype) == wanted


@pytest.mark.parametrize(
    ("floor", "scale", "tier", "wanted"),
    [
        (1e-13, 1.0, "structure", 4e-13),  # four floors, while they are under the cap
        (1e-15, 1.0, "structure", 1e-13),  # no less: another algorithm rounds more
        (1e-15, 8.0, "structure", 8e-13),
        (1e-15, 0.01, "structure", 4e-15),
        (1e-15, 1.0, "precision", 4e-15),
        (5e-13, 1.0, "structure", 1e-12),  # the cap
        (5e-13, 1.0, "precision", 2e-12),  # which holds in the structure tier only
        (1e-12, 1.0, "structure", 4e-12),  # scale and floor are both noise: the floor holds
        (0.99e-12, 1.0, "structure", 1e-12),
        (1e-3, 2.0, "precision", 4e-3),
        (3e-12, 4.0, "structure", 4e-12),  # the cap goes with the scale
        (0.0, 0.0, "structure", 0.0),
    ],
)
def test_thresholds(floor, scale, tier, wanted):
    assert threshold(floor, scale, tier=tier) == pytest.approx(wanted, rel=1e-12, abs=0)


@pytest.mark.parametrize(
    ("floor", "kernel_error", "scale", "dtype", "wanted"),
    [
        (1e-6, 2e-6, 1.0, "float32", 2e-6),
        (1e-6, 3.9e-6, 1.0, "float32", 3.9e-6),
        (1e-6, 1.0, 1.0, "float32", 4e-6),  # a wrong kernel does not hide in its own error
        (1e-6, 0.5e-6, 1.0, "float32", 1e-6),  # and lowers nothing
        (0.0, 1.0, 1.0, "float32", 4 * EPS32),  # the floor that is known is at least a rounding
        (0.0, 0.0, 1.0, "float32", 0.0),
        (2e-13, 1.0, 1.0, "float64", 2.5e-13),  # in float64 never past the structure cap
        (1e-14, 1.0, 1.0, "float64", 4e-14),
        (1e-12, 1.0, 1.0, "float64", 1e-12),  # a floor above the cap stays, and is not raised
        (2e-13, 1.0, 8.0, "float64", 8e-13),  # the cap goes with the scale
    ],
)
def test_other_kernels_raise_a_floor_within_a_bound(floor, kernel_error, scale, dtype, wanted):
    found = with_kernels(floor, kernel_error, scale, dtype)
    assert found == pytest.approx(wanted, rel=1e-12, abs=0)


# ---- the floor of a run --------------------------------------------------------------------------


def run(**terms: dict[str, list[float]]) -> Run:
    """Terms by name, each a gradient `w` of these numbers; their sum in float64."""
    grads = {
        t: {n: torch.tensor(v, dtype=torch.float64) for n, v in g.items()} for t, g in terms.items()
    }
    total = {n: sum(g[n] for g in grads.values()) for n in next(iter(grads.values()))}
    return Run(by_term=grads, total=total)


def test_an_error_is_a_size_and_sees_both_signs():
    wanted = torch.tensor([1.0, 2.0]).double()
    assert error(torch.tensor([1.0, 1.0]), wanted) == 1
    assert error(torch.tensor([1.5, 2.0]), wanted) == 0.5
    assert error(torch.empty(0), torch.empty(0)) == 0
    assert error(torch.tensor([0.1]), torch.tensor([0.1]).double()) == 0  # compared in float64


def test_a_floor_is_the_largest_error_of_all_runs_by_name_by_term_and_of_the_norm():
    exact = run(a={"w": [3.0, 0.0]}, b={"w": [0.0, 4.0]})
    runs = [
        run(a={"w": [3.5, 0.0]}, b={"w": [0.0, 4.0]}),
        run(a={"w": [3.0, 0.0]}, b={"w": [0.0, 3.75]}),
    ]
    for order in (runs, runs[::-1]):
        floor = measure_floor(exact, order)
        assert floor.by_name == {"w": 0.5}
        assert floor.by_term == {"a": {"w": 0.5}, "b": {"w": 0.25}}
        assert floor.norm == pytest.approx(abs(math.hypot(3.5, 4) - 5))
    low = measure_floor(exact, [run(a={"w": [0.0, 0.0]}, b={"w": [0.0, 4.0]})])
    assert low.norm == pytest.approx(1)  # a norm that is too small is an error too


def test_a_run_on_other_kernels_raises_the_floor_within_its_cap():
    exact = run(a={"w": [4.0, 0.0], "e": []}, b={"w": [0.0, 3.0], "e": []})
    near = [run(a={"w": [4.0 + 1e-6, 0.0], "e": []}, b={"w": [0.0, 3.0 + 2e-6], "e": []})]
    floor = measure_floor(exact, near)
    scale = {"w": 4.0, "e": 0.0}
    far = run(a={"w": [9.0, 0.0], "e": []}, b={"w": [0.0, 3.0 + 3e-6], "e": []})
    raised = raise_floor(floor, exact, [exact, far], scale, torch.float32)
    assert raised.by_name["w"] == pytest.approx(4 * 2e-6, rel=1e-6)
    assert raised.by_name["e"] == 0
    assert raised.by_term["a"]["w"] == pytest.approx(4 * 1e-6, rel=1e-6)
    assert raised.by_term["b"]["w"] == pytest.approx(3e-6, rel=1e-6)
    assert raised.norm == pytest.approx(4 * max(floor.norm, 5 * EPS32), rel=1e-6)
    # A rounding of the scale is the least that is known.
    none = measure_floor(exact, [exact])
    raised = raise_floor(none, exact, [far, far], scale, torch.float32)
    assert raised.by_name["w"] == pytest.approx(4 * 4 * EPS32)
    raised = raise_floor(none, exact, [far], scale, torch.float64)
    assert raised.by_name["w"] == pytest.approx(4 * 4 * EPS64)


def test_norms_and_differences():
    grads = {"w": torch.tensor([3.0]), "b": torch.tensor([4.0], dtype=torch.bfloat16)}
    assert norm(grads) == 5
    wanted = {"t": {"w": torch.tensor([1.0]).double(), "b": torch.tensor([2.0]).double()}}
    got = {"t": {"w": torch.tensor([0.5]), "b": torch.tensor([2.25])}}
    assert differences(got, wanted) == {"t": {"w": 0.5, "b": 0.25}}


@pytest.mark.parametrize("num_rows", [1, 2, 3, 8, 9, 21])
@pytest.mark.parametrize("num_chunks", [1, 5, 40])
def test_runs_of_the_floor_hold_every_row_once_in_different_orders_and_cuts(num_rows, num_chunks):
    runs = floor_runs(num_rows, num_chunks, "cpu")
    few = num_rows <= FEW_ROWS == 8
    assert len(runs) == (16 if few else 8)
    for chunks in runs.values():
        assert sorted(torch.cat(list(chunks)).tolist()) == list(range(num_rows))
    sizes = {name: [len(c) for c in chunks] for name, chunks in runs.items()}
    assert sizes["at once"] == sizes["reversed"] == sizes["permuted"] == [num_rows]
    assert sizes["one by one"] == [1] * num_rows
    assert len(sizes["two chunks"]) == min(2, num_rows)
    assert len(sizes["three chunks"]) == len(torch.arange(num_rows).chunk(min(3, num_rows)))
    assert len(sizes["as many chunks as the largest pool"]) == min(num_chunks, num_rows)
    assert runs["reversed"][0].tolist() == list(range(num_rows))[::-1]
    assert runs["at once"][0].tolist() == list(range(num_rows))
    if num_rows > 8:
        orders = {tuple(runs[n][0].tolist()) for n in ("at once", "permuted", "permuted again")}
        assert len(orders) == 3
        assert torch.cat(list(runs["three chunks"])).tolist() == runs["permuted"][0].tolist()
    if few:
        extra = [n for n in runs if "permuted, " in n]
        assert len([n for n in extra if sizes[n] == [1] * num_rows]) >= 4
        assert len([n for n in extra if len(sizes[n]) == min(2, num_rows)]) >= 4
        if num_rows == 8:
            drawn = {tuple(torch.cat(list(runs[n])).tolist()) for n in extra}
            assert len(drawn) == 4
            assert not drawn & {tuple(runs[n][0].tolist()) for n in ("permuted", "permuted again")}
