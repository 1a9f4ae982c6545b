"""The table of coefficients for a reader: ranks and rows that have the same one are one line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sumgrad.base.outcome import in_digits, spans


def in_few_lines(coefficients: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Entries of verdict.json with equal numbers as one, what is not as expected first.

    Each has `ranks` of all of them, `rows_text` ("0-5, 8", or "all") and `recovered_text`.
    """
    by_ranks: dict[tuple[Any, ...], tuple[Mapping[str, Any], list[int]]] = {}
    for c in coefficients:
        rows = None if c["rows"] is None else tuple(c["rows"])
        by_ranks.setdefault((*_numbers(c), rows), (c, []))[1].extend(c["ranks"])
    by_rows: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for c, ranks in by_ranks.values():
        own = tuple(sorted(set(ranks)))
        by_rows.setdefault((*_numbers(c), own, c["rows"] is None), []).append({**c, "ranks": own})
    lines = [_line(held) for held in by_rows.values()]
    return sorted(lines, key=lambda line: line["fraction"] == line["expected"])


def _numbers(c: Mapping[str, Any]) -> tuple[Any, ...]:
    return (c["params"], c["term"], c["producer"], c["expected"], c["fraction"], _recovered(c))


def _recovered(c: Mapping[str, Any]) -> str:
    value = c["recovered"]
    if value is None:
        return "cannot be told"
    digits = f"{round(value, 9) + 0.0:.9f}"
    # What is no fraction and looks like a whole number is off by what these digits do not show.
    hidden = c["fraction"] is None and abs(value) > 0.5 and float(digits) == round(value)
    return in_digits(value) if hidden else digits


def _line(held: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    rows = [row for c in held for row in range(*c["rows"])] if held[0]["rows"] else []
    return {
        **held[0],
        "rows_text": spans(sorted(set(rows))) if held[0]["rows"] else "all",
        "recovered_text": _recovered(held[0]),
    }
