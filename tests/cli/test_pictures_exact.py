"""What a page draws: levels by error over threshold, equal ranks folded, the answer in words."""

from __future__ import annotations

import math

import pytest
from sumgrad.report.pictures import MOST_ROWS, answer, heat_maps, pool_pictures


def tensor(name="w", rank=0, *, times=0.2, status="pass", step=0, tier="structure", **more):
    return {"name": name, "rank": rank, "tier": tier, "step": step, "status": status,
            "max_abs": times * 1e-9, "threshold": 1e-9, "smallest_scale_error_caught": 1e-12,
            **more}  # fmt: skip


def data(*tensors, status="fail", ranks=3, ended=None, **more):
    outcomes = [{"rank": r, "status": (ended or {}).get(r, "ok")} for r in range(ranks)]
    pool = {"axes": {"dp": ranks}, "ranks": list(range(ranks))}
    return {"tensors": list(tensors), "tiers": {"structure": {"reasons": []}}, "status": status,
            "outcomes": outcomes, "topology": {"world_size": ranks, "pools": {"a": pool}},
            "diagnoses": [], "findings": [], "not_compared": [], **more}  # fmt: skip


@pytest.mark.parametrize(("times", "status", "level"), [
    (0.0, "pass", "l0"), (0.1, "pass", "l0"), (0.11, "pass", "l1"), (0.6, "pass", "l2"),
    (1.0, "pass", "l2"), (1.1, "fail", "l3"), (11, "fail", "l4"), (1001, "fail", "l5"),
    (1e7, "fail", "l6"), (0.5, "fail", "l3"), (0.5, "unknown", "unknown"),
    (math.nan, "fail", "l3"),
])  # fmt: skip
def test_a_square_has_the_colour_of_its_error(times, status, level):
    (found,) = heat_maps(data(tensor(times=times, status=status)))
    assert found.rows[0][1][0].level == level


def test_what_cannot_be_compared_is_the_worst():
    (found,) = heat_maps(data(tensor(status="fail", max_abs=None)))
    (square,) = found.rows[0][1]
    assert square.level == "l6"
    assert square.says == "w on rank 0: FAIL, not comparable, step 0"


def test_equal_ranks_stand_together_and_the_worst_step_counts():
    worse = [tensor(rank=r, times=50, status="fail", step=1) for r in (0, 2)]
    (found,) = heat_maps(data(*(tensor(rank=r) for r in range(3)), *worse))
    assert found.columns == ("0, 2", "1")
    assert [s.level for s in found.rows[0][1]] == ["l4", "l1"]
    assert "step 1" in found.rows[0][1][0].says


def test_a_tensor_that_a_rank_does_not_hold_is_empty():
    (found,) = heat_maps(data(tensor("w", 0), tensor("b", 1)))
    assert [[s.level for s in squares] for _, squares in found.rows] == [
        ["l1", "nothing"], ["nothing", "l1"],
    ]  # fmt: skip


def test_of_many_tensors_the_worst_are_drawn():
    many = [tensor(f"w{i}") for i in range(MOST_ROWS + 5)]
    many.append(tensor("bad", times=1e4, status="fail"))
    (found,) = heat_maps(data(*many))
    assert len(found.rows) == MOST_ROWS
    assert found.left_out == 6
    assert found.rows[-1][0] == "bad"


def test_ranks_have_the_colour_of_how_they_ended():
    (pool,) = pool_pictures(data(tensor(rank=0, status="fail"), tensor(rank=1), ended={2: "hung"}))
    assert [(rank, level) for rank, level, _ in pool.ranks] == [
        (0, "fail"), (1, "pass"), (2, "fail"),
    ]  # fmt: skip
    assert pool.ranks[2][2] == "rank 2: hung"


def test_the_answer_is_two_sentences():
    right = answer(data(tensor(), tensor(rank=1), status="pass"))
    assert right == [
        "Every gradient is right: 2 gradients of 3 ranks were compared with one process, tensor by "
        "tensor; a factor that is off by 1.0e-12 would have been seen."
    ]
    wrong = answer(data(tensor(status="fail", step=1), tensor(rank=1), diagnoses=[{"cause": "it"}]))
    assert wrong == ["It.", "1 of 2 gradients are wrong, from step 1 on, on rank 0."]
    assert answer(data(status="unknown", not_compared=["why"])) == ["Not known: why."]
    assert answer(data(findings=["the law"])) == ["The law."]
    assert answer(data()) == ["Some gradients are wrong."]


@pytest.mark.parametrize(("cause", "begin"), [
    ("the forward is right", "The forward"), ("f1.py:3 `x`: were it `y`", "f1.py:3"),
    ("w is not reduced", "w is"),
])  # fmt: skip
def test_names_of_files_and_tensors_keep_their_first_letter(cause, begin):
    failed = data(tensor("w", status="fail"), diagnoses=[{"cause": cause, "because": []}])
    assert answer(failed)[0].startswith(begin)
