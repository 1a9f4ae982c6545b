"""A whole record against the reference: every rank, tier, step, replica and scalar of it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from records_in_memory import FLOOR, SCALE, found, planned_record, program_record, texts, with_rank
from sumgrad.judge.cells import compare, expected, near_misses
from sumgrad.judge.checks.replicas import replicas_of_a_pool
from sumgrad.judge.checks.same_start import counts_and_norms, expect_norms
from sumgrad.judge.knowledge import known_plan
from sumgrad.record.spec import Script

KEY = ("structure", 1)


@pytest.fixture(scope="module")
def record():
    return planned_record()


def test_a_home_is_compared_with_all_terms_and_a_replica_with_its_own(record):
    reference = record.references["structure"][0]
    home = expected(record, reference, "b0", "v.V", "structure")
    assert set(home.terms) == {"stoch", "faith", "ppgd"}
    assert torch.equal(home.value, reference.grads["v.V"])
    assert home.same_dtype is reference.same_dtype["v.V"]
    assert (home.scale, home.floor) == (SCALE, FLOOR)
    assert home.threshold == 4 * FLOOR
    assert home.size == float(reference.grads["v.V"].abs().max())
    replica = expected(record, reference, "ppgd", "v.V", "structure")
    assert set(replica.terms) == {"ppgd"}
    assert torch.equal(replica.value, reference.by_term["ppgd"]["v.V"])
    assert replica.same_dtype is None
    assert replica.threshold == pytest.approx(4 * FLOOR / 4)
    assert replica.resolution == {"ppgd": 1e-20}


def test_every_tensor_of_every_rank_in_every_tier_and_step(record):
    diffs = list(compare(record))
    assert {d.status for d in diffs} == {"pass"}
    seen = {(d.tier, d.step, d.rank, d.name) for d in diffs}
    wanted = {
        (tier, step, rank, name)
        for rank, held in record.ranks.items()
        for (tier, step), grads in held.grads.items()
        for name in grads
    }
    assert seen == wanted
    assert len(diffs) == len(seen)
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
    for by, fails in (
        (error * int(bound / error), False),
        (error * (int(bound / error) + 1), True),
    ):
        wrong = changed(record, rank, name, by)
        bad = [d for d in compare(wrong) if d.status == "fail"]
        assert {(d.rank, d.name, d.tier, d.step) for d in bad} == (
            {(rank, name, *KEY)} if fails else set()
        )


def test_the_precision_tier_asks_less_unless_it_is_alone():
    """Noise in which a factor on one term hides, and a lost gradient does not."""

    def statuses(tiers):
        out = planned_record(steps=1, tiers=tiers)
        for reference in out.references["precision"]:
            reference.floor.update(dict.fromkeys(reference.floor, 0.2))  # a factor of a half on 2
        return {d.status for d in compare(out) if d.tier == "precision" and d.pool == "ci"}

    assert statuses({"structure": "float64", "precision": "float32"}) == {"pass"}
    out = planned_record(steps=1, tiers={"precision": "float32"})
    for reference in out.references["precision"]:
        reference.floor.update(dict.fromkeys(reference.floor, 0.2))
        reference.by_term["imp"]["ci.b"] /= 2  # at most 1.5: a halved term would have passed
    assert {d.name for d in compare(out) if d.status == "unknown"} == {"ci.b"}


def test_ranks_that_wrote_nothing_of_a_step_are_left_out_and_a_lost_tensor_fails(record):
    grads = {k: v for k, v in record.ranks[1].grads.items() if k != KEY}
    seen = {(d.rank, d.tier, d.step) for d in compare(with_rank(record, 1, grads=grads))}
    assert (1, *KEY) not in seen
    assert {(0, *KEY), (2, *KEY), (1, "structure", 0), (8, *KEY)} <= seen
    lost = {k: {n: g for n, g in v.items() if n != "ci.b"}
            for k, v in record.ranks[1].grads.items()}  # fmt: skip
    bad = [d for d in compare(with_rank(record, 1, grads=lost)) if d.status == "fail"]
    assert {(d.rank, d.name) for d in bad} == {(1, "ci.b")}
    assert len(bad) == 4
    gone = replace(record, ranks={r: h for r, h in record.ranks.items() if r != 0})
    assert {d.rank for d in compare(gone)} == set(range(1, 9))


def test_replicas_are_compared_in_every_pool_by_their_bits(record):
    assert found(replicas_of_a_pool, record) == []
    for rank in (1, 2, 4, 6, 8):
        name = list(record.ranks[rank].grads[KEY])[1]
        wrong = changed(record, rank, name, 2.0**-50)
        (bad,) = found(replicas_of_a_pool, wrong)
        assert (bad.level, bad.tier, bad.aside) == ("fail", KEY[0], False)
        first = record.spec.topology.pool_of(rank).ranks[0]
        assert bad.text == (
            f"replicas, {KEY[0]}, step {KEY[1]}, rank {rank}: rank {first} and rank {rank} hold "
            f"other bits of {name} after the reduction"
        )
    names = list(record.ranks[8].grads[KEY])[:3]
    wrong = record
    for name in names:
        wrong = changed(wrong, 8, name, 1.0)
    (text,) = texts(replicas_of_a_pool, wrong)
    assert f"{names[0]} and 2 more after" in text


@pytest.mark.parametrize("rank", [0, 8])
@pytest.mark.parametrize("key", [("structure", 0), ("precision", 1)])
def test_scalars_of_every_tier_step_and_rank(record, key, rank):
    tier, step = key
    reference = record.references[tier][step]
    norm, clipped = expect_norms(known_plan(record), reference, record.spec.tiers[tier])
    cases = [
        ({"norm": norm.value + 0.99 * norm.threshold}, None),
        ({"norm": norm.value + 1.01 * norm.threshold}, "norm"),
        ({"norm": norm.value - 1.01 * norm.threshold}, "norm"),
        ({"norm": math.nan}, "norm"),
        ({"clipped_norm": clipped.value - 0.99 * clipped.threshold}, None),
        ({"clipped_norm": clipped.value - 1.01 * clipped.threshold}, "clipped norm"),
        ({"weights": "4321"}, "weights"),
        ({"counts": {**record.ranks[rank].info[key]["counts"], "imp": 1}}, "count"),
        ({"counts": {}}, "count"),
    ]
    for change, what in cases:
        info = {**record.ranks[rank].info}
        info[key] = {**info[key], **change}
        bad = found(counts_and_norms, with_rank(record, rank, info=info))
        assert {(f.level, f.tier) for f in bad} == ({("fail", tier)} if what else set())
        where = f"{what}, {tier}, step {step}, rank {rank}: "
        assert all(f.text.startswith(where) for f in bad), change


def test_scalars_say_what_was_found(record):
    assert texts(counts_and_norms, record) == []
    info = {**record.ranks[0].info}
    info[KEY] = {**info[KEY], "counts": {"imp": 7}, "norm": 1.0, "weights": "x"}
    value = record.references["structure"][1].norm
    where = "structure, step 1, rank 0: "
    assert texts(counts_and_norms, with_rank(record, 0, info=info)) == [
        f"count, {where}divides imp by 7; the data say 12",
        f"norm, {where}norm 1; the reference has {value:.9g}",
        f"weights, {where}started from other weights than the reference",
    ]
    both = with_rank(with_rank(record, 0, info=info), 2, info=info)
    assert texts(counts_and_norms, both)[0].startswith("count, structure, step 1, rank 0, 2: ")
    gone = {k: v for k, v in record.ranks[0].info.items() if k != KEY}
    assert texts(counts_and_norms, with_rank(record, 0, info=gone)) == []


def test_norms_and_when_they_are_seen(record):
    reference = record.references["structure"][0]
    value = reference.norm
    norm, clipped = expect_norms(known_plan(record), reference, "float64")
    assert (norm.field, norm.value) == ("norm", value)
    assert norm.threshold == pytest.approx(4 * FLOOR * value)
    factor = 0.25 / (value + 1e-6)
    assert (clipped.field, clipped.value) == ("clipped_norm", pytest.approx(factor * value))
    assert clipped.threshold == pytest.approx(
        factor * 4 * FLOOR * value + 2 * 2**-52 * factor * value, rel=1e-9
    )
    rough, _ = expect_norms(known_plan(record), replace(reference, norm_floor=0.0), "bfloat16")
    assert rough.threshold == 4 * 2.0**-7 * value
    small = replace(reference, norm=0.1, norm_floor=1e-3)
    norm, clipped = expect_norms(known_plan(record), small, "float64")
    assert clipped.value == 0.1  # nothing to clip
    assert norm.seen
    assert replace(norm, threshold=0.05).seen
    assert not replace(norm, threshold=0.0501).seen


def test_a_rank_is_complete_with_every_tier_and_step(record):
    assert list(record.complete_ranks()) == list(range(9))
    for field in ("grads", "info"):
        held = getattr(record.ranks[7], field)
        short = {k: v for k, v in held.items() if k != ("precision", 1)}
        assert 7 not in with_rank(record, 7, **{field: short}).complete_ranks()
    more = replace(record, spec=replace(record.spec, steps=3))
    assert more.complete_ranks() == {}


def test_an_error_that_more_runs_may_allow_is_near_and_a_larger_one_is_not(record):
    name = next(iter(record.ranks[1].grads[KEY]))
    error = 2.0**-47  # as above: exact beside every gradient
    assert near_misses(record) == []
    for times, steps in ((3.9, []), (4.1, [1]), (15.9, [1]), (16.1, [])):
        by = error * round(times * FLOOR / error)
        assert near_misses(changed(record, 1, name, by)) == steps, times
    close = changed(record, 1, name, error * round(5 * FLOOR / error))
    assert near_misses(close) == [1]
    assert near_misses(changed(close, 1, name, 1.0, ("structure", 0))) == []
    lost = {k: {n: g for n, g in v.items() if n != name} if k == ("precision", 0) else v
            for k, v in close.ranks[1].grads.items()}  # fmt: skip
    assert near_misses(with_rank(close, 1, grads=lost)) == []


@pytest.mark.parametrize(
    ("script", "float64", "dtype"),
    [(True, None, "float32"), (False, None, "float64"), (False, "a kernel", "bfloat16")],
)
def test_the_dtype_that_a_reference_is_measured_in(script, float64, dtype):
    one = program_record(tiers={"precision": "float32"})
    facts = replace(one.spec.facts, float64=float64)
    told = Script(command="c", rows=({},), losses=((1.0,),)) if script else None
    tiers = {"precision": "float32", "coarse": "bfloat16"}
    record = replace(one, spec=replace(one.spec, facts=facts, script=told, tiers=tiers))
    reference = one.references["precision"][0]
    assert expected(record, reference, "train", "w", "precision").measured_in == dtype
