"""Ranks that try what would make a failing step right: asked once, and no verdict is lost by it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from sumgrad.base.errors import LaunchError
from sumgrad.launch import trials
from sumgrad.record.trial import (
    TRIALS,
    Asked,
    Change,
    Edit,
    Trial,
    add_trial,
    read_asked,
    read_trials,
)

CHANGE = Change(site="f.py:1:2", function="sum", way="sum", axis="tp")
ASKED = Asked(tier="structure", step=0, changes=(CHANGE,), bounds={"w": 1e-9},
              before={0: "a"}, seconds=2.0)  # fmt: skip
WANTED = {"w": torch.ones(2).double()}


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
    spec = SimpleNamespace(topology=topology, timeout_s=600.0)
    return SimpleNamespace(directory=tmp_path, spec=spec)


def tried(record, monkeypatch, gives, *, error=None, seconds=9.0):
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
                              progress=lambda _: None)  # fmt: skip
    return done, launcher.jobs, told


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


def edited(record, monkeypatch, ends, right=(), seconds=0.0):
    """What each start of ranks was asked. ends: how many each of them comes to."""
    asked, ends, folder = [], [*ends], record.directory / TRIALS

    class Ranks:
        def run(self, job, *, progress):
            asked.append(read_asked(folder)[0].changes)
            for come in asked[-1][: ends.pop(0)]:
                add_trial(folder, Trial(change=come, right=come in right))
            raise LaunchError("one of them was stuck")

    looked = []
    monkeypatch.setattr(trials, "changes_to_try", lambda *args, **more: None)
    monkeypatch.setattr(trials, "edited_to_try", lambda *args, **more: looked.append(1) or (
        replace(ASKED, changes=EDITS), WANTED))  # fmt: skip
    assert trials.try_changes(record, "structure", 0, seconds, "a cause", launcher=Ranks(),
                              progress=lambda _: None)  # fmt: skip
    assert looked == [1]  # once, whatever the ranks come to
    return asked


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
