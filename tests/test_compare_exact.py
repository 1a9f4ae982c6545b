"""One tensor, one norm, one record against the reference: just under a bound, and just over it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from records_in_memory import FLOOR, SCALE, planned_record, with_rank
from sumgrad.compare import (
    Expected,
    TensorDiff,
    compare_replicas,
    compare_scalars,
    compare_tensors,
    complete_ranks,
    expect,
    expect_norms,
    same_bits,
    tensor_diff,
)

KEY = ("structure", 1)
VALUE = torch.tensor([[3.0, -4.0], [0.0, 12.0]], dtype=torch.float64)  # its norm is 13


@pytest.fixture(scope="module")
def record():
    return planned_record()


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
        one = wanted(threshold=need * 0.8, floor=need * 0.2, terms=terms, every_term=every, **change)
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
        "unknown", "no term reaches this tensor, so nothing was checked"
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


# ---- a whole record ------------------------------------------------------------------------------


def test_a_home_is_compared_with_all_terms_and_a_replica_with_its_own(record):
    plan, reference = record.plan, record.references["structure"][0]
    how = {"tier": "structure", "dtype": "float64", "every_term": True}
    home = expect(plan, reference, "b0", "v.V", **how)
    assert set(home.terms) == {"stoch", "faith", "ppgd"}
    assert torch.equal(home.value, reference.grads["v.V"])
    assert home.same_dtype is reference.same_dtype["v.V"]
    assert (home.scale, home.floor) == (SCALE, FLOOR)
    assert home.threshold == 4 * FLOOR
    assert home.size == float(reference.grads["v.V"].abs().max())
    replica = expect(plan, reference, "ppgd", "v.V", **how)
    assert set(replica.terms) == {"ppgd"}
    assert torch.equal(replica.value, reference.by_term["ppgd"]["v.V"])
    assert replica.same_dtype is None
    assert replica.threshold == pytest.approx(4 * FLOOR / 4)
    assert replica.resolution == {"ppgd": 1e-20}


def test_every_tensor_of_every_rank_in_every_tier_and_step(record):
    diffs = list(compare_tensors(record))
    assert {d.status for d in diffs} == {"pass"}
    found = {(d.tier, d.step, d.rank, d.name) for d in diffs}
    expected = {
        (tier, step, rank, name)
        for rank, held in record.ranks.items()
        for (tier, step), grads in held.grads.items()
        for name in grads
    }
    assert found == expected
    assert len(diffs) == len(found)
    assert {d.rank: d.pool for d in diffs} == {
        r: record.spec.topology.pool_of(r).name for r in range(9)
    }


def changed(record, rank: int, name: str, by: float, key=KEY):
    grads = {k: dict(v) for k, v in record.ranks[rank].grads.items()}
    if name in grads[key]:
        tensor = grads[key][name].clone()
        tensor.view(-1)[-1] += by
        grads[key][name] = tensor
    return with_rank(record, rank, grads=grads)


@pytest.mark.parametrize("rank", range(9))
def test_one_element_of_one_rank_is_seen(record, rank):
    name = list(record.ranks[rank].grads[KEY])[-1]
    replica = record.spec.topology.pool_of(rank).name == "ppgd"
    bound = 4 * FLOOR / (4 if replica else 1)  # a replica holds one term, whose floor is smaller
    error = 2.0**-47  # 7.1e-15, exact beside every gradient; a float64 has nothing finer here
    for by, fails in ((error * int(bound / error), False), (error * (int(bound / error) + 1), True)):
        wrong = changed(record, rank, name, by)
        bad = [d for d in compare_tensors(wrong) if d.status == "fail"]
        assert {(d.rank, d.name, d.tier, d.step) for d in bad} == (
            {(rank, name, *KEY)} if fails else set()
        )


def test_the_precision_tier_asks_less_unless_it_is_alone():
    """Noise in which a factor on one term hides, and a lost gradient does not."""

    def statuses(tiers):
        out = planned_record(steps=1, tiers=tiers)
        for reference in out.references["precision"]:
            reference.floor.update(dict.fromkeys(reference.floor, 0.2))  # a factor of a half on 2
        return {d.status for d in compare_tensors(out) if d.tier == "precision" and d.pool == "ci"}

    assert statuses({"structure": "float64", "precision": "float32"}) == {"pass"}
    out = planned_record(steps=1, tiers={"precision": "float32"})
    for reference in out.references["precision"]:
        reference.floor.update(dict.fromkeys(reference.floor, 0.2))
        reference.by_term["imp"]["ci.b"] /= 2  # at most 1.5: a halved term would have passed
    assert {d.name for d in compare_tensors(out) if d.status == "unknown"} == {"ci.b"}


def test_ranks_that_wrote_nothing_of_a_step_are_left_out_and_a_lost_tensor_fails(record):
    grads = {k: v for k, v in record.ranks[1].grads.items() if k != KEY}
    found = {(d.rank, d.tier, d.step) for d in compare_tensors(with_rank(record, 1, grads=grads))}
    assert (1, *KEY) not in found
    assert {(0, *KEY), (2, *KEY), (1, "structure", 0), (8, *KEY)} <= found
    lost = {k: {n: g for n, g in v.items() if n != "ci.b"}
            for k, v in record.ranks[1].grads.items()}  # fmt: skip
    bad = [d for d in compare_tensors(with_rank(record, 1, grads=lost)) if d.status == "fail"]
    assert {(d.rank, d.name) for d in bad} == {(1, "ci.b")}
    assert len(bad) == 4
    gone = replace(record, ranks={r: h for r, h in record.ranks.items() if r != 0})
    assert {d.rank for d in compare_tensors(gone)} == set(range(1, 9))


def test_replicas_are_compared_in_every_pool_by_their_bits(record):
    assert list(compare_replicas(record)) == []
    for rank in (1, 2, 4, 6, 8):
        name = list(record.ranks[rank].grads[KEY])[1]
        wrong = changed(record, rank, name, 2.0**-50)
        (found,) = compare_replicas(wrong)
        assert (found.rank, found.tier, found.step, found.what) == (rank, *KEY, "replicas")
        first = record.spec.topology.pool_of(rank).ranks[0]
        assert found.text == (
            f"rank {first} and rank {rank} hold other bits of {name} after the reduction"
        )
    names = list(record.ranks[8].grads[KEY])[:3]
    wrong = record
    for name in names:
        wrong = changed(wrong, 8, name, 1.0)
    (found,) = compare_replicas(wrong)
    assert f"{names[0]} and 2 more after" in found.text


@pytest.mark.parametrize("rank", [0, 8])
@pytest.mark.parametrize("key", [("structure", 0), ("precision", 1)])
def test_scalars_of_every_tier_step_and_rank(record, key, rank):
    tier, step = key
    reference = record.references[tier][step]
    norm, clipped = expect_norms(record.plan, reference, record.spec.tiers[tier])
    cases = [
        ({"norm": norm.value + 0.99 * norm.threshold}, None),
        ({"norm": norm.value + 1.01 * norm.threshold}, "norm"),
        ({"norm": norm.value - 1.01 * norm.threshold}, "norm"),
        ({"norm": math.nan}, "norm"),
        ({"clipped_norm": clipped.value - 0.99 * clipped.threshold}, None),
        ({"clipped_norm": clipped.value - 1.01 * clipped.threshold}, "clipped norm"),
        ({"weights": "4321"}, "weights"),
        ({"counts": {**record.ranks[rank].steps[key]["counts"], "imp": 1}}, "count"),
        ({"counts": {}}, "count"),
    ]
    for change, what in cases:
        steps = {**record.ranks[rank].steps}
        steps[key] = {**steps[key], **change}
        found = list(compare_scalars(with_rank(record, rank, steps=steps)))
        assert {(f.rank, f.tier, f.step) for f in found} == ({(rank, *key)} if what else set())
        assert {f.what for f in found} == ({what} if what else set()), change


def test_scalars_say_what_was_found(record):
    assert list(compare_scalars(record)) == []
    steps = {**record.ranks[0].steps}
    steps[KEY] = {**steps[KEY], "counts": {"imp": 7}, "norm": 1.0, "weights": "x"}
    found = {f.what: f.text for f in compare_scalars(with_rank(record, 0, steps=steps))}
    value = record.references["structure"][1].norm
    assert found["count"] == "divides imp by 7; the data say 12"
    assert found["norm"] == f"norm 1; the reference has {value:.9g}"
    assert "other weights" in found["weights"]
    gone = {k: v for k, v in record.ranks[0].steps.items() if k != KEY}
    assert list(compare_scalars(with_rank(record, 0, steps=gone))) == []


def test_norms_and_when_they_are_seen(record):
    reference = record.references["structure"][0]
    value = reference.norm
    norm, clipped = expect_norms(record.plan, reference, "float64")
    assert (norm.field, norm.value) == ("norm", value)
    assert norm.threshold == pytest.approx(4 * FLOOR * value)
    factor = 0.25 / (value + 1e-6)
    assert (clipped.field, clipped.value) == ("clipped_norm", pytest.approx(factor * value))
    assert clipped.threshold == pytest.approx(
        factor * 4 * FLOOR * value + 2 * 2**-52 * factor * value, rel=1e-9
    )
    rough, _ = expect_norms(record.plan, replace(reference, norm_floor=0.0), "bfloat16")
    assert rough.threshold == 4 * 2.0**-7 * value
    small = replace(reference, norm=0.1, norm_floor=1e-3)
    norm, clipped = expect_norms(record.plan, small, "float64")
    assert clipped.value == 0.1  # nothing to clip
    assert norm.seen
    assert replace(norm, threshold=0.05).seen
    assert not replace(norm, threshold=0.0501).seen


def test_a_rank_is_complete_with_every_tier_and_step(record):
    assert list(complete_ranks(record)) == list(range(9))
    for field in ("grads", "steps"):
        held = getattr(record.ranks[7], field)
        short = {k: v for k, v in held.items() if k != ("precision", 1)}
        assert 7 not in complete_ranks(with_rank(record, 7, **{field: short}))
    more = replace(record, spec=replace(record.spec, steps=3))
    assert complete_ranks(more) == {}
