"""The coefficients of a verdict as few lines as say the same."""

from __future__ import annotations

from sumgrad.base.outcome import in_digits
from sumgrad.report.coefficients import in_few_lines


def entry(ranks, rows, recovered, fraction, expected="1", term="main"):
    return {"params": "w", "ranks": ranks, "term": term, "producer": "program", "rows": rows,
            "expected": expected, "recovered": recovered, "sigma": 0.0, "fraction": fraction,
            "identifiable": recovered is not None}  # fmt: skip


def test_ranks_and_rows_with_one_number_are_one_line():
    found = in_few_lines([
        *(entry([rank], [row, row + 1], 1.0 if row < 4 else 0.0, "1" if row < 4 else "0")
          for rank in (0, 1) for row in range(6)),
        *(entry([2], [row, row + 1], 1.0, "1") for row in (0, 2, 3)),
    ])  # fmt: skip
    assert [(line["ranks"], line["rows_text"], line["recovered_text"]) for line in found] == [
        ((0, 1), "4-5", "0.000000000"),
        ((0, 1, 2), "0, 2-3", "1.000000000"),
        ((0, 1), "1", "1.000000000"),
    ]


def test_what_cannot_be_told_and_terms_without_rows_stay_apart():
    found = in_few_lines([
        entry([0], None, None, None), entry([1], None, 0.5, "1/2", term="other"),
        entry([0], [0, 3], 0.5, "1/2", term="other"), entry([0, 1], None, -3e-10, "0"),
    ])  # fmt: skip
    assert {(line["term"], line["ranks"], line["rows_text"], line["recovered_text"])
            for line in found} == {
        ("main", (0,), "all", "cannot be told"), ("other", (1,), "all", "0.500000000"),
        ("other", (0,), "0-2", "0.500000000"), ("main", (0, 1), "all", "0.000000000"),
    }  # fmt: skip


def test_a_number_is_not_hidden_by_its_digits():
    shown = [e["recovered_text"] for value, fraction in (
        (1 - 4.2e-10, None), (3 + 2e-11, None), (1.0, "1"), (1 + 1e-15, "1"), (1.25, None),
        (3e-10, None))
        for e in in_few_lines([entry([0], None, value, fraction)])]  # fmt: skip
    assert shown == [
        "1 - 4.2e-10", "3 + 2e-11", "1.000000000", "1.000000000", "1.250000000", "0.000000000",
    ]  # fmt: skip
    assert [in_digits(v) for v in (1.0, 0.5, 2 - 1e-12, 1e-12)] == [
        "1",
        "0.5",
        "2 - 1e-12",
        "1e-12",
    ]


def test_nothing_is_nothing():
    assert in_few_lines([]) == []
