"""What a script's clip hides, from records made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from records_in_memory import SHAPES, compared, found, program_record
from sumgrad.diagnose.diagnose import diagnose
from sumgrad.judge.checks.rescaled import (
    before_the_clip,
    by_its_clips,
    cut_off_before_the_optimizer,
    nothing_hidden_before_the_optimizer,
    unseen_before_the_optimizer,
)
from sumgrad.launch.script.watched.rescaled import _share_cut_off
from sumgrad.record.spec import Script

NAMES = list(SHAPES)


def all_of(factor, clip=True):
    return dict.fromkeys(NAMES, (factor, clip))


def record_of(single, *ranks):
    """single, ranks: of each step, what was told of every parameter."""
    one = program_record(tiers={"structure": "float64"}, steps=len(single), ranks=len(ranks))
    script = Script(command="c", rows=({},) * len(single), losses=((1.0,),) * len(single),
                    rescaled=tuple(single))  # fmt: skip
    held = {
        rank: replace(held, info={
            (tier, step): {**info, "rescaled": {n: list(t) for n, t in ranks[rank][step].items()}}
            for (tier, step), info in held.info.items()
        })
        for rank, held in one.ranks.items()
    }  # fmt: skip
    return replace(one, spec=replace(one.spec, script=script), ranks=held)


def said(single, *ranks):
    findings = found(nothing_hidden_before_the_optimizer, record_of(single, *ranks))
    return [(finding.level, finding.text) for finding in findings]


def test_the_same_factor_on_both_sides_hides_nothing():
    steps = [all_of(0.25), all_of(0.5)]
    assert said(steps, steps, steps) == []
    off = [all_of(0.25 * (1 + 5e-10)), all_of(0.5)]
    assert said(steps, steps, off) == []
    assert said([{}, {}], [{}, {}]) == []


def test_a_factor_that_the_clip_took_away_fails():
    single, ranks = [all_of(0.25), all_of(0.5)], [all_of(0.5), all_of(1.0)]
    ((level, text),) = said(single, ranks, ranks)
    assert level == "fail"
    assert text.startswith("before the script clips them, gradients are 0.5 times what they should")
    assert "at step 0, on rank 0-1" in text
    little = [all_of(0.25 * (1 + 1e-8)), all_of(0.5)]
    assert said(single, single, little)[0][0] == "fail"
    cause = diagnose(compared(record_of(single, ranks, ranks))).causes[0]
    assert cause.cause == (
        "every gradient is multiplied by 1/2 before the script clips it, which equals 1/ranks: the "
        "clip hides it from the optimizer"
    )
    assert (cause.standing, cause.symbol) == ("proved", "1/ranks")


def test_a_clip_that_acts_on_one_side_only():
    """On the ranks the norm stays below the limit, because it is too small."""
    ((level, text),) = said([all_of(0.25)], [{}])
    assert level == "fail"
    assert "are 0.25 times" in text


def wrong_by(record, factors, *, clips):
    """Gradients wrong by a factor for each parameter before a clip that acts as told."""
    for rank, held in record.ranks.items():
        for (tier, step), grads in held.grads.items():
            if tier != "structure":
                continue
            single, own = clips
            for name in list(grads):
                reference = record.references[tier][step].grads[name]
                grads[name] = factors[name] * reference / single * own[rank]
    return record


@pytest.mark.parametrize("clips", [(0.5, (1.0, 1.0)), (0.5, (0.25, 0.25)), (1.0, (0.5, 0.5))])
def test_what_is_wrong_behind_a_clip_is_explained_as_it_was_before_it(clips):
    """The factor that a clip leaves is that of two norms, and no cause."""
    single, own = clips
    record = record_of([all_of(single)], *([all_of(one)] for one in own))
    third = wrong_by(record, dict.fromkeys(NAMES, 1 / 3), clips=clips)
    cause = diagnose(compared(third)).causes[0]
    assert cause.factor == "1/3", cause.cause
    assert "hides" not in cause.cause
    record = record_of([all_of(single)], *([all_of(one)] for one in own))
    unlike = wrong_by(record, {"w": 2.0, "b": 0.5}, clips=clips)
    causes = diagnose(compared(unlike)).causes
    assert "before the script clips it" not in causes[0].cause
    assert found(nothing_hidden_before_the_optimizer, unlike) == []


def test_a_clip_by_another_norm():
    clips = 0.5, (0.25, 0.125)
    record = record_of([all_of(0.5)], [all_of(0.25)], [all_of(0.125)])
    right = wrong_by(record, dict.fromkeys(NAMES, 1.0), clips=clips)
    (cause, *_) = diagnose(compared(right)).causes
    assert (cause.kind, cause.standing) == ("clipping", "proved")
    assert cause.cause == (
        "the clip: gradients are right before it, and it multiplies them by 0.25 on rank 0; by "
        "0.125 on rank 1, where the single run's does by 0.5"
    )


@pytest.mark.parametrize(("factors", "level"), [((0.25, 0.5), "unknown"), ((0.25, 0.25), None)])
def test_a_rescaling_of_the_scripts_own_may_be_meant(factors, level):
    """A constant one hides nothing; one that differs each step may be a clip by hand."""
    single = [all_of(f, clip=False) for f in factors]
    ranks = [all_of(2 * f, clip=False) for f in factors]
    found = said(single, ranks)
    assert [one for one, _ in found] == ([level] if level else [])
    assert level is None or "0.5 times those of the single run" in found[0][1]
    lost = said(single, [all_of(None, clip=False)] * 2)
    assert [one for one, _ in lost] == ([level] if level else [])
    assert level is None or "could not be told" in lost[0][1]


def test_what_tells_nothing_is_left_out():
    """A shard without elements; a gradient that is no multiple of what it was, as with a decay."""
    single = [all_of(0.25), all_of(0.5)]
    ranks = [{NAMES[0]: told} for told in ((0.25, True), (0.5, True))]
    assert said(single, ranks) == []
    none = [all_of(None)] * 2
    assert said(none, single) == []


@pytest.mark.parametrize(
    ("own", "undone"),
    [
        ((0.25, 0.25, 0.25), (0.25, 0.25, 0.25)),
        ((0.25, 0.375, 0.25), (0.25, 0.25, 0.25)),  # one, by something behind the clip
        ((0.25, None, 0.25), (0.25, 0.25, 0.25)),
        ((0.5, 1.0, 0.5), (0.5, 1.0, 0.5)),  # one that the clip was not given
        ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),  # another norm
        ((0.1, 0.2, 0.3), (0.1, 0.2, 0.3)),  # each by its own
        ((0.25 * (1 + 1e-10), 0.25, 0.25), (0.25 * (1 + 1e-10), 0.25, 0.25)),
    ],
)
def test_a_clip_multiplies_all_alike_and_what_does_not_is_behind_it(own, undone):
    mine = {n: f for n, f in zip("abc", own, strict=True) if f is not None}
    told = by_its_clips(dict.fromkeys("abc", 0.25), mine, 1e-9)
    assert tuple(told[n] for n in "abc") == undone


def test_clips_of_several_groups_are_told_apart():
    single = {"a": 0.25, "b": 0.25, "c": 0.25, "d": 0.5, "e": 0.5, "f": None}
    mine = {"a": 0.25, "b": 0.25, "c": 9.0, "d": 0.7, "e": 0.7, "f": 1.0}
    assert by_its_clips(single, mine, 1e-9) == {**mine, "c": 0.25}
    assert by_its_clips(single, {"d": 0.7, "e": 0.8}, 1e-9) == {"d": 0.7, "e": 0.8}
    assert by_its_clips(single, {}, 1e-9) == {}


def test_gradients_before_the_clip_are_those_of_both_sides_divided_by_its_factor():
    record = record_of([all_of(0.25)], [all_of(0.5)])
    before = before_the_clip(record, "structure", 0)
    for name in NAMES:
        first, then = (r.ranks[0].grads["structure", 0][name] for r in (record, before))
        assert torch.equal(then, first / 0.5)
        first, then = (r.references["structure"][0].grads[name] for r in (record, before))
        assert torch.equal(then, first / 0.25)


@pytest.mark.parametrize(("shares", "told"), [
    ({}, []),
    ({NAMES[0]: 0.4}, [("warning", "40 %")]),
    ({NAMES[0]: 0.4, NAMES[1]: 1.0}, [("unknown", "100 %"), ("warning", "40 %")]),
])  # fmt: skip
def test_what_a_clip_by_value_cuts_off_has_no_factor(shares, told):
    record = record_of([{}], [{}], [{}])
    for held in record.ranks.values():
        for info in held.info.values():
            info["saturated"] = shares
    findings = found(cut_off_before_the_optimizer, record)
    assert [f.level for f in findings] == [level for level, _ in told]
    assert all(part in f.text for f, (_, part) in zip(findings, told, strict=True))


@pytest.mark.parametrize(("before", "now", "share"), [
    ([3.0, -2.0, 5.0, 0.0], [1.0, -1.0, 1.0, 0.0], 1.0),
    ([3.0, -0.5, 5.0, 0.0], [1.0, -0.5, 1.0, 0.0], 2 / 3),
    ([3.0, -0.5, 0.2, 0.0], [1.0, -0.5, 0.2, 0.0], 1 / 3),
    ([1.0, -1.0, 0.2, 0.0], [1.0, -1.0, 0.1, 0.0], 0.0),  # something else was done to it
    ([3.0, -0.5, 0.2, 0.0], [1.0, -1.0, 0.3, 0.0], 0.0),  # as where others' are added
    ([1.0, -1.0, 0.2, 0.0], [1.0, -1.0, 0.2, 0.0], 0.0),
    ([float("inf"), 1.0], [float("inf"), 1.0], 0.0),
])  # fmt: skip
def test_how_much_is_cut_off(before, now, share):
    assert _share_cut_off(torch.tensor(before), torch.tensor(now)) == pytest.approx(share)


def unseen(sizes, names):
    """sizes: of each step, how large the first parameter's gradient is; names: that were unseen."""
    record = record_of([{}] * len(sizes), [{}] * len(sizes))
    for info in record.ranks[0].info.values():
        info["unseen"] = names
    first, *others = NAMES
    for reference, size in zip(record.references["structure"], sizes, strict=True):
        grad = reference.grads[first]
        reference.grads[first] = torch.full_like(grad, size / grad.numel() ** 0.5)
        for other in others:
            reference.grads[other] = torch.zeros_like(grad)
    return [(f.level, f.text) for f in found(unseen_before_the_optimizer, record)]


