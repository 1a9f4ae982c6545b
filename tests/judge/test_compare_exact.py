"""One tensor, one norm, one record against the reference: just under a bound, and just over it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from sumgrad.base.tensors import same_bits
from sumgrad.judge.comparison import Expected, TensorDiff, tensor_diff
from sumgrad.judge.verdict_json import tier_verdict

KEY = ("structure", 1)
VALUE = torch.tensor([[3.0, -4.0], [0.0, 12.0]], dtype=torch.float64)  # its norm is 13


def wanted(**change) -> Expected:
    fields = {
        "value": VALUE, "same_dtype": VALUE.float(), "floor": 1e-3, "threshold": 4e-3,
        "scale": 16.0, "terms": {"a": VALUE * 2, "b": -VALUE}, "resolution": {"a": 1e-9, "b": 1e-9},
        "every_term": True, "size": 12.0,
    }  # fmt: skip
    return Expected(**(fields | change))


def diff_of(got, expected: Expected | None = None, **where) -> TensorDiff:
    names = {"name": "w", "unit": "u", "pool": "p", "rank": 3, "tier": "structure", "step": 2}
    return tensor_diff(got, expected or wanted(), **(names | where))


def moved(by: float, at: tuple[int, int] = (0, 1)) -> torch.Tensor:
    out = VALUE.clone()
    out[at] += by
    return out


@pytest.mark.parametrize(
    ("dtype", "size", "seen"),
    [("float64", 900, False), ("float64", 1100, True), ("bfloat16", 3.9, False),
     ("bfloat16", 4.1, True)],
)  # fmt: skip
def test_what_is_more_than_noise_has_to_be_seen(dtype, size, seen):
    """In fewer digits it is nearer to its noise, and no less there."""
    term = torch.full_like(VALUE, size * 1e-6)
    diff = diff_of(VALUE, wanted(terms={"a": term}, resolution={"a": 1e-6}, measured_in=dtype))
    assert (diff.status == "unknown") is seen


def test_a_ratio_is_told_of_numbers_whose_squares_are_nothing():
    tiny = torch.tensor([1e-174], dtype=torch.float64)  # of one element the norm is there
    diff = diff_of(3 * tiny, wanted(value=tiny, same_dtype=None))
    assert diff.ratio == pytest.approx(3.0)


@pytest.mark.parametrize("sign", [1, -1])
def test_an_error_at_the_threshold_passes_and_one_above_fails(sign):
    under, over = diff_of(moved(sign * 3.99e-3)), diff_of(moved(sign * 4.01e-3))
    assert (under.status, under.reason, under.comparable) == ("pass", None, True)
    assert (over.status, over.reason, over.comparable) == (
        "fail", "the error is above the threshold", True
    )  # fmt: skip
    exact = diff_of(VALUE + sign * 0.5, wanted(threshold=0.5))
    assert (exact.status, exact.of_threshold) == ("pass", 1)
    assert over.index == (0, 1)
    assert over.of_threshold == pytest.approx(4.01 / 4)


def test_what_a_diff_says():
    diff = diff_of(moved(-1.0))
    assert (diff.name, diff.unit, diff.pool, diff.rank, diff.tier, diff.step) == (
        "w", "u", "p", 3, "structure", 2
    )  # fmt: skip
    assert diff.max_abs == 1
    assert diff.max_rel == 1 / 12
    assert diff.l2_rel == pytest.approx(1 / 13)
    assert diff.ratio == pytest.approx((169 + 4) / 169)
    assert (diff.noise_floor, diff.threshold) == (1e-3, 4e-3)
    assert diff.max_rel_same_dtype == 1 / 12
    assert diff.l2_rel_same_dtype == pytest.approx(1 / 13)
    assert diff.lost_share_caught == pytest.approx(5e-3 / 16)
    assert diff.power == pytest.approx({"a": 5e-3 / 24, "b": 5e-3 / 12})
    assert diff.smallest_scale_error_caught == pytest.approx(5e-3 / 12)
    half = diff_of(VALUE / 2)
    assert half.ratio == pytest.approx(0.5)
    assert diff_of(moved(1.0, (1, 0))).index == (1, 0)
    of_a_shard = diff_of(torch.tensor([4.0]), wanted(value=torch.tensor([3.0]).double(),
                                                     same_dtype=None))  # fmt: skip
    assert of_a_shard.max_rel == 1 / 12  # of the whole parameter's largest element
    assert of_a_shard.max_rel_same_dtype is None


def test_the_error_is_taken_in_float64():
    value = torch.tensor([1.0 + 1e-12], dtype=torch.float64)
    near = wanted(value=value, same_dtype=None, threshold=0.5e-12, floor=1e-13, terms={"a": value},
                  size=1.0)  # fmt: skip
    assert diff_of(torch.tensor([1.0]), near).status == "fail"
    other = wanted(value=value, same_dtype=torch.tensor([1.0]), threshold=2e-12, floor=1e-13,
                   terms={"a": value}, size=1.0)  # fmt: skip
    assert diff_of(torch.tensor([1.0]), other).max_rel_same_dtype == 0


def test_what_is_zero_or_empty_has_no_ratio():
    zero = wanted(value=torch.zeros(2).double(), same_dtype=torch.zeros(2), terms={}, size=0.0)
    diff = diff_of(torch.tensor([0.0, 2e-3]), zero)
    assert (diff.max_abs, diff.max_rel, diff.l2_rel, diff.ratio) == (
        pytest.approx(2e-3), pytest.approx(2e-3), pytest.approx(2e-3), None
    )  # fmt: skip
    assert diff.max_rel_same_dtype is None
    none = torch.empty(0, 3).double()
    empty = wanted(value=none, same_dtype=none.float(), terms={"a": none}, size=1.0, scale=0.0)
    diff = diff_of(none, empty)
    assert (diff.max_abs, diff.index, diff.power, diff.comparable) == (0, (), {}, True)
    assert (diff.max_rel_same_dtype, diff.l2_rel_same_dtype) == (0, None)
    assert diff.lost_share_caught == math.inf
    assert diff.smallest_scale_error_caught == math.inf
    assert replace(diff, threshold=0.0, max_abs=0.0).of_threshold == 0
    assert replace(diff, threshold=0.0, max_abs=1e-300).of_threshold == math.inf


def test_what_cannot_be_compared_fails_and_says_why():
    missing = diff_of(None)
    assert (missing.status, missing.comparable) == ("fail", False)
    assert "wrote no gradient" in missing.reason
    assert math.isnan(missing.max_abs)
    shape = diff_of(VALUE[:1])
    assert (shape.status, shape.comparable) == ("fail", False)
    assert shape.reason == "got shape (1, 2), expected (2, 2)"
    bad = moved(math.nan, (1, 0))
    diff = diff_of(bad)
    assert (diff.status, diff.comparable, diff.index) == ("fail", False, (1, 0))
    assert diff.reason == "nan at [1, 0]"
    infinite = wanted(value=moved(math.inf))
    assert diff_of(infinite.value, infinite).reason == "the reference itself is not finite"
    assert not diff_of(infinite.value, infinite).comparable


@pytest.mark.parametrize("tier", ["structure", "precision"])
def test_a_tensor_that_could_not_have_failed_is_unknown(tier):
    """need = threshold + floor; a term of size 1 must be seen when its factor is off by a half."""
    every = tier == "structure"

    def status(need: float, size: float = 1.0, **change):
        terms = {"a": VALUE, "b": VALUE * size / 12}
        one = wanted(
            threshold=need * 0.8, floor=need * 0.2, terms=terms, every_term=every, **change
        )
        return diff_of(VALUE, one)

    if every:
        assert status(0.499).status == "pass"
        blind = status(0.501)
        assert (blind.status, blind.reason) == (
            "unknown", "a wrong factor on b would not have been seen"
        )  # fmt: skip
        # The same for the term that comes first.
        assert diff_of(VALUE, wanted(threshold=0.4, floor=0.2, terms={"b": VALUE / 12,
                                     "a": VALUE})).status == "unknown"  # fmt: skip
    else:
        assert status(0.501).status == "pass"
        assert status(11.99).status == "pass"
        blind = status(12.01)
        assert blind.status == "unknown"
        assert blind.reason == "the noise of this dtype would have hidden a wrong factor"


def test_a_term_that_is_zero_by_mathematics_is_left_out_and_a_small_one_is_not():
    small = VALUE * 1e-6 / 12  # its size is 1e-6
    terms = {"a": VALUE, "noise": small}
    left_out = wanted(terms=terms, resolution={"a": 1e-12, "noise": 1.01e-9})
    assert set(diff_of(VALUE, left_out).power) == {"a"}
    assert diff_of(VALUE, left_out).status == "pass"
    counted = wanted(terms=terms, resolution={"a": 1e-12, "noise": 0.99e-9})
    assert set(diff_of(VALUE, counted).power) == {"a", "noise"}
    assert diff_of(VALUE, counted).status == "unknown"


def test_where_no_term_reaches_nothing_was_checked():
    nothing = wanted(value=VALUE * 0, scale=0.0, terms={}, size=0.0)
    diff = diff_of(VALUE * 0, nothing)
    assert (diff.status, diff.reason) == (
        "unknown", "no term reaches this tensor: its gradient is zero, so nothing was checked"
    )  # fmt: skip
    precise = wanted(value=VALUE * 0, scale=1.0, terms={}, size=0.0, every_term=False)
    assert diff_of(VALUE * 0, precise).status == "pass"  # zero by mathematics: only noise


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (torch.tensor([0.0]), torch.tensor([-0.0]), False),
        (torch.tensor([1.0, 2.0]), torch.tensor([[1.0, 2.0]]), False),
        (torch.tensor([1.0]), torch.tensor([1.0]).double(), False),
        (torch.tensor([math.nan]), torch.tensor([math.nan]), True),
        (torch.tensor([[1.0, 2.0], [3.0, 4.0]]).T, torch.tensor([[1.0, 3.0], [2.0, 4.0]]), True),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), False),
        (torch.zeros(1, dtype=torch.int32), torch.zeros(1), False),
    ],
)
def test_same_bits(a, b, same):
    assert same_bits(a, b) == same


def test_a_tier_that_need_not_see_each_term_says_what_it_sees_of_all_of_them():
    """A pass of a coarse dtype beside "factor errors of 17 are caught" said nothing true."""
    small = {"a": VALUE * (1 - 2**-12), "b": VALUE * 2**-12}
    diff = diff_of(VALUE, wanted(every_term=False, terms=small))
    assert diff.status == "pass"
    assert diff.power["b"] > 1
    assert diff.smallest_scale_error_caught == diff.power_whole == pytest.approx(5e-3 / 12)
    assert diff_of(VALUE, wanted(terms=small)).smallest_scale_error_caught == diff.power["b"]
    nothing = wanted(value=torch.zeros(2, 2).double(), size=0.0, every_term=False, terms={})
    assert diff_of(torch.zeros(2, 2), nothing).smallest_scale_error_caught == float("inf")


def test_the_worst_tensor_of_a_tier_is_none_that_is_zero_by_mathematics():
    """Roundings over roundings may be any number; an error that fails is shown in any case."""
    zero = torch.full_like(VALUE, 1e-17)
    near = diff_of(moved(1e-3))
    none = diff_of(zero + 1e-4, wanted(value=zero, size=1e-17), name="key.bias")
    assert none.status != "fail"
    assert none.max_rel > 1e12

    def worst(*diffs):
        tier = tier_verdict("structure", "float64", statuses=["pass"], diffs=diffs, reasons=[])
        return tier.worst_tensor, tier.worst_rel

    assert worst(near, none) == ("w", near.max_rel)
    assert worst(none) == ("key.bias", none.max_rel)
    wrong = diff_of(zero + 1.0, wanted(value=zero, size=1e-17), name="key.bias")
    assert worst(near, wrong) == ("key.bias", wrong.max_rel)
