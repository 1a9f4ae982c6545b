"""The same step on one rank: asked for once, of one pool, without what was planted."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import yaml
from sumgrad.base.errors import UserError
from sumgrad.judge.checks.complete import IN_NO_TIER
from sumgrad.launch import room
from sumgrad.launch.again.one_rank import Ended, OnOneRank
from sumgrad.launch.again.second_looks import DISTRIBUTION, _on_one_rank
from sumgrad.launch.ask import CheckOptions
from sumgrad.record.trial import TRIALS, Change, Trial, add_trial, finish_trials

HERE, THERE = (Change(site=f"f.py:{n}", function="add", way="number", by=2.0) for n in (1, 2))
POOL = {"train": {"axes": {"dp": 2, "tp": 3}}}


def verdict(status="fail", *tensors, reasons=()):
    data = {"tensors": [{"status": t} for t in tensors]}
    return SimpleNamespace(status=status, reasons=reasons, data=data)


@pytest.fixture
def asking(tmp_path):
    """What asks for it, and what it was asked."""

    def made(pools, ends):
        path, asked = tmp_path / "t.yaml", []
        path.write_text(yaml.safe_dump({"name": "t", "workload": "mine", "pools": pools}))

        def again(options, what):
            assert what == "the same on one rank"
            asked.append(options)
            if isinstance(ends, Exception):
                raise ends
            options.out.mkdir()
            (options.out / TRIALS).mkdir()
            for change, right in ((HERE, True), (THERE, False)):
                add_trial(options.out / TRIALS, Trial(change=change, right=right))
            finish_trials(options.out / TRIALS)
            return ends, options.out

        options = CheckOptions(topology=path, fault="a fault", seed=7, search_s=5.0)
        return OnOneRank(options, tmp_path, again), asked

    return made


def test_every_axis_is_one_and_nothing_is_planted(asking, tmp_path):
    alone, asked = asking(POOL, verdict("fail", "fail"))
    assert alone.ended.verdict.status == "fail"
    assert alone.ended is alone.ended
    (options,) = asked
    said = yaml.safe_load(options.topology.read_text())
    assert said["pools"] == {"train": {"axes": {"dp": 1, "tp": 1}, "role": "train"}}
    assert (options.fault, options.seed, options.search_s) == (None, 7, 5.0)
    assert options.tiers == ("structure",)
    assert options.out == tmp_path / "one_rank" / "run"


def test_what_was_tried_there_by_what_came_of_it(asking):
    ended = asking(POOL, verdict("fail", "fail"))[0].ended
    assert (ended.right, ended.wrong) == ((HERE,), {THERE})


@pytest.mark.parametrize(("status", "reasons", "agrees"), [
    ("pass", (), True), ("unknown", (f"{IN_NO_TIER}: bfloat16 at f.py:3",), True),
    ("unknown", (f"{IN_NO_TIER}: bfloat16 at f.py:3", "a rank is lost"), False),
    ("unknown", (), False), ("fail", (f"{IN_NO_TIER}: bfloat16 at f.py:3",), False),
])  # fmt: skip
def test_casts_that_are_lifted_leave_it_right_there(asking, status, reasons, agrees):
    """It runs in float64 alone."""
    assert asking(POOL, verdict(status, "pass", reasons=reasons))[0].ended.agrees is agrees


@pytest.mark.parametrize(
    ("ends", "fails"),
    [
        (verdict("pass", "ok"), False),
        (verdict("fail", "ok", "fail"), True),
        (verdict("fail", "ok"), False),  # by something else
        (verdict("unknown", "fail"), False),
    ],
)
def test_it_fails_there_where_a_gradient_is_wrong(asking, ends, fails):
    assert asking(POOL, ends)[0].ended.fails is fails


@pytest.mark.parametrize(
    "pools",
    [
        {"train": {"axes": {"dp": 1}}},  # that is it already
        {"a": {"axes": {"dp": 2}}, "b": {"axes": {"dp": 3}}},  # each is a rank
    ],
)
def test_nothing_is_run_where_there_is_no_fewer_rank(asking, pools):
    alone, asked = asking(pools, verdict())
    assert alone.ended is None
    assert asked == []


def test_what_cannot_be_run_on_one_rank_says_nothing(asking):
    alone, asked = asking(POOL, UserError("the axis tp must be at least 2"))
    assert alone.ended is None
    assert alone.ended is None
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("status", "outcomes", "said"),
    [
        ("pass", [], DISTRIBUTION),
        ("unknown", [{"status": "raised", "detail": "ValueError: three owners"}],
         "whether it is right on one rank is not known: there it raises ValueError: three owners"),
        ("unknown", [{"status": "ok", "detail": ""}], None),
    ],
)  # fmt: skip
def test_what_is_said_of_one_rank(status, outcomes, said):
    ended = verdict(status, "pass")
    ended.data["outcomes"] = outcomes
    assert _on_one_rank(SimpleNamespace(ended=Ended(verdict=ended))) == said
    assert _on_one_rank(SimpleNamespace(ended=None)) is None


def test_very_many_ranks_are_said_to_share_cores(monkeypatch):
    monkeypatch.setattr(room, "_cores", lambda: 2)
    assert room.on_few_cores(32) == ""
    assert room.on_few_cores(33) == " on 2 cores"
