"""Hosts with a network, a process table and a disk of their own; the whole table is
scripts/several_hosts.py and docs/data/several_hosts.json."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
from conftest import ROOT
from hosts import why_not
from kills_hosts import draw
from several_hosts import CASES, run_case, table

pytestmark = pytest.mark.distributed
BY_NAME = {case.name: case for case in CASES}


@pytest.mark.parametrize("name", [
    "a right step", "averages instead of a sum", "rank 0's host loses its power",
])  # fmt: skip
def test_every_host_ends_as_it_must(tmp_path, name):
    if reason := why_not():
        pytest.skip(reason)
    row = run_case(BY_NAME[name], tmp_path)
    assert row.as_wanted, row


def test_the_stored_table_is_of_these_cases():
    rows = json.loads((ROOT / "docs" / "data" / "several_hosts.json").read_text())["rows"]
    assert [row["name"] for row in rows] == [case.name for case in CASES]
    assert all(row["as_wanted"] and row["left"] == 0 for row in rows)
    assert table(rows) in (ROOT / "docs" / "clusters.md").read_text()


def test_the_stored_kills_are_of_the_cases_that_are_drawn():
    found = json.loads((ROOT / "docs" / "data" / "kills_hosts.json").read_text())
    drawn = [json.loads(json.dumps(asdict(case))) for case in draw(found["seed"], found["cases"])]
    assert [row["case"] for row in found["rows"]] == drawn
    assert found["problems"] == sum(len(row["problems"]) for row in found["rows"]) == 0
    page = " ".join((ROOT / "docs" / "clusters.md").read_text().split())
    assert f"{found['cases']} checks over two or three hosts" in page
    assert f"the last host ended after {found['slowest_s']:.0f} s" in page
