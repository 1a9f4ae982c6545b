"""Each rank with a part of its own: what is lost where nobody else holds a parameter."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sumgrad.diagnose import names
from sumgrad.diagnose.explainers.of_ledgers import divergent
from sumgrad.diagnose.explainers.of_ledgers.divergent import (
    _lost_alone,
    _lost_everywhere,
    _no_reduction,
)
from sumgrad.diagnose.row_fit import Factors, Unit


def part(*values):
    units = tuple(Unit(term=None, rows=(i, i + 1)) for i in range(len(values)))
    return Factors(level="rows", units=units, values=values, sigmas=(None,) * len(values))


def case_of(*failing, others=()):
    cells = [SimpleNamespace(rank=rank, name=name) for rank, name in (*failing, *others)]
    return SimpleNamespace(failing_cells=cells[: len(failing)], cells=cells)


def test_rows_that_never_reach_what_one_rank_holds():
    found = _lost_alone(case_of((1, "a"), (2, "b")), {1: part(1, 1, 0), 2: part(1, 0, 0)})
    assert (
        found.cause
        == "rows 2 are not in the gradient of a on rank 1; rows 1-2 are not in the gradient of b "
        "on rank 2"
    )
    assert (found.kind, found.standing, found.ranks) == ("lost_rows", "proved", (1, 2))


@pytest.mark.parametrize(
    ("case", "parts"),
    [
        (case_of((1, "a"), (2, "a")), {1: part(1, 0), 2: part(0, 1)}),  # to be reduced
        (case_of((1, "a"), others=[(2, "a")]), {1: part(1, 0)}),  # of which one is right
        (case_of((1, "a")), {}),
        (case_of((1, "a")), {1: part(1, 1)}),  # nothing is lost
    ],
)
def test_what_others_hold_too_is_another_matter(case, parts):
    assert _lost_alone(case, parts) is None


def everywhere(*failing, others=(), rows=3):
    case = case_of(*failing, others=others)
    case.reference = SimpleNamespace(intervals=[(i, i + 1) for i in range(rows)])
    return case


def test_rows_that_count_on_no_rank():
    case = everywhere((0, "a"), (1, "a"))
    found = _lost_everywhere(case, {0: part(1, 0, 0), 1: part(1, 0, 0)}, ["a"])
    assert found.cause == "rows 1-2 count on no rank: a is the gradient of rows 0 alone"
    assert (found.kind, found.standing, found.ranks) == ("lost_rows", "proved", (0, 1))


@pytest.mark.parametrize(
    ("case", "parts"),
    [
        (everywhere((0, "a"), (1, "a")), {0: part(1, 0, 0), 1: part(0, 1, 0)}),  # to be reduced
        (everywhere((0, "a"), others=[(1, "a")]), {0: part(1, 0, 0)}),  # another has them all
        (everywhere((0, "a"), (1, "a"), others=[(2, "a")]),
         {0: part(1, 0, 0), 1: part(1, 0, 0)}),
        (everywhere((0, "a")), {0: part(1, 0, 0)}),  # one rank is not all
        (everywhere((0, "a"), (1, "a")), {0: part(0, 0, 0), 1: part(0, 0, 0)}),
        (everywhere((0, "a"), (1, "a")), {}),
    ],
)  # fmt: skip
def test_what_some_rank_may_hold_is_another_matter(case, parts):
    assert _lost_everywhere(case, parts, ["a"]) is None


@pytest.mark.parametrize(
    ("events", "ends"),
    [
        ([], "none is issued: if the model is wrapped, is its wrapper's own forward called?"),
        ([{"grads": []}, {"grads": []}], "none carries that of a parameter: if the model is "
                                         "wrapped, is its wrapper's own forward called?"),
        ([{"grads": []}, {"grads": [["other", 1.0]]}], "no reduction in the ledger makes it"),
        ([{"grads": []}, {}], "no reduction in the ledger makes it"),  # too large to look into
    ],
)  # fmt: skip
def test_a_step_without_any_reduction_of_a_gradient_is_said_to_be_one(monkeypatch, events, ends):
    joints = [SimpleNamespace(events={0: {**event, "n": i}}) for i, event in enumerate(events)]
    monkeypatch.setattr(divergent, "describe", lambda record, joint: "the all-reduce")
    said = _no_reduction(SimpleNamespace(record=None, failing_cells=()), joints, {})
    assert said.startswith("no reduction in the ledger makes it")
    assert said.endswith(ends)


@pytest.mark.parametrize(
    ("feeds", "places", "more"),
    [
        ({(0, 0): {"b": 1.0}, (1, 0): {"c": 1.0}}, ["a", "a"], True),
        ({(0, 0): {"b": 1.0}, (0, 1): {"c": 1.0}}, ["a", "b"], False),  # at two places
        ({(0, 0): {"w": 1.0}}, ["a", "a"], False),  # it is the wrong one
    ],
)
def test_where_the_right_ones_are_reduced_is_told(monkeypatch, feeds, places, more):
    joints = [
        SimpleNamespace(at=at, events={rank: {"n": i, "grads": [["x", 1.0]]} for rank in (0, 1)})
        for i, at in enumerate(places)
    ]
    monkeypatch.setattr(divergent, "describe", lambda record, joint: f"the sum at {joint.at}")
    case = SimpleNamespace(record=None, failing_cells=[SimpleNamespace(name="w")])
    monkeypatch.setattr(divergent, "looked", lambda case: None)
    said = _no_reduction(case, joints, feeds)
    assert said == "no reduction in the ledger makes it" + (
        "; the sum at a makes b, c, which are right: look at what goes into that, and what is left "
        "out" if more else ""
    )  # fmt: skip


def test_where_gradients_come_in_parts_nobody_is_told_to_sum_them(monkeypatch):
    joints = [SimpleNamespace(events={0: {"n": 0, "grads": [["x", 1.0]]}})]
    monkeypatch.setattr(divergent, "describe", lambda record, joint: "the sum")
    case = SimpleNamespace(record=None, failing_cells=[SimpleNamespace(name="w")])
    for state, more in (("right", True), ("part", False)):
        look = SimpleNamespace(modules=("m",), backward={"m": state}.get)
        monkeypatch.setattr(divergent, "looked", lambda case, look=look: look)
        assert ("the sum makes b" in _no_reduction(case, joints, {(0, 0): {"b": 1.0}})) == more


@pytest.mark.parametrize(
    ("held", "mean", "told"),
    [
        (((3.0, 0.0), (0.0, 3.0), (0.0, 0.0)), True, True),  # each its own, scaled for a mean
        (((1.0, 0.0), (0.0, 1.0), (0.0, 0.0)), False, True),
        (((3.0, 0.0), (0.0, 3.0), (0.0, 0.0)), False, False),
        (((3.0, 0.0), (0.0, 3.0), (0.0, 1.0)), True, False),
        (((1.0, 1.0), (1.0, 1.0), (1.0, 1.0)), True, False),  # all right: nothing to be reduced
    ],
)
def test_copies_that_have_together_the_mean_or_the_sum(monkeypatch, held, mean, told):
    wanted = SimpleNamespace(value=torch.ones(2).double(), threshold=1e-9)
    cells = [SimpleNamespace(rank=rank, name="w", index=None, wanted=wanted,
                             measured=torch.tensor(own).double())
             for rank, own in enumerate(held)]  # fmt: skip
    case = SimpleNamespace(cells=cells, failing_cells=cells)
    monkeypatch.setattr(names, "axis_groups", lambda case: [("dp", [(0, 1, 2)])])
    assert names.own_parts(case, ["w"], mean=mean) == ("dp" if told else None)


@pytest.mark.parametrize(("wrong", "told"), [((0, 1), "dp"), ((0, 1, 2), None)])
def test_a_mean_tells_only_of_ranks_that_are_unlike(monkeypatch, wrong, told):
    """Two groups: of one the copies are unlike, of the other alike, which tells nothing."""
    wanted = SimpleNamespace(value=torch.ones(2).double(), threshold=1e-9)
    held = ((2.0, 0.0), (0.0, 2.0), (1.0, 1.0), (1.0, 1.0))
    cells = [SimpleNamespace(rank=rank, name="w", index=None, wanted=wanted,
                             measured=torch.tensor(own).double())
             for rank, own in enumerate(held)]  # fmt: skip
    case = SimpleNamespace(cells=cells, failing_cells=[cells[rank] for rank in wrong])
    monkeypatch.setattr(names, "axis_groups", lambda case: [("dp", [(0, 1), (2, 3)])])
    assert names.own_parts(case, ["w"], mean=True) == told


OWN = {rank: ({"w": 1.0}, {}) for rank in (0, 1)}


@pytest.mark.parametrize(("script", "kept"), [(False, {}), (True, OWN), (True, {}), (True, None)])
def test_what_is_scaled_for_a_mean_that_nobody_takes_is_not_reduced(monkeypatch, script, kept):
    """Of a script the ranks' own gradients, where kept, tell more: what each was put together
    from."""
    cells = [SimpleNamespace(rank=rank, name="w") for rank in (0, 1)]
    record = SimpleNamespace(spec=SimpleNamespace(script="train.py" if script else None))
    case = SimpleNamespace(cells=cells, failing_cells=cells, record=record)
    monkeypatch.setattr(divergent, "given_by_ranks", lambda case: kept)
    monkeypatch.setattr(divergent, "_by_rank", lambda failing, case, mixed: {})
    monkeypatch.setattr(divergent, "_mixed", lambda failing: False)
    monkeypatch.setattr(
        divergent, "own_parts", lambda case, names, *, wrong_only=False, mean=False:
        "dp" if mean else None
    )  # fmt: skip
    step = ("skipped_collective", "{what} is not reduced", "no reduction in the ledger makes it")
    monkeypatch.setattr(divergent, "which_step", lambda case, names, mixed: step)
    found = divergent.divergent_cause(case)
    if script and kept:
        assert found is None
        return
    told, fitted = found
    assert told.cause == "w is not reduced over dp: its ranks keep their own partials"
    assert told.because == ("the ranks' copies of w have over dp the mean that is the reference",
                            "no reduction in the ledger makes it")  # fmt: skip
    assert (told.kind, told.ranks, fitted) == ("skipped_collective", (0, 1), [])


@pytest.mark.parametrize(
    ("given", "are"),
    [
        (None, False),
        ({0: ({"head": 1}, {}), 1: ({"head": 1}, {})}, False),  # frozen when the watch began
        ({0: ({"head": 1}, {}), 1: ({"body": 1}, {})}, True),
    ],
)
def test_what_the_backwards_of_ranks_gave_tells_more_only_where_it_was_kept(
    monkeypatch, given, are
):
    monkeypatch.setattr(divergent, "given_by_ranks", lambda case: given)
    assert divergent._are_given("a case", ["body", "neck"]) is are


@pytest.mark.parametrize(("mixed", "cause"), [
    (True, "some elements of {what} are not reduced: of these every rank keeps its own partial, "
               "and the others are right"),
    (False, "{what} is not reduced: every rank keeps its own partial"),
])  # fmt: skip
def test_of_what_is_reduced_in_part_no_more_is_said(monkeypatch, mixed, cause):
    for name in ("fed", "reductions_of"):
        monkeypatch.setattr(divergent, name, lambda *_: [])
    monkeypatch.setattr(divergent, "_no_reduction", lambda *_: "none")
    record = SimpleNamespace(spec=SimpleNamespace(topology=None))
    case = SimpleNamespace(record=record, tier="structure", step=0, cells=())
    assert divergent.which_step(case, ["w"], mixed) == ("skipped_collective", cause, "none")
