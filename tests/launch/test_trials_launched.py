"""Ranks that try what would make a failing step right: asked once, and no verdict is lost by it."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from sumgrad.base.errors import LaunchError
from sumgrad.launch.again import trials
from sumgrad.launch.again.one_rank import Ended
from sumgrad.record.trial import (
    TRIALS,
    Asked,
    Change,
    Edit,
    Trial,
    Values,
    add_trial,
    read_asked,
    read_trials,
)

CHANGE = Change(site="f.py:1:2", function="sum", way="sum", axis="tp")
ASKED = Asked(tier="structure", step=0, changes=(CHANGE,), bounds={"w": 1e-9},
              seconds=2.0)  # fmt: skip
WANTED = Values(wanted={"w": torch.ones(2).double()}, before={})


class Launcher:
    def __init__(self, error=None):
        self.jobs, self.error = [], error

    def run(self, job, *, progress):
        self.jobs.append(job)
        if self.error:
            raise self.error


@pytest.fixture
def record(tmp_path):
    pool = SimpleNamespace(name="train")
    topology = SimpleNamespace(world_size=2, pool_of=lambda rank: pool)
    spec = SimpleNamespace(topology=topology, timeout_s=600.0, facts=None)
    return SimpleNamespace(directory=tmp_path, spec=spec)


def tried(record, monkeypatch, gives, *, error=None, seconds=9.0, asked_s=None):
    told, launcher = [], Launcher(error)

    def changes_to_try(*args, seconds, said):
        assert said == "a cause"
        told.append(seconds)
        if isinstance(gives, Exception):
            raise gives
        return gives

    monkeypatch.setattr(trials, "changes_to_try", changes_to_try)
    monkeypatch.setattr(trials, "edited_to_try", lambda *args, **more: None)
    done = trials.try_changes(record, "structure", 0, seconds, "a cause", launcher=launcher,
                              progress=lambda _: None, asked_s=asked_s)  # fmt: skip
    return done.made, launcher.jobs, told


def test_ranks_are_started_once_with_what_they_are_to_try(record, monkeypatch):
    done, jobs, told = tried(record, monkeypatch, (ASKED, WANTED))
    assert done
    assert read_asked(record.directory / TRIALS)[0] == ASKED
    (job,) = jobs
    assert (job.num_ranks, job.pools) == (2, ["train", "train"])
    assert job.timeout_s == ASKED.seconds + trials.LATE_S
    assert told == [9.0 - trials.START_S]


def test_some_time_is_left_whatever_was_needed_before(record, monkeypatch):
    assert tried(record, monkeypatch, None, seconds=-3.0)[2] == [trials.LEAST_S]


@pytest.mark.parametrize("gives", [None, ZeroDivisionError("of ours")])
def test_without_changes_no_rank_is_started(record, monkeypatch, gives):
    done, jobs, _ = tried(record, monkeypatch, gives)
    assert (done, jobs) == (False, [])


def test_a_server_that_dies_takes_no_verdict_away(record, monkeypatch):
    done, jobs, _ = tried(record, monkeypatch, (ASKED, WANTED), error=LaunchError("gone"))
    assert (done, len(jobs)) == (True, 1)


EDITS = tuple(
    Change(site=f"f.py:{line}", function="", way="edit", edit=Edit(
        file="f.py", start=(line, 0), end=(line, 1), old="a", new=new))
    for line, new in ((1, "b"), (1, "c"), (2, "b"), (2, "c"))
)  # fmt: skip


def edited(record, monkeypatch, ends, right=(), seconds=0.0, **more):
    """What each start of ranks was asked. ends: how many each of them comes to."""
    return searched(record, monkeypatch, ends, right, seconds, **more)[0]


def searched(
    record, monkeypatch, ends, right=(), seconds=0.0, *, takes=0.0, looks=1, made=True, **more
):
    """The same, and how many were left. takes: each start of ranks, seconds. looks: how often it
    looks for edits; made: whether anything was tried."""
    asked, ends, folder = [], [*ends], record.directory / TRIALS

    class Ranks:
        def run(self, job, *, progress):
            time.sleep(takes)
            asked.append(read_asked(folder)[0].changes)
            for come in asked[-1][: ends.pop(0)]:
                add_trial(folder, Trial(change=come, right=come in right))
            raise LaunchError("one of them was stuck")

    looked = []
    monkeypatch.setattr(trials, "changes_to_try", lambda *args, **more: None)

    def edited_to_try(*args, set_up, **more):
        looked.extend([] if set_up else [1])
        return None if set_up else (replace(ASKED, changes=EDITS), WANTED)

    monkeypatch.setattr(trials, "edited_to_try", edited_to_try)
    done = trials.try_changes(record, "structure", 0, seconds, "a cause", launcher=Ranks(),
                              progress=lambda _: None, **more)  # fmt: skip
    assert done.made is made
    assert looked == [1] * looks  # once, whatever the ranks come to
    return asked, done.left


def test_ranks_are_started_again_for_what_was_not_tried_yet_a_stuck_line_last(record, monkeypatch):
    one, two, three, four = EDITS
    assert edited(record, monkeypatch, [0, 1, 1]) == [
        (one, two, three, four),
        (three, four, two),  # line 1 had made ranks wait, which came to none
        (two,),  # as did the second of line 2
    ]
    assert [trial.change for trial in read_trials(record.directory)] == [three, two]


def test_no_ranks_are_started_where_an_edit_was_right(record, monkeypatch):
    assert len(edited(record, monkeypatch, [2], right=EDITS[1:2])) == 1


def test_no_more_than_so_many_starts_and_so_long(record, monkeypatch):
    monkeypatch.setattr(trials, "MOST_STARTS", 2)
    assert len(edited(record, monkeypatch, [0, 0])) == 2
    monkeypatch.setattr(trials, "EDITS_S", trials.LEAST_S / 2)
    assert edited(record, monkeypatch, []) == []
    assert len(edited(record, monkeypatch, [0, 0], seconds=9.0)) == 2  # there is time left
    monkeypatch.setattr(trials, "MOST_EDITS_S", trials.LEAST_S / 2)
    assert edited(record, monkeypatch, [], seconds=9.0) == []


def test_so_long_as_is_asked_for_a_third_of_it_for_changes(record, monkeypatch):
    assert tried(record, monkeypatch, (ASKED, WANTED), asked_s=60.0)[2] == [20.0]
    assert tried(record, monkeypatch, (ASKED, WANTED), asked_s=0.0) == (False, [], [])


def test_what_is_asked_for_is_more_than_the_most_of_starts_and_of_time(record, monkeypatch):
    monkeypatch.setattr(trials, "MOST_STARTS", 1)
    monkeypatch.setattr(trials, "MOST_EDITS_S", trials.LEAST_S / 2)
    assert edited(record, monkeypatch, [0, 0]) == []
    assert len(edited(record, monkeypatch, [0, 0, 4], asked_s=60.0)) == 3


@pytest.mark.parametrize(
    ("comes_to", "right", "seconds", "left"),
    [
        (1, (), 0.1, 2),  # of four, and one made them end
        (1, EDITS[:1], 0.1, 0),  # it is known
        (4, (), 0.1, 0),  # all were tried
        (1, (), 30.0, 0),  # what ended them was not the time
    ],
)
def test_how_many_are_left_is_told_where_time_was_too_short(
    record, monkeypatch, comes_to, right, seconds, left
):
    monkeypatch.setattr(trials, "EDITS_S", trials.LEAST_S + seconds)
    monkeypatch.setattr(trials, "MOST_STARTS", 1)
    assert searched(record, monkeypatch, [comes_to], right, takes=0.8)[1] == left


@pytest.mark.parametrize("edits_only", [False, True])
@pytest.mark.parametrize("right", [False, True])
def test_edits_of_how_it_is_set_up_come_last_or_first_of_a_known_cause(
    record, monkeypatch, edits_only, right
):
    asked, folder = [], record.directory / TRIALS
    of_step, of_set_up = EDITS[:2], tuple(replace(edit, anew=True) for edit in EDITS[2:])

    class Ranks:
        def run(self, job, *, progress):
            asked.append(read_asked(folder)[0].changes)
            for change in asked[-1]:
                add_trial(folder, Trial(change=change, right=right))

    changed = []
    monkeypatch.setattr(trials, "changes_to_try", lambda *args, **more: changed.append(1))
    monkeypatch.setattr(trials, "edited_to_try", lambda *args, set_up, alone, **more: (
        replace(ASKED, changes=of_set_up if set_up else of_step), WANTED)
        if alone is edits_only else None)  # fmt: skip
    trials.try_changes(record, "structure", 0, 9.0, "a cause", launcher=Ranks(),
                       progress=lambda _: None, edits_only=edits_only)  # fmt: skip
    order = [of_set_up, of_step] if edits_only else [of_step, of_set_up]
    assert asked == (order[:1] if right else order)
    assert changed == ([] if edits_only else [1])
    record.spec.topology.world_size, asked[:] = 1, []
    shutil.rmtree(folder)
    trials.try_changes(record, "structure", 0, 9.0, "a cause", launcher=Ranks(),
                       progress=lambda _: None, edits_only=edits_only)  # fmt: skip
    assert asked == [of_step]  # of one rank nothing is cut


def test_within_what_was_avoided_more_is_tried(record, monkeypatch):
    """An edit without which a function does not run tells where to look: it ends no search."""
    asked, folder, looked = [], record.directory / TRIALS, []
    around, within = EDITS[:2], EDITS[1:]

    class Ranks:
        def run(self, job, *, progress):
            asked.append(read_asked(folder)[0].changes)
            for one in asked[-1]:
                avoids = ("f.py:7 f", "f.py:9 g") if one == around[0] else ()
                add_trial(folder, Trial(change=one, right=bool(avoids), avoids=avoids))

    def edited_to_try(*args, said, set_up=False, **more):
        looked.append((said, set_up))
        if set_up:
            return None
        return replace(ASKED, changes=around if len(looked) == 1 else within), WANTED

    monkeypatch.setattr(trials, "changes_to_try", lambda *args, **more: None)
    monkeypatch.setattr(trials, "edited_to_try", edited_to_try)

    def tries():
        return trials.try_changes(record, "structure", 0, 9.0, "a cause", launcher=Ranks(),
                                  progress=lambda _: None)  # fmt: skip

    assert tries() == trials.Tried(made=True)
    assert asked == [around, within[1:]]  # and none twice
    assert looked == [("a cause", False), ("a cause", True), ("a cause f.py:7 f.py:9", False)]
    shutil.rmtree(folder)
    asked[:], looked[:], around = [], [], EDITS[2:]
    Ranks.run = lambda self, job, *, progress: add_trial(
        folder, Trial(change=read_asked(folder)[0].changes[0], right=True)
    )
    assert tries() == trials.Tried(made=True)
    assert looked == [("a cause", False)]


def on_one_rank(*trials, wrong=True):
    """What came of the step there, and of changes of it: (change, right)."""
    data = {"tensors": [{"status": "fail" if wrong else "ok"}]}
    verdict = SimpleNamespace(status="fail" if wrong else "pass", data=data)
    right = tuple(change for change, was in trials if was)
    ended = Ended(verdict=verdict, right=right, wrong=frozenset(c for c, was in trials if not was))
    return SimpleNamespace(ended=ended)


def test_what_makes_one_rank_right_is_tried_first_on_all(record, monkeypatch):
    monkeypatch.setattr(trials, "asked_again", lambda *args, **more: (
        replace(ASKED, changes=args[3]), WANTED))  # fmt: skip
    one, two, three, four = EDITS
    alone = on_one_rank((one, False), (three, True))
    assert edited(record, monkeypatch, [0, 2], alone=alone) == [(three,), (two, four)]


def test_where_that_is_right_on_all_nothing_else_is_looked_for(record, monkeypatch):
    monkeypatch.setattr(trials, "asked_again", lambda *args, **more: (
        replace(ASKED, changes=args[3]), WANTED))  # fmt: skip
    alone = on_one_rank((EDITS[2], True))
    asked = edited(record, monkeypatch, [1], right=EDITS[2:3], alone=alone, looks=0)
    assert asked == [(EDITS[2],)]


@pytest.mark.parametrize("wrong", [True, False])
def test_what_leaves_one_rank_wrong_is_not_tried_on_all(record, monkeypatch, wrong):
    alone = on_one_rank(*((edit, False) for edit in EDITS), wrong=wrong)
    asked = edited(record, monkeypatch, [4], alone=alone, made=not wrong)
    assert asked == ([] if wrong else [EDITS])  # where one rank is right it says nothing
