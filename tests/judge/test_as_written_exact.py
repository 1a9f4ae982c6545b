"""Casts that no tier made as they are written, and a fault that struck nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from records_in_memory import compared, program_record
from sumgrad.judge.checks.complete import as_it_is_written
from sumgrad.judge.checks.ledgers import the_fault_struck

BOTH = {"structure": "float64", "precision": "float32"}


def with_info(record, **more):
    ranks = {rank: replace(held, info={at: {**info, **more} for at, info in held.info.items()})
             for rank, held in record.ranks.items()}  # fmt: skip
    return replace(record, ranks=ranks)


@pytest.mark.parametrize(
    ("tiers", "casts", "change", "is_said"),
    [
        ({"structure": "float64"}, {"bfloat16 at m.py:3": 2}, {}, True),
        ({"structure": "float64"}, {"float16 at m.py:3": 2}, {}, True),
        (
            {"structure": "float64", "precision": "float64"},
            {"float8_e4m3fn at m.py:3": 2},
            {},
            True,
        ),
        (BOTH, {"bfloat16 at m.py:3": 2}, {}, False),  # which makes them
        ({"structure": "float64"}, {"float32 at m.py:3": 2}, {}, False),  # it has digits enough
        ({"structure": "float64"}, {}, {}, False),
        ({"structure": "float64"}, {"bfloat16 at m.py:3": 2}, {"lift": False}, False),
        ({"structure": "float64"}, {"bfloat16 at m.py:3": 2}, {"fault": "avg:x"}, False),
    ],
)
def test_casts_that_were_lifted_in_every_tier_are_not_known(tiers, casts, change, is_said):
    record = with_info(program_record(tiers=tiers), lifted=casts)
    found = list(as_it_is_written(compared(replace(record, spec=replace(record.spec, **change)))))
    assert [one.level for one in found] == (["unknown"] if is_said else [])
    assert not is_said or f"{next(iter(casts))} computed in float64 in each" in found[0].text


def test_a_block_under_autocast_casts_nothing_in_float64():
    told = {"bfloat16 at m.py:7": 1}
    for tiers, is_said in (({"structure": "float64"}, True), (BOTH, False)):
        record = with_info(program_record(tiers=tiers), autocast=told)
        found = [one.text for one in as_it_is_written(compared(record))]
        assert len(found) == is_said
        assert not is_said or "bfloat16 at m.py:7 computed in float64" in found[0]


@pytest.mark.parametrize(
    ("fault", "told", "is_said"),
    [
        ("avg:allreduce@tp#0", {"calls": 0, "changed": False}, True),
        ("avg:allreduce@dp#0", {"calls": 1, "changed": False}, False),
        ("double_divide", None, False),  # of no collective
        (None, {"calls": 0, "changed": False}, False),
    ],
)
def test_a_fault_that_no_collective_has_is_not_known(fault, told, is_said):
    record = with_info(program_record(), fault=told)
    found = list(
        the_fault_struck(compared(replace(record, spec=replace(record.spec, fault=fault))))
    )
    said = "the fault avg:allreduce@tp#0 struck nothing: the step issues allreduce@dp#0"
    assert [one.text for one in found] == ([said] if is_said else [])
    assert {one.level for one in found} <= {"unknown"}