@pytest.mark.parametrize(("sizes", "is_said"), [
    ((0.5, 0.5, 0.5), True), ((0.5, 0.5 * (1 + 5e-6)), True), ((0.5, 0.5 * (1 + 2e-5)), False),
    ((0.5, 0.5, 0.4), False), ((0.5,), False), ((0.5, 0.5, 0.0), False),
    ((0.0, 0.0), False), ((0.5, 0.0), False),
])  # fmt: skip
def test_of_one_size_in_each_step_and_not_seen_before(sizes, is_said):
    told = unseen(sizes, NAMES)
    assert [level for level, _ in told] == ["unknown"] * is_said
    assert all(f"the gradient of {NAMES[0]} is of one size in each step" in t for _, t in told)
    assert unseen(sizes, []) == []
    assert unseen(sizes, NAMES[1:]) == []


def test_parts_that_are_clipped_together_are_of_one_size_together():
    record = record_of([{}] * 2, [{}] * 2)
    for info in record.ranks[0].info.values():
        info["unseen"] = NAMES
    for reference, angle in zip(record.references["structure"], (0.3, 0.8), strict=True):
        sides = torch.tensor([angle]).cos(), torch.tensor([angle]).sin()
        for at, name in enumerate(NAMES):
            reference.grads[name] = sides[at].double() if at < 2 else torch.zeros(1)
    (finding,) = found(unseen_before_the_optimizer, record)
    assert finding.level == "unknown"
