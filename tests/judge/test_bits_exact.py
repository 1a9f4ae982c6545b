"""Gradients beside their reference bit by bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from records_in_memory import program_record
from sumgrad.diagnose.verdict import judge
from sumgrad.judge.bits import Bits, bits_of
from sumgrad.launch.script.options import AS_GIVEN
from sumgrad.launch.script.variants import _cell

AT = ("structure", 0)


def counted(change):
    record = program_record(tiers={"structure": "float64"})
    held = record.ranks[1].grads[AT]
    held["w"] = held["w"].clone()
    change(held)
    return bits_of(record)


ALL = bits_of(program_record(tiers={"structure": "float64"})).tensors


@pytest.mark.parametrize(("change", "differing", "elements"), [
    (lambda held: None, 0, 0),
    (lambda held: held["w"].view(-1)[0].mul_(1 + 2**-52), 1, 1),
    (lambda held: held["w"].mul_(-1), 1, 12),
    (lambda held: held["w"].fill_(float("nan")), 1, 12),
    (lambda held: held.update(w=held["w"].reshape(-1)), 1, 12),
])  # fmt: skip
def test_every_element_with_other_bits_is_counted(change, differing, elements):
    found = counted(change)
    assert found == Bits(tensors=ALL, differing=differing, elements=elements)


def test_a_zero_of_the_other_sign_is_another_number():
    record = program_record(tiers={"structure": "float64"})
    (reference,) = record.references["structure"]
    for held in record.ranks.values():
        held.grads[AT]["w"] = held.grads[AT]["w"] * 0
    zeros = {**reference.grads, "w": reference.grads["w"].abs() * 0}
    record.references["structure"] = [replace(reference, grads=zeros)]
    assert bits_of(record).elements == 3 * int((program_record().references["structure"][0]
                                                .grads["w"] < 0).sum())  # fmt: skip


@pytest.mark.parametrize(("bitwise", "status"), [(False, "pass"), (True, "fail")])
def test_other_bits_fail_where_bits_are_asked_for(bitwise, status):
    record = replace(program_record(), directory=Path("x"))
    held = record.ranks[0].grads[AT]
    held["w"] = held["w"] * (1 + 2**-52)
    cell = _cell(AS_GIVEN, 3, judge(record), record, bitwise)
    assert cell.status == status, cell.text
