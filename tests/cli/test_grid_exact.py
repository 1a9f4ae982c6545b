"""Matrices in every format: what fails first, every cell once, and no text that is obeyed."""

from __future__ import annotations

import io
from xml.etree import ElementTree

import pytest
from markdown_it import MarkdownIt
from rich.console import Console
from sumgrad.faults.matrix import Cell, Matrix, allowing
from sumgrad.invariance.bits import Report
from sumgrad.invariance.matrix import OpsMatrix, ops_grid
from sumgrad.report.github import grid_lines
from sumgrad.report.grid import Grid, GridTable, Square, render_grid
from sumgrad.report.grid_files import MOST_ROWS, grid_to_html, grid_to_junit, grid_to_markdown
from sumgrad.report.matrix import matrix_grid
from sumgrad.report.variants import variants_grid

HOSTILE = "<script>x</script> | `a` [bold] ::error:: \x1b[31m {{ 7 * 7 }} ]]> %0A"


def cell(fault, result, **more):
    return Cell(topology="dp3", workload="mine.py:Step", fault=fault, result=result, **more)


CELLS = (
    cell(None, "clean"),
    cell("avg:allreduce@dp#0", "missed"),
    cell("skip:allreduce@dp#0", "killed", cause="one is missing"),
    cell("avg:allreduce@dp#1", "killed"),
    cell("skip:allreduce@dp#1", "misnamed", cause="another"),
    cell("divide_by_world", "killed"),
)


def text_of(grid, width=200):
    out = io.StringIO()
    Console(file=out, width=width, markup=False, emoji=False).print(render_grid(grid))
    return out.getvalue()


def small(text="a", status="fail", rows=1):
    squares = (Square(text=text, status=status, says=text), Square(text="", status="none"))
    table = GridTable(title=text, labels=(text, "tensor"), columns=(text, "c"),
                      rows=tuple(((text, f"{text}{i}"), squares) for i in range(rows)))  # fmt: skip
    return Grid(title=text, status=status, summary=text, tables=(table,), first=(text,),
                notes=(text,))  # fmt: skip


def test_a_kill_matrix_says_what_was_missed_first():
    grid = matrix_grid(Matrix(cells=CELLS))
    assert grid.status == "fail"
    assert grid.first[0].startswith("missed: avg:allreduce@dp#0 on dp3")
    collectives, steps = grid.tables
    assert collectives.columns == ("avg", "skip")
    assert [row for (row,), _ in collectives.rows] == ["allreduce@dp#0", "allreduce@dp#1"]
    assert [[s.text for s in squares] for _, squares in collectives.rows] == [
        ["missed", "killed"], ["killed", "misnamed"],
    ]  # fmt: skip
    assert [[s.status for s in squares] for _, squares in collectives.rows] == [
        ["fail", "pass"], ["pass", "none"],
    ]  # fmt: skip
    assert [row for (row,), _ in steps.rows] == ["(clean)", "divide_by_world"]


@pytest.mark.parametrize(("patterns", "result", "unused"), [
    ([], "missed", ()),
    (["avg:allreduce@dp#0"], "allowed", ()),
    (["*:allreduce@dp#0"], "allowed", ()),
    (["avg:*", "double:*"], "allowed", ("double:*",)),
    (["skip:*"], "missed", ("skip:*",)),  # it was killed: nothing to allow
    (["AVG:*"], "missed", ("AVG:*",)),
])  # fmt: skip
def test_only_what_was_missed_can_be_allowed(patterns, result, unused):
    found = allowing(Matrix(cells=CELLS), patterns)
    assert [c.result for c in found.cells] == ["clean", result, *(c.result for c in CELLS[2:])]
    assert found.unused == unused
    assert found.ok == (result == "allowed")
    said = matrix_grid(found).notes
    assert all(any(pattern in text for text in said) for pattern in unused)


@pytest.mark.parametrize("result", ["alarm", "crashed", "hung", "mispredicted"])
def test_what_is_no_miss_is_never_allowed(result):
    found = allowing(Matrix(cells=(cell("avg:x", result),)), ["*"])
    assert not found.ok
    assert found.unused == ("*",)


@pytest.mark.parametrize("result", ["unknown", "unattacked"])
def test_a_clean_step_that_tells_nothing_is_no_pass_and_no_fail(result):
    found = Matrix(cells=(cell(None, result, cause="no reason"), cell("divide_by_world", "killed")))
    assert (found.status, found.ok, found.to_json()["status"]) == ("unknown", False, "unknown")
    assert found.summary().startswith("UNKNOWN: ")
    grid = matrix_grid(found)
    assert grid.status == "unknown"
    assert grid.first == (f"{result}: clean on dp3: no reason",)
    assert any(note.startswith(f"{result}: ") for note in grid.notes)
    assert grid.tables[0].rows[0][1][0].status == "unknown"
    assert Matrix(cells=(*found.cells, cell("avg:x", "missed"))).status == "fail"
    assert Matrix(cells=()).status == "fail"


