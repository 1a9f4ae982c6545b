"""Parameters that nobody trains, and a step changes: records made by hand."""

from __future__ import annotations

from dataclasses import replace

from records_in_memory import found, program_record
from sumgrad.judge.checks.replicas import frozen_alike


def said(*after, before=None):
    """Rank i has `teacher` as `after[i]` when the step ends."""
    one = program_record(tiers={"structure": "float64"}, ranks=len(after))
    old = before or ["a"] * len(after)
    ranks = {
        rank: replace(held, info={
            at: {**info, "frozen": {"teacher": [old[rank], after[rank]]}}
            for at, info in held.info.items()
        })
        for rank, held in one.ranks.items()
    }  # fmt: skip
    return [(f.level, f.text) for f in found(frozen_alike, replace(one, ranks=ranks))]


def test_what_stays_as_it_is_is_not_spoken_of():
    assert said("a", "a", "a") == []
    assert said("a", "b", before=["a", "b"]) == []


def test_what_all_ranks_change_alike_is_said():
    ((level, text),) = said("b", "b", "b")
    assert level == "warning"
    assert text.startswith("step() changes teacher, which is not trained; it was put back")
    ((level, _),) = said("c", "d", before=["a", "b"])  # other shards
    assert level == "warning"


def test_replicas_that_are_changed_otherwise_fail():
    for after in (("b", "b", "c"), ("a", "b", "a")):
        ((level, text),) = said(*after)
        assert level == "fail"
        assert "changes teacher, which is not trained, on rank" in text
        assert "replicas drift apart" in text
