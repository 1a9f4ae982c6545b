"""Hosts with a network, a process table and a disk of their own; the whole table is
scripts/several_hosts.py and docs/data/several_hosts.json."""

from __future__ import annotations

import json

import pytest
from conftest import ROOT
from hosts import why_not
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
