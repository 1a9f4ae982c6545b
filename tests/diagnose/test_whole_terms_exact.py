"""Parameters of one number: any factor fits one, terms that are there or not need few."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from records_in_memory import compared, program_record
from sumgrad.diagnose.diagnose import diagnose

AT = ("structure", 0)
NAMES = ("a", "b", "c")
TERMS = {
    "fit": {"a": 1.3, "b": 0.0, "c": 0.0},
    "count": {"a": 0.0, "b": -2.1, "c": 0.0},
    "norm": {"a": 0.0, "b": 0.0, "c": 0.7},
    "log_vars": {"a": 0.5, "b": 0.5, "c": 0.5},
}


def cause_of(got, *, terms=TERMS, kind="rows"):
    """Every rank holds `got` of three parameters of one number each."""
    one = program_record(tiers={"structure": "float64"}, ranks=2)
    by_term = {
        t: {n: torch.tensor(v, dtype=torch.float64) for n, v in grads.items()}
        for t, grads in terms.items()
    }
    (reference,) = one.references["structure"]
    reference = replace(
        reference, grads={n: torch.stack([g[n] for g in by_term.values()]).sum(0) for n in NAMES},
        by_term=by_term, scale=dict.fromkeys(NAMES, 4.0), same_dtype={}, partials={},
        floor=dict.fromkeys(NAMES, 1e-14), resolution=dict.fromkeys(terms, dict.fromkeys(NAMES, 0)),
        kinds=dict.fromkeys(terms, kind), counts=dict.fromkeys(terms, 1), intervals=(),
    )  # fmt: skip
    grads = {n: torch.tensor(v, dtype=torch.float64) for n, v in got.items()}
    ranks = {r: replace(held, params=NAMES, grads={AT: grads}) for r, held in one.ranks.items()}
    facts = replace(one.spec.facts, params=dict.fromkeys(NAMES, ()), terms=tuple(terms), num_rows=1)
    record = replace(one, spec=replace(one.spec, facts=facts), ranks=ranks,
                     references={"structure": [reference]})  # fmt: skip
    return diagnose(compared(record)).causes[0]


def total(*names):
    return {n: sum(TERMS[t][n] for t in names) for n in NAMES}


@pytest.mark.parametrize(
    ("there", "words"),
    [
        (("log_vars",), "fit, count, norm never reach a, b, c: they are not in the graph"),
        (("fit", "count", "norm"), "log_vars never reaches a, b, c: it is not in the graph"),
    ],
)
def test_terms_that_are_there_or_not_are_told_from_few_numbers(there, words):
    cause = cause_of(total(*there))
    assert cause.cause.startswith(words), cause.cause
    assert cause.kind in ("term_factor", "term_by_parameter")


def test_a_term_that_reaches_none_of_them_is_left_out():
    none = dict.fromkeys(NAMES, 0.0)
    cause = cause_of(total("log_vars"), terms={**TERMS, "elsewhere": none})
    assert cause.cause.startswith("fit, count, norm never reach a, b, c: they are not in the graph")


@pytest.mark.parametrize(
    ("got", "terms"),
    [
        ({"a": 1.0, "b": -1.0, "c": 2.0}, TERMS),  # one factor each, which says nothing
        ({**total("log_vars"), "c": 0.5 + 1e-9}, TERMS),
        # two answers: `again` is what `fit` is
        (total("count", "norm", "log_vars"), {**TERMS, "again": TERMS["fit"]}),
    ],
)
def test_one_number_each_is_no_factor_of_a_parameter(got, terms):
    assert cause_of(got, terms=terms).kind not in ("param_factors", "term_factor")
