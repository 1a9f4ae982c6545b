"""Ranks that try what would make a failing step right: asked once, and no verdict is lost by it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sumgrad.base.errors import LaunchError
from sumgrad.launch import trials
from sumgrad.record.trial import TRIALS, Asked, Change, read_asked

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

    def changes_to_try(*args, seconds):
        told.append(seconds)
        if isinstance(gives, Exception):
            raise gives
        return gives

    monkeypatch.setattr(trials, "changes_to_try", changes_to_try)
    done = trials.try_changes(record, "structure", 0, seconds, launcher=launcher,
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