def test_a_planned_workload_has_faults_down_and_topologies_across():
    cells = [Cell(topology=f"three_pool_{name}", workload="three_pool", fault=fault, result=result)
             for name, fault, result in (("a", None, "clean"), ("a", "avg_on_ci", "killed"),
                                         ("b", "avg_on_ci", "invisible"))]  # fmt: skip
    (table,) = matrix_grid(Matrix(cells=tuple(cells))).tables
    assert table.columns == ("a", "b")
    assert [row for (row,), _ in table.rows] == ["(clean)", "avg_on_ci"]
    assert [[s.text for s in squares] for _, squares in table.rows] == [
        ["clean", ""], ["killed", "invisible"],
    ]  # fmt: skip


def test_the_operators_matrix_has_a_row_a_tensor():
    report = Report(operator="mine", expect="invariant", cells={("y", "batch"): None},
                    errors={"y": 0.25}, expected={("y", "batch")})  # fmt: skip
    grid = ops_grid(OpsMatrix(dtype="float32", reports=(report,)))
    ((labels, squares),) = grid.tables[0].rows
    assert labels == ("mine", "y")
    assert {s.text for s in squares} == {"-", "same", "0.2"}


def test_variants_have_a_row_each():
    data = {"script": "train.py", "steps": 3, "dtype": "float64", "status": "fail", "said": ["s"],
            "cells": [{"variant": name, "ranks": ranks, "status": status, "text": text, "run": "d",
                       "worst_of_threshold": worst, "tensors": 4, "differing_tensors": other}
                      for name, ranks, status, text, worst, other in (
                          ("as given", 1, "pass", "", 0.5, 0),
                          ("as given", 3, "fail", "rank 1", 7.0, 2),
                          ("compiled", 1, "unknown", "", None, None))]}  # fmt: skip
    grid = variants_grid(data)
    (table,) = grid.tables
    assert table.columns == ("1 process", "3 ranks")
    assert [[s.text for s in squares] for _, squares in table.rows] == [
        ["PASS, 0.500000 of threshold, same bits",
         "FAIL, 7.000000 of threshold, 2 of 4 other bits"],
        ["UNKNOWN", ""],
    ]  # fmt: skip
    assert grid.notes == ("as given, 3 ranks: rank 1", "  sumgrad report d", "s")


def test_the_terminal_names_an_operator_once_and_obeys_nothing():
    lines = text_of(small("op", rows=3)).splitlines()
    assert [line.split()[:1] for line in lines if "op0" in line or "op1" in line] == [
        ["op"], ["op1"],
    ]  # fmt: skip
    text = text_of(small(HOSTILE))
    assert "\x1b[31m" not in text
    assert "[bold]" in text


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_cell_is_cut(width):
    text = text_of(matrix_grid(Matrix(cells=CELLS)), width)
    assert "…" not in text
    assert all(len(line) <= width for line in text.splitlines())


def test_junit_has_every_cell_that_says_something():
    suite = ElementTree.fromstring(grid_to_junit(small(HOSTILE, rows=2)))
    assert suite.get("tests") == "3"
    assert suite.get("failures") == "3"
    assert [len(case.findall("failure")) for case in suite] == [1, 1, 1]
    unknown = ElementTree.fromstring(grid_to_junit(small(status="unknown")))
    assert (unknown.get("failures"), unknown.get("errors")) == ("0", "2")
    passed = ElementTree.fromstring(grid_to_junit(small(status="pass")))
    assert (passed.get("failures"), passed.get("errors")) == ("0", "0")


def test_markdown_is_a_table_and_folds_a_long_one():
    text = grid_to_markdown(small(HOSTILE))
    html = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    assert html.count("<table>") == 1
    assert html.count("<td>") == 4
    assert "<script>" not in html
    assert "<details>" not in grid_to_markdown(small(rows=MOST_ROWS))
    assert "<details>" in grid_to_markdown(small(rows=MOST_ROWS + 1))


def test_html_escapes_and_has_one_script():
    page = grid_to_html(small(HOSTILE))
    assert page.count("<script>") == 1
    assert "<h2>What fails</h2>" in page
    assert "<h2>To look at</h2>" in grid_to_html(small(status="pass"))
    assert "<script>x" not in page
    assert "49" not in page.partition("<h1>")[2].partition("<script>")[0]


def test_a_workflow_gets_a_line_for_each_that_fails():
    lines = list(grid_lines(matrix_grid(Matrix(cells=CELLS))))
    assert [line.partition(" ")[0] for line in lines] == ["::error", "::error"]
    assert "missed%3A" not in lines[0]  # a message keeps its colons
    (line,) = grid_lines(matrix_grid(Matrix(cells=CELLS[:1])))
    assert line.startswith("::notice title=sumgrad PASS%3A planted faults::PASS: 1 clean")
