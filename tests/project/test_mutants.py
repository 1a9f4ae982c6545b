"""The tool that makes mutants: what it changes, that hand-written ones still fit, that it kills.

The complete run is scripts/mutants; its table is docs/data/mutants.json.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import mutant_operators
import mutants
import pytest
from conftest import ROOT

SOURCE = '''
"""Words."""
BOUND = 1e-3


class Box:
    """Words."""

    def small(self, values: list[float], more: bool = False) -> float | None:
        """Words."""
        total = 0.0
        for value in values[1:]:
            if abs(value) <= BOUND and not more:
                continue
            total += value.abs()
        return max(total, 2) if more else None
'''
WRITTEN = mutants.written_mutants(mutants.load_table())


def changed() -> set[tuple[str, str, str]]:
    return {(c.function, c.before, c.after) for c in mutant_operators.changes(SOURCE)}


@pytest.mark.parametrize(
    "change",
    [
        ("", "1e-3", "4.0"),
        ("Box.small", "abs(value) <= BOUND", "abs(value) < BOUND"),
        ("Box.small", "abs(value) <= BOUND and not more", "((abs(value) <= BOUND))"),
        ("Box.small", "abs(value) <= BOUND and not more", "((abs(value) <= BOUND) or (not more))"),
        ("Box.small", "not more", "(more)"),
        ("Box.small", "values[1:]", "values[:]"),
        ("Box.small", "values[1:]", "list(values[1:])[:-1]"),
        ("Box.small", "continue", "break"),
        ("Box.small", "value.abs()", "value"),
        ("Box.small", "total += value.abs()", "pass"),
        ("Box.small", "max", "min"),
        ("Box.small", "2", "3"),
        ("Box.small", "max(total, 2) if more else None", "(None)"),
        ("Box.small", "False", "True"),
    ],
)
def test_what_is_changed(change):
    assert change in changed()


def test_words_and_annotations_are_left_alone_and_every_change_is_python():
    found = mutant_operators.changes(SOURCE)
    assert not [c for c in found if "Words" in c.before or "list[float]" in c.before]
    assert len({c.key for c in found}) == len(found)
    for change in found:
        mutant = mutant_operators.apply(SOURCE, change)
        assert ast.dump(ast.parse(mutant)) != ast.dump(ast.parse(SOURCE))


def test_a_change_is_found_again_after_other_lines_moved():
    moved = SOURCE.replace("BOUND = 1e-3", "BOUND = 1e-3\n\n\ndef other() -> int:\n    return 7")
    keys = {c.key for c in mutant_operators.changes(SOURCE)}
    assert keys < {c.key for c in mutant_operators.changes(moved)}


def test_every_mutant_written_by_hand_still_fits():
    """A snippet that is no longer there is an error, not a mutant less."""
    assert len(WRITTEN) >= 60
    for mutant in WRITTEN:
        assert ast.dump(ast.parse(mutant.source)) != ast.dump(
            ast.parse((ROOT / mutant.path).read_text())
        ), mutant
    table = mutants.load_table()
    (path, (first, *_)), *_ = table["written"].items()
    with pytest.raises(LookupError, match="0 times, expected once"):
        mutants.written_mutants({"written": {path: [{**first, "from": "no such text"}]}})
    with pytest.raises(LookupError, match="no function nowhere"):
        mutants.written_mutants({"written": {path: [{**first, "in": "nowhere"}]}})


def test_the_table_names_files_that_exist_and_reasons_of_mutants_that_exist():
    table = mutants.load_table()
    for path, tests in table["modules"].items():
        assert (ROOT / path).exists()
        assert all((ROOT / t).exists() for t in tests if t.startswith("tests/"))
        assert mutants.module_name(path).startswith("sumgrad.")
    assert mutants.module_name("harness/judge/cells.py") == "sumgrad.judge.cells"
    for path, functions in table["not_here"].items():
        for function in functions:
            mutant_operators.function_source((ROOT / path).read_text(), function)
    known = {m.key for m in mutants.drawn_mutants(table, 10**9, 1)}
    assert set(table["survivors"]) <= known | {m.key for m in WRITTEN}


def test_the_stored_run_is_of_the_whole_list_and_every_survivor_has_its_reason():
    data = json.loads(mutants.OUT.read_text())
    assert data["mutants"] == len(data["rows"]) >= 200
    survivors = [row for row in data["rows"] if row["status"] == "survived"]
    assert all(row["reason"] for row in survivors)
    assert len(survivors) < 0.03 * len(data["rows"])
    assert {m.key for m in WRITTEN} <= {row["key"] for row in data["rows"]}


def test_a_mutant_is_killed_and_what_is_no_mutant_is_not():
    """One of those written by hand, in a process of its own, as the script runs it."""
    key = next(m.key for m in WRITTEN if m.change.function == "with_kernels")
    command = [sys.executable, str(Path(mutants.__file__)), "--key", key]
    found = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert found.returncode == 0, found.stdout + found.stderr
    assert '"killed": 1' in found.stdout
    assert "green  harness/base/tolerances.py" in found.stdout
