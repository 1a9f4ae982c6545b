"""Causes of real bugs, from the failed run alone: one of each kind that looking at modules names.

`scripts/right_causes.py` runs all of tests/bugs; docs/data/causes_*.json is what came out.
"""

from __future__ import annotations

import json

import pytest
import right_causes
from conftest import ROOT


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "kind", "standing"),
    [
        ("a_21", "backward", "likely"),
        ("a_23", "other_parameters", "likely"),
        ("a_26", "late_gradient", "proved"),
        ("a_27", "too_few_ranks", "proved"),
        ("a_33", "rows_read", "proved"),
        ("a_39", "loss_weights", "likely"),
        ("b_02", "forward", "likely"),
        ("b_09", "recomputed", "likely"),
        ("b_23", "counted_again", "proved"),
        ("b_26", "block_factor", "likely"),
        ("b_33", "backward", "likely"),
        ("b_42", "term_by_rows", "proved"),
        ("c_06", "own_value", "proved"),
        ("c_15", "skipped_collective", "proved"),
        ("c_17", "backward", "likely"),
        ("c_21", "rank_scale", "proved"),
        ("d_06", "late_gradient", "proved"),
        ("e_06", "foreign_backward", "likely"),
        ("e_18", "factor", "likely"),
        ("e_19", "open", "open"),
        ("f_16", "loss_at_tokens", "likely"),
        ("g_07", "backward", "likely"),
        ("h_03", "other_parameters", "likely"),
        ("i_02", "lost_rows", "proved"),
        ("j_02", "micro_batches", "proved"),
        ("j_17", "forward", "likely"),
        ("k_02", "untied", "likely"),
        ("k_08", "backward", "likely"),
    ],
)
def test_a_bug_has_the_cause_that_it_is(name, kind, standing, sumgrad_launcher):
    (path,) = right_causes.BUGS.glob(f"{name}_*.py")
    row = right_causes.run(path, "Buggy", sumgrad_launcher)
    assert (row["status"], row["kind"]) == ("fail", kind), row["said"]
    assert row["standing"] == standing, row["said"]
    assert row["place"], row["said"]


@pytest.mark.distributed
def test_a_count_in_few_digits_is_unknown_and_is_said_to_be_one(sumgrad_launcher):
    """The same error in every gradient is no rounding of single elements."""
    (path,) = right_causes.BUGS.glob("e_17_*.py")
    row = right_causes.run(path, "Buggy", sumgrad_launcher)
    assert row["status"] == "unknown"
    assert "every gradient is multiplied by 0.996154" in row["said"]
    assert "bfloat16 at e_17_token_count_in_bfloat16.py:63" in row["said"]


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["a_24", "a_40", "b_33", "a_06"])
def test_nothing_looks_wrong_in_a_right_twin(name, sumgrad_launcher):
    (path,) = right_causes.BUGS.glob(f"{name}_*.py")
    row = right_causes.looked_at(path, sumgrad_launcher)
    assert (row["status"], row["wrong"]) == ("pass", []), row["said"]


@pytest.mark.distributed
def test_a_right_twin_that_is_cut_otherwise_in_each_tier(sumgrad_launcher):
    """FSDP1 pads its flat parameters by bytes: a rank holds other elements in float32."""
    (path,) = right_causes.BUGS.glob("a_32_*.py")
    row = right_causes.run(path, "Clean", sumgrad_launcher)
    assert (row["status"], row["kind"]) == ("pass", None), row["said"]


def test_every_bug_says_what_a_right_cause_is_and_is_in_one_half():
    halves = right_causes.halves()
    assert {half: len(paths) for half, paths in halves.items()} == {
        "learn": 42, "sealed": 42, "second": 42, "third": 40, "fourth": 40, "fifth": 40,
        "sixth": 40,
    }  # fmt: skip
    for paths in halves.values():
        for path in paths:
            module = right_causes.load(path)
            assert set(module.EXPECT) == {"right", "place", "wrong"}, path
            assert all(module.EXPECT.values()), path
            assert issubclass(module.Buggy, module.Clean), path


@pytest.mark.parametrize(
    ("said", "marks"),
    [
        ("norm is not reduced", (True, True, [])),
        ("NORM is not\nreduced", (True, True, [])),
        ("norm is reduced twice", (False, True, ["twice"])),
        ("", (False, False, [])),
    ],
)
def test_marks_of_a_cause(said, marks):
    expected = {"right": ["not.reduced"], "place": ["norm"], "wrong": ["twice"]}
    assert tuple(right_causes.marked(said, expected).values()) == marks


def test_the_tables_are_of_the_split_that_was_drawn():
    for half, paths in right_causes.halves().items():
        table = json.loads((ROOT / "docs" / "data" / f"causes_{half}.json").read_text())
        assert table["drawn"] == right_causes.DRAWN
        assert {row["name"] for row in table["rows"]} == {path.stem for path in paths}
        assert table["right"] == sum(row["right"] for row in table["rows"])
