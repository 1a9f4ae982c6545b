"""References of gradients that a step multiplies by one factor: every number by hand."""

from __future__ import annotations

import pytest
import torch
from sumgrad.record.reference import Reference
from sumgrad.record.spec import After
from sumgrad.subjects.program.reference.after import after_step

TIERS = {"structure": torch.float64, "precision": torch.float32}
EPS = {tier: torch.finfo(dtype).eps for tier, dtype in TIERS.items()}


def reference(tier: str, norm: float = 5.0) -> Reference:
    """Gradients 3 and 4, and one without elements; floors of an eighth of a rounding of their 4."""
    grads = {
        "w": torch.tensor([0.0, -3.0]).double(),
        "b": torch.tensor([4.0]).double(),
        "e": torch.zeros(0).double(),
    }
    grads = {n: g * norm / 5 for n, g in grads.items()}
    noise = EPS[tier] / 2
    return Reference(
        step=0, grads=grads, by_term={"loss": grads}, resolution={"loss": {"w": 1e-20, "b": 2e-20}},
        scale={"w": 6.0, "b": 8.0, "e": 0.0}, floor={"w": noise, "b": 2 * noise, "e": 0.0},
        floor_by_term={"loss": {"w": noise, "b": noise}},
        same_dtype={} if tier == "structure" else {n: g.float() for n, g in grads.items()},
        norm=norm, norm_floor=noise, counts={"loss": 2.0}, weights="1234",
    )  # fmt: skip


def after(**fields: object) -> dict[str, Reference]:
    norm = fields.pop("norm", 5.0)
    return after_step({t: reference(t, norm) for t in TIERS}, After(**fields), TIERS)


def test_everything_is_multiplied_by_the_factor_and_the_norm_is_the_one_before_it():
    for tier, r in after(kind="scale", value=0.5).items():
        assert r.grads["w"].tolist() == [0, -1.5]
        assert r.by_term["loss"]["b"].tolist() == [2]
        assert r.resolution == {"loss": {"w": 0.5e-20, "b": 1e-20}}
        assert r.scale == {"w": 3.0, "b": 4.0, "e": 0.0}
        assert r.floor_by_term == {"loss": {"w": EPS[tier] / 4, "b": EPS[tier] / 4}}
        assert (r.norm, r.factor) == (5.0, 0.5)
    precise = after(kind="scale", value=0.5)["precision"]
    assert precise.same_dtype["b"].tolist() == [2]
    assert precise.same_dtype["b"].dtype == torch.float32


def test_a_gradient_that_is_shared_is_multiplied_once():
    r = after(kind="scale", value=3.0)["structure"]
    assert r.grads["w"] is r.by_term["loss"]["w"]


@pytest.mark.parametrize("value", [0.5, 2.0, 0.25])
def test_a_power_of_two_rounds_nothing(value):
    for tier, r in after(kind="scale", value=value).items():
        assert r.floor["b"] == pytest.approx(value * EPS[tier], rel=1e-12)


@pytest.mark.parametrize("value", [0.3, 3.0, 0.75])
def test_another_factor_may_be_off_by_two_roundings_of_the_largest_gradient(value):
    for tier, r in after(kind="scale", value=value).items():
        assert r.floor["w"] == pytest.approx(value * EPS[tier] / 2 + 2 * EPS[tier] * 3 * value)
        assert r.floor["b"] == pytest.approx(value * EPS[tier] + 2 * EPS[tier] * 4 * value)
        assert r.floor["e"] == 0


def test_a_clip_has_the_noise_of_the_norm_besides():
    for tier, r in after(kind="clip", value=1.0, eps=1e-6).items():
        factor = 1 / (5 + 1e-6)
        assert r.factor == factor
        off = 2 * EPS[tier] + EPS[tier] / 2 / 5
        assert r.floor["b"] == pytest.approx(factor * EPS[tier] + off * 4 * factor, rel=1e-6)


def test_a_clip_far_from_its_norm_changes_nothing():
    for tier, r in after(kind="clip", value=100.0).items():
        assert r.factor == 1
        assert r.grads["w"].tolist() == [0, -3]
        assert r.floor == {"w": EPS[tier] / 2, "b": EPS[tier], "e": 0.0}


def test_a_norm_within_its_noise_of_the_clip_may_be_clipped_or_not():
    """4 floors of the norm: nearer than that the factor is not 1 for sure."""
    for part, near in ((3.9, True), (4.1, False)):
        found = after_step(
            {"structure": reference("structure")},
            After(kind="clip", value=5.0 + part * EPS["structure"] / 2, eps=0.0), TIERS,
        )["structure"]  # fmt: skip
        assert found.factor == 1
        noise = EPS["structure"]
        extra = (noise / 2 / 5) * 4 if near else 0.0
        assert found.floor["b"] == pytest.approx(noise + extra, rel=1e-12)


def test_a_gradient_of_zero_has_no_norm_to_divide_by():
    zero = after(kind="clip", value=0.0, eps=0.0, norm=0.0)
    for tier, r in zero.items():
        assert r.factor == 1
        assert r.floor == {"w": EPS[tier] / 2, "b": EPS[tier], "e": 0.0}
