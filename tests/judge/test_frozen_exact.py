"""Parameters that nobody trains, and a step changes: records made by hand."""

from __future__ import annotations

from dataclasses import replace

from records_in_memory import found, program_record
from sumgrad.judge.checks.beside import the_same_buffers
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


def test_what_is_changed_and_not_put_back_is_not_known():
    one = program_record(tiers={"structure": "float64"}, ranks=2)
    info = {"frozen": {"teacher": ["a", "b"]}, "frozen_left": ["teacher"]}
    ranks = {
        rank: replace(held, info={at: {**i, **info} for at, i in held.info.items()})
        for rank, held in one.ranks.items()
    }
    said = [(f.level, f.text) for f in found(frozen_alike, replace(one, ranks=ranks))]
    assert [level for level, _ in said] == ["unknown", "warning"]
    assert "teacher, which is not trained and too large to be put back" in said[0][1]


def test_a_buffer_that_is_changed_and_was_not_kept_is_said():
    one = program_record(tiers={"structure": "float64"}, ranks=2)
    ranks = {
        rank: replace(
            held, info={at: {**i, "changed_buffers": ["queue"]} for at, i in held.info.items()}
        )
        for rank, held in one.ranks.items()
    }  # fmt: skip
    said = [(f.level, f.text) for f in found(the_same_buffers, replace(one, ranks=ranks))]
    assert [level for level, _ in said] == ["warning"]
    assert "queue is changed by the step, and too large to be looked at" in said[0][1]
