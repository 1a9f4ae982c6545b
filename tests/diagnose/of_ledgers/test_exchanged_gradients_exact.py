"""One reduction of a gradient by value: its result, what it was given, and what a parameter has."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sumgrad.diagnose.explainers.of_ledgers.exchanged import _of_cell, _one_kind
from sumgrad.record.exchanged import Exchange
from sumgrad.record.trace import Trace, Traces

SIZE = 12


def numbers(seed: int, size: int = SIZE) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


OWN = {0: numbers(0), 1: numbers(1)}
BEFORE = {0: numbers(10), 1: numbers(11)}
SUM = OWN[0] + OWN[1]
PADDED = numbers(20, 3)  # what stands before the gradient in a flat buffer


def event(number: int, op="allreduce", ranks=(0, 1), site="a.py:1") -> dict:
    return {"n": number, "op": op, "reduce": "SUM", "group": list(ranks), "site": site,
            "label": "structure/0/step", "dtype": "float64"}  # fmt: skip


def traces(*issued: tuple[dict, dict[int, tuple]], own=OWN) -> Traces:
    """issued: of each operation its event, and by rank (given, got, before)."""
    ranks = {}
    for rank in OWN:
        held = [
            Exchange(number=i, given=v[rank][0], got=v[rank][1], before=v[rank][2])
            for i, (_, v) in enumerate(issued)
        ]
        ranks[rank] = Trace(
            calls=(),
            outputs=(),
            gradients=(),
            sources={},
            events=tuple(e for e, _ in issued),
            exchanges=tuple(held),
            own={"w": own[rank][None]} if own else {},
        )
    single = Trace(calls=(), outputs=(), gradients=(), sources={})
    return Traces(tier="structure", step=0, ranks=ranks, single=single)


def flat(value: torch.Tensor) -> torch.Tensor:
    return torch.cat([PADDED, value])


def told(has: torch.Tensor, found: Traces, wanted=SUM, rank=0):
    cell = SimpleNamespace(
        rank=rank, name="w", index=None, measured=has, wanted=SimpleNamespace(value=wanted)
    )
    one = _of_cell(found, cell)
    return None if one is None else (one.kind, one.who, one.op.event["site"])


def reduced(given=OWN, got=None) -> tuple[dict, dict[int, tuple]]:
    got = sum(given.values()) if got is None else got
    return event(0), {r: (flat(given[r]), flat(got), flat(BEFORE[r])) for r in OWN}


def test_a_right_result_that_the_parameter_has():
    assert told(SUM, traces(reduced())) is None


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_a_right_result_that_is_not_used(factor):
    """Also where an average is taken after it."""
    found = traces(reduced())
    assert told(OWN[0] * factor, found, SUM * factor) == ("unused_result", (0,), "a.py:1")


def test_a_right_result_that_is_read_too_early():
    half = torch.cat([SUM[:6], OWN[0][6:]])
    assert told(half, traces(reduced())) == ("missing_wait", (0,), "a.py:1")


def test_a_result_that_is_issued_again_and_counted_so_often():
    once = reduced()
    again = (event(1), once[1])
    assert told(2 * SUM, traces(once, again)) == ("double_reduction", (0, 1), "a.py:1")
    assert told(2 * SUM, traces(once)) is None  # a factor of two has many causes


def test_twice_what_is_right_is_no_repeated_reduction():
    """A loss that counts twice: the result is that, and so is what the parameter has."""
    twice = {r: 2 * g for r, g in OWN.items()}
    again = reduced(twice)
    assert told(2 * SUM, traces(again, (event(1), again[1]), own=twice)) is None


def test_what_is_summed_already_and_is_summed_again():
    """As part of another message: all ranks put in the right gradient, which the first sum gave."""
    once = reduced()
    message = {r: (flat(SUM), 2 * flat(SUM), flat(BEFORE[r])) for r in OWN}
    again = (event(1, site="a.py:2"), message)
    assert told(2 * SUM, traces(once, again)) == ("summed_again", (0, 1), "a.py:2")
    assert told(3 * SUM, traces(once, again)) is None  # something else came on top
    alone = {r: (flat(SUM), 2 * flat(SUM), flat(BEFORE[r])) for r in OWN}
    assert told(2 * SUM, traces((event(0, site="a.py:2"), alone), own=None)) is None
    half = {**message, 1: (flat(OWN[1]), 2 * flat(SUM), flat(BEFORE[1]))}
    assert told(2 * SUM, traces(once, (event(1, site="a.py:2"), half))) is None


def test_zeros_in_place_of_a_gradient():
    found = traces(reduced({0: OWN[0], 1: torch.zeros(SIZE, dtype=torch.float64)}))
    assert told(OWN[0], found) == ("lost_contribution", (1,), "a.py:1")


def test_zeros_of_a_rank_that_has_none_are_right():
    own = {0: OWN[0], 1: torch.zeros(SIZE, dtype=torch.float64)}
    assert told(OWN[0], traces(reduced(own), own=own)) is None


def test_what_was_put_in_in_the_step_before_on_top():
    found = traces(reduced({0: OWN[0], 1: OWN[1] + BEFORE[1]}))
    assert told(SUM + BEFORE[1], found) == ("stale_buffer", (1,), "a.py:1")


def test_something_else_is_not_explained():
    found = traces(reduced({0: OWN[0], 1: numbers(30)}))
    assert told(OWN[0] + numbers(30), found) is None


def test_what_is_not_all_that_is_wrong_is_not_said():
    found = traces(reduced({0: OWN[0], 1: torch.zeros(SIZE, dtype=torch.float64)}))
    assert told(OWN[0], found, SUM + numbers(40)) is None


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("unused_result", lambda own, got: own),
        ("missing_wait", lambda own, got: torch.cat([got[:6], own[6:]])),
        ("double_reduction", lambda own, got: 2 * got),
    ],
)
def test_a_reduction_before_another_whose_result_does_not_go_on(kind, given):
    """Over two ranks first, then over two others: what rank 1 puts into the second is not it."""
    first = (event(0, site="first.py:1"), {r: (OWN[r], SUM, None) for r in OWN})
    second_of = {0: SUM, 1: given(OWN[1], SUM)}
    total = sum(second_of.values())
    second = (event(1, site="second.py:2"), {r: (second_of[r], total, None) for r in OWN})
    found = traces(first, second, own=None)
    assert told(total, found, 2 * SUM) == (kind, (1,), "first.py:1")


@pytest.mark.parametrize(
    ("kinds", "kind"),
    [
        (set(), None),
        ({"stale_buffer"}, "stale_buffer"),
        ({"unused_result", "missing_wait"}, "missing_wait"),
        ({"stale_buffer", "missing_wait"}, None),
    ],
)
def test_several_ranks_do_one_thing(kinds, kind):
    assert _one_kind(kinds) == kind
