"""What ranks issued last, in columns, on ledgers made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from records_in_memory import program_record
from sumgrad.judge.timeline import LAST, MOST_COLUMNS, timeline
from sumgrad.plan.schedule import Mismatch
from sumgrad.report.pictures import timeline_picture


def op(n, name="allreduce", group=(0, 1, 2), *, numel=4, pg="0", **more):
    return {"n": n, "label": "structure/0/step", "op": name, "group": list(group),
            "dtype": "float64", "numel": numel, "site": "a.py:1", "pg": pg, **more}  # fmt: skip


def line_of(*ledgers, mismatches=(), lost=()):
    """lost: ranks that did not end well."""
    record = program_record(tiers={"structure": "float64"}, ranks=len(ledgers))
    outcomes = tuple(
        replace(o, status="timed_out" if o.rank in lost else "ok") for o in record.outcomes
    )
    record = replace(record, outcomes=outcomes, started=dict(enumerate(ledgers)))
    return timeline(record, mismatches)


def places(line):
    return {r: [(i.column, i.state) for i in row] for r, row in line.rows.items()}


def done(*numbers):
    return [{"done": n} for n in numbers]


def test_a_collective_stands_in_one_column_behind_all_that_its_members_did():
    pair = op(0, group=(0, 1), pg="1")
    line = line_of(
        [pair, op(1), *done(0, 1)],
        [op(0, "send", peer=2), op(1, group=(0, 1), pg="1"), op(2), *done(0, 1, 2)],
        [op(0, "recv", peer=1), op(1), *done(0, 1)],
    )
    assert places(line) == {
        0: [(1, "done"), (2, "done")],
        1: [(0, "done"), (1, "done"), (2, "done")],
        2: [(0, "done"), (2, "done")],
    }


def test_a_rank_that_came_less_far_and_one_that_waits():
    ledgers = [op(0), op(1), *done(0)], [op(0), *done(0)], [op(0), op(1), *done(0)]
    assert places(line_of(*ledgers, lost=(0, 1, 2))) == {
        0: [(0, "done"), (1, "open")], 1: [(0, "done")], 2: [(0, "done"), (1, "open")],
    }  # fmt: skip
    ended = places(line_of(*ledgers, lost=(0,)))
    assert ended[0] == [(0, "done"), (1, "open")]
    assert ended[2] == [(0, "done"), (1, "done")]  # it ended well, and did not write the last end


def test_members_that_issue_something_else_and_what_no_plan_has():
    line = line_of([op(0), *done(0)], [op(0, numel=5), *done(0)], [op(0), *done(0)])
    assert {row[0].state for row in line.rows.values()} == {"unlike"}
    other = Mismatch(rank=1, label="", edge="", planned=None, seen=None, site=None, number=0)
    line = line_of(*([op(0), *done(0)],) * 3, mismatches=[other])
    assert [row[0].state for row in line.rows.values()] == ["done", "unplanned", "done"]


def test_groups_in_unlike_order_end_all_the_same():
    first, second = (0, 1), (0, 1, 2)
    line = line_of(
        [op(0, group=first, pg="1"), op(1, group=second)],
        [op(0, group=second), op(1, group=first, pg="1")],
        [op(0, group=second)],
        lost=(0, 1, 2),
    )
    assert [len(row) for row in line.rows.values()] == [2, 2, 1]
    assert all(i.state == "open" for row in line.rows.values() for i in row)


def test_only_the_last_columns_are_kept():
    count = MOST_COLUMNS + 3
    line = line_of([op(n) for n in range(count)], [op(n) for n in range(count - 1)], [])
    assert (line.columns, line.columns_left_out) == (MOST_COLUMNS, 3)
    assert [i.column for i in line.rows[0]] == list(range(MOST_COLUMNS))
    assert [i.column for i in line.rows[1]] == list(range(MOST_COLUMNS - 1))
    assert line.rows[2] == ()


def test_only_the_last_operations_are_looked_at():
    line = line_of([op(n) for n in range(LAST + 5)], [op(n) for n in range(LAST + 4)])
    assert line.columns_left_out - (LAST + 5 - MOST_COLUMNS) in (0, 1)
    assert [i.column for i in line.rows[1]] == list(range(MOST_COLUMNS - 1))


def test_ranks_without_any_ledger_have_no_timeline():
    assert line_of([], []) is None


@pytest.mark.parametrize("state", ["done", "open"])
def test_the_picture_says_what_stands_in_a_square(state):
    ledgers = [op(0), *(done(0) if state == "done" else [])], [op(0), *done(0)]
    line = line_of(*ledgers, lost=(0,))
    picture = timeline_picture({"timeline": line.to_json()})
    assert picture.letters == (("R", "allreduce"),)
    (name, ((column, letter, level, says),)) = picture.rows[0]
    assert (name, column, letter, level) == ("rank 0", 0, "R", f"step-{state}")
    assert says.startswith("allreduce of 4 float64 over ranks 0-2")
    assert says.endswith("(begun, never done)") == (state == "open")
    assert timeline_picture({}) is None
