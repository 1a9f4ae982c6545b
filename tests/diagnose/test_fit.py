"""Least squares: what is recovered, what is null, and when a number is called a fraction."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from sumgrad.diagnose.fit import as_fraction, fit_deviation


def columns(num: int, size: int = 200) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, generator=generator, dtype=torch.float64) for _ in range(num)]


def test_known_coefficients_come_back():
    a, b, c = columns(3)
    wanted = [0.25, 1.0, 3.0]
    deviation = sum((w - 1) * x for w, x in zip(wanted, (a, b, c), strict=True))
    fit = fit_deviation([a, b * 1e-6, c * 1e6], deviation)
    assert fit.values[0] == pytest.approx(0.25, abs=1e-12)
    assert fit.explained == pytest.approx(1)
    assert float(fit.residual.abs().max()) < 1e-10


def test_equal_dependent_and_empty_columns_have_no_coefficient():
    a, b, c = columns(3)
    fit = fit_deviation([a, a.clone(), b, torch.zeros_like(a), c], -0.5 * a + 2 * b)
    assert fit.values[0] is None
    assert fit.values[1] is None
    assert fit.values[3] is None
    assert fit.values[2] == pytest.approx(3)
    assert fit.values[4] == pytest.approx(1)
    dependent = fit_deviation([a, b, a + b], a)
    assert dependent.values == [None, None, None]


def test_noise_gives_an_error_bar_that_covers_the_truth():
    a, b, noise = columns(3)
    fit = fit_deviation([a, b], -0.75 * a + 0.01 * noise)
    assert abs(fit.values[0] - 0.25) < 5 * fit.sigmas[0]
    assert fit.sigmas[0] > 1e-4


def test_nothing_to_fit():
    (a,) = columns(1)
    assert fit_deviation([], a).explained == 0
    assert fit_deviation([a], torch.zeros_like(a)).values[0] == 1


@pytest.mark.parametrize(
    ("value", "sigma", "fraction"),
    [
        (0.25, 1e-14, Fraction(1, 4)),
        (1 / 77, 1e-14, Fraction(1, 77)),
        (2.0012, 1e-6, None),
        (2.0012, 1e-14, Fraction(5003, 2500)),
        (0.7390851332151607, 1e-13, None),
        (0.25, 0.2, None),
        (0.2501, 1e-3, None),
        (0.2503, 1e-4, Fraction(1, 4)),
        (None, None, None),
        (float("nan"), 1e-3, None),
    ],
)
def test_fractions_only_where_the_error_allows(value, sigma, fraction):
    assert as_fraction(value, sigma) == fraction
