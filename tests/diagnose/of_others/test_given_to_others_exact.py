"""What one gradient has too much is what another lacks, in records made by hand."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import torch
from records_in_memory import compared, program_record
from sumgrad.diagnose.diagnose import diagnose
from sumgrad.diagnose.explainers.of_others import replaced

AT = ("structure", 0)
SIZES = {"a.de": (6, 4), "a.fr": (6, 4), "b.de": (10,), "b.fr": (10,), "tiny": (2,)}


def cause_of(change):
    """change: of a dict of the right gradients, in place, of every rank."""
    one = program_record(tiers={"structure": "float64"}, ranks=2)
    drawn = torch.Generator().manual_seed(3)
    grads = {n: torch.randn(s, generator=drawn).double() for n, s in SIZES.items()}
    (reference,) = one.references["structure"]
    reference = replace(
        reference, grads=grads, scale=dict.fromkeys(SIZES, 4.0), same_dtype={}, partials={},
        floor=dict.fromkeys(SIZES, 1e-15), floor_by_term={"loss": dict.fromkeys(SIZES, 1e-15)},
        by_term={"loss": grads}, resolution={"loss": dict.fromkeys(SIZES, 1e-20)},
        kinds={"loss": "coupled"}, counts={"loss": 1}, reached=tuple(SIZES),
    )  # fmt: skip
    ranks = {}
    for rank, held in one.ranks.items():
        got = {n: g.clone() for n, g in grads.items()}
        change(got)
        ranks[rank] = replace(held, grads={AT: got}, params=tuple(SIZES))
    facts = replace(one.spec.facts, params=SIZES, terms=("loss",), num_rows=1)
    spec = replace(one.spec, facts=facts)
    record = replace(one, spec=spec, ranks=ranks, references={"structure": [reference]})
    return diagnose(compared(record)).causes[0]


def given(grads, *pairs, share=1.0):
    for more, less in pairs:
        grads[more] += share * grads[less]
        grads[less] *= 1 - share


def test_what_one_lacks_and_the_other_has_is_told_in_pairs():
    cause = cause_of(lambda g: given(g, ("a.de", "a.fr"), ("b.de", "b.fr")))
    assert (cause.kind, cause.standing, cause.ranks) == ("given_to_others", "proved", (0, 1))
    assert cause.cause == (
        "gradients were given to other parameters: a.de has what a.fr lacks; b.de has what b.fr "
        "lacks, on rank 0-1"
    )
    assert cause_of(lambda g: given(g, ("a.de", "a.fr"), share=0.25)).kind == "given_to_others"


def test_what_is_wrong_besides_is_said():
    def change(grads):
        given(grads, ("b.de", "b.fr"))
        grads["a.de"] += grads["a.fr"] ** 2

    cause = cause_of(change)
    assert (cause.kind, cause.standing) == ("given_to_others", "likely")
    assert cause.however[0].startswith("a.de is wrong too, and whether by the same is not known")


def test_almost_the_same_or_too_few_numbers_are_no_pair():
    def almost(grads):
        given(grads, ("a.de", "a.fr"))
        grads["a.de"][0, 0] += 1e-9

    assert cause_of(almost).kind != "given_to_others"

    def swapped(grads):
        grads["a.de"], grads["a.fr"] = grads["a.fr"], grads["a.de"]

    assert cause_of(swapped).kind == "held_elsewhere"


def test_what_has_the_other_sign_lies_in_no_other_place():
    """As the mirrored half of what is skew, whose numbers are those of the other half."""
    half = torch.randn(6, 6, generator=torch.Generator().manual_seed(8)).double().triu(1)
    skew = half - half.T
    flat = skew.reshape(-1).sort()
    pool = replaced.Pool(names=("a",), values=flat.values, at=flat.indices,
                         owner=torch.zeros(36, dtype=torch.long))  # fmt: skip
    for got, told in ((half + half.T, False), (skew.roll(1, 0), True)):
        cell = SimpleNamespace(name="a", measured=got, index=None,
                               wanted=SimpleNamespace(value=skew, threshold=1e-12))  # fmt: skip
        assert (replaced._look_for(cell, pool) is not None) == told


def test_what_is_not_finite_was_put_together_of_nothing():
    """Torch's least squares raises of it."""
    right = torch.randn(8, generator=torch.Generator().manual_seed(2)).double()
    other = right.flip(0) * 2
    infinite = other.index_fill(0, torch.tensor(3), float("inf"))
    for own, said in ((other, "b's of rank 1"), (infinite, None)):
        cell = SimpleNamespace(name="a", measured=own, index=None,
                               wanted=SimpleNamespace(threshold=1e-12))  # fmt: skip
        at = {"a": torch.arange(8), "b": torch.arange(8)}
        given_in = {0: ({"a": right[None]}, at), 1: ({"b": own[None]}, at)}
        assert replaced._sources(cell, given_in) == said


def added(grads, *pairs):
    right = {name: grad.clone() for name, grad in grads.items()}
    for one, other in pairs:
        grads[one] += right[other]
        grads[other] += right[one]


def test_two_under_one_key_have_each_the_others_too():
    cause = cause_of(lambda g: added(g, ("a.de", "a.fr"), ("b.de", "b.fr")))
    assert (cause.kind, cause.standing, cause.ranks) == ("given_to_others", "proved", (0, 1))
    assert cause.cause == (
        "gradients of two parameters were added up: besides its own gradient a.de has that of "
        "a.fr; a.fr has that of a.de; b.de has that of b.fr; and so 1 more, on rank 0-1"
    )


def test_one_that_has_anothers_besides():
    def change(grads):
        grads["a.de"] += grads["a.fr"]

    assert cause_of(change).cause == (
        "gradients of two parameters were added up: besides its own gradient a.de has that of "
        "a.fr, on rank 0-1"
    )


def test_all_that_is_wrong_has_to_be_so():
    def change(grads):
        grads["a.de"] += grads["a.fr"]
        grads["b.de"] += 0.5 * grads["b.fr"]

    assert cause_of(change).kind != "given_to_others"


def test_two_numbers_are_like_many():
    assert cause_of(lambda g: g["tiny"].add_(g["tiny"].flip(0))).kind != "given_to_others"
