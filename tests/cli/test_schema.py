"""verdict.json as its readers see it: of now and of the first release, and what is none."""

from __future__ import annotations

import json

import pytest
from conftest import ROOT
from records_in_memory import planned_record, program_record
from sumgrad.base.errors import UserError
from sumgrad.base.files import write_json
from sumgrad.diagnose.verdict import judge
from sumgrad.report.schema import FILE, json_schema, read_verdict

OLD = ROOT / "tests" / "data" / "verdict_of_the_first_release.json"


def test_a_verdict_of_the_first_release_still_loads():
    verdict = read_verdict(OLD)
    assert verdict.status == "fail"
    assert verdict.diagnoses[0].standing is None
    assert verdict.topology.pools["ci"].ranks == [0, 1, 2, 3]


@pytest.mark.parametrize("factor", [1.0, 1.5, float("nan")])
@pytest.mark.parametrize("make", [planned_record, program_record])
def test_every_verdict_of_now_is_one(make, factor, tmp_path):
    record = make()
    for held in record.ranks.values():
        for grads in held.grads.values():
            name = next(iter(grads))
            grads[name] = grads[name] * factor
    data = judge(record).data
    write_json(tmp_path / "verdict.json", data)
    read = read_verdict(tmp_path / "verdict.json")
    assert read.status == ("pass" if factor == 1.0 else "fail")
    assert len(read.tensors) == len(data["tensors"])


@pytest.mark.parametrize(("change", "words"), [
    ({"schema": 2}, "schema: Input should be 1"),
    ({"status": "PASS"}, "status: Input should be 'pass'"),
    ({"tensors": None}, "tensors: Input should be a valid list"),
    ({"seed": "0"}, "seed: Input should be a valid integer"),
])  # fmt: skip
def test_what_is_none_is_refused_at_its_place(change, words, tmp_path):
    path = tmp_path / "verdict.json"
    write_json(path, {**json.loads(OLD.read_text()), **change})
    with pytest.raises(UserError, match=r"no verdict\.json that this version reads") as refused:
        read_verdict(path)
    assert words in str(refused.value)


def test_names_of_later_versions_are_left_alone(tmp_path):
    path = tmp_path / "verdict.json"
    write_json(path, {**json.loads(OLD.read_text()), "new": {"a": 1}})
    assert read_verdict(path).status == "fail"


def test_the_shipped_schema_is_the_one_that_is_made():
    assert json.loads(FILE.read_text()) == json_schema()
