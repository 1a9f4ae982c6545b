"""A gradient where the single process has exactly zero, from records made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from records_in_memory import compared, program_record
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.left_over.not_zeroed import gradient_where_zero_belongs

AT = ("structure", 0)


def cause_of(change, *, zeros=True):
    """Two ranks; w's rows 0 and 2 are zero in the single process, and `change` is added to w."""
    one = program_record(tiers={"structure": "float64"}, ranks=2)
    (reference,) = one.references["structure"]
    wanted = reference.grads["w"].clone()
    if zeros:
        wanted[[0, 2]] = 0
    references = {"structure": [replace(reference, grads={**reference.grads, "w": wanted})]}
    ranks = {
        r: replace(h, grads={AT: {**h.grads[AT], "w": wanted + change}})
        for r, h in one.ranks.items()
    }
    record = replace(one, ranks=ranks, references=references)
    case = Case(record=record, tier="structure", step=0, diffs=compared(record).diffs)
    found = list(gradient_where_zero_belongs(case, frozenset({0})))
    return found[0].diagnosis if found else None


def added(*rows):
    change = torch.zeros(4, 3, dtype=torch.float64)
    change[list(rows)] = 0.25
    return change


def test_it_is_said_where():
    cause = cause_of(added(2))
    assert cause.kind == "not_zeroed"
    assert cause.ranks == (0, 1)
    assert cause.cause.endswith("everything else of w is right: w rows 2 of 4 on rank 0-1")
    assert "tensor hook or a mask" in cause.because[0]


@pytest.mark.parametrize(
    ("change", "zeros"), [(added(1), True), (added(0, 1), True), (added(0), False), (added(), True)]
)
def test_other_wrong_elements_are_another_matter(change, zeros):
    assert cause_of(change, zeros=zeros) is None


def test_all_of_a_parameter_is_not_a_part_of_it():
    one = program_record(tiers={"structure": "float64"}, ranks=2)
    (reference,) = one.references["structure"]
    none = {**reference.grads, "w": torch.zeros(4, 3, dtype=torch.float64)}
    ranks = {r: replace(h, grads={AT: {**none, "w": added(1)}}) for r, h in one.ranks.items()}
    record = replace(one, ranks=ranks, references={"structure": [replace(reference, grads=none)]})
    case = Case(record=record, tier="structure", step=0, diffs=compared(record).diffs)
    assert list(gradient_where_zero_belongs(case, frozenset({0}))) == []
