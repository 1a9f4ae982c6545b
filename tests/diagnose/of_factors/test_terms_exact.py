"""A term with a factor of its own in each parameter, from records made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from records_in_memory import compared, program_record
from sumgrad.diagnose.diagnose import diagnose

AT = ("structure", 0)
SIZES = {"w": (5, 6), "b": (12,)}


def cause_of(factors, *, tilt=0.0, names=("w", "b")):
    """Rank i's penalty of a parameter times `factors[i][name]`."""
    one = program_record(tiers={"structure": "float64"}, ranks=2)
    drawn = torch.Generator().manual_seed(3)
    by_term = {t: {n: torch.randn(s, generator=drawn).double() for n, s in SIZES.items()}
               for t in ("fit", "penalty")}  # fmt: skip
    for name in SIZES.keys() - set(names):
        by_term["penalty"][name].zero_()
    grads = {n: by_term["fit"][n] + by_term["penalty"][n] for n in SIZES}
    (reference,) = one.references["structure"]
    reference = replace(
        reference, grads=grads, by_term=by_term, scale=dict.fromkeys(SIZES, 4.0), same_dtype={},
        partials={}, resolution=dict.fromkeys(by_term, dict.fromkeys(SIZES, 1e-20)),
        kinds=dict.fromkeys(by_term, "coupled"), counts=dict.fromkeys(by_term, 1),
    )  # fmt: skip
    ranks = {}
    for rank, held in one.ranks.items():
        got = {n: by_term["fit"][n] + factors[rank].get(n, 1.0) * by_term["penalty"][n]
               for n in SIZES}  # fmt: skip
        got["w"] = got["w"] + tilt * torch.randn(SIZES["w"], generator=drawn).double()
        ranks[rank] = replace(held, grads={AT: got})
    facts = replace(one.spec.facts, params=SIZES, terms=("fit", "penalty"), num_rows=1)
    record = replace(one, spec=replace(one.spec, facts=facts), ranks=ranks,
                     references={"structure": [reference]})  # fmt: skip
    return diagnose(compared(record)).causes[0]


def test_a_term_with_another_factor_in_each_parameter_is_named():
    cause = cause_of([{"w": 1.5, "b": 2.0}, {"w": 1.25, "b": 3.0}])
    assert (cause.kind, cause.term, cause.standing) == ("term_by_parameter", "penalty", "proved")
    assert cause.cause == (
        "penalty counts otherwise in each parameter and on each rank: 3/2 times in w on rank 0, "
        "5/4 times in w on rank 1, 2 times in b on rank 0, 3 times in b on rank 1; fit is right"
    )


@pytest.mark.parametrize(
    ("factors", "names", "words", "once"),
    [
        ({"w": 1.5}, "wb", "penalty counts 3/2 times in w; fit is right", "counts once in b"),
        ({"w": 0.0}, "wb", "penalty does not reach w; fit is right", "counts once in b"),
        ({"w": 1.5}, "w", "penalty counts 3/2 times in w; fit is right", None),
    ],
)
def test_one_factor_in_some_parameters_names_those_where_it_is_right(factors, names, words, once):
    cause = cause_of([factors] * 2, names=tuple(names))
    assert (cause.cause, cause.kind) == (words, "term_by_parameter")
    assert (once is None) == (len(cause.because) == 1)
    assert once is None or once in cause.because[1]


def test_what_is_no_factor_of_a_term_is_not_named():
    assert cause_of([{"w": 1.5, "b": 2.0}] * 2, tilt=1e-9).kind != "term_by_parameter"
