"""What a ledger alone shows of a wrong gradient, from records made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from records_in_memory import compared, program_record
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.of_ledgers import ledger
from sumgrad.diagnose.explainers.of_ledgers.ledger import (
    cause_in_ledger,
    runs_narrow,
    something_else_goes_in,
)
from sumgrad.record.ranks import OWN, OWN_AT

AT = ("structure", 0)
W_AND_B = [["w", 1.0], ["b", 1.0]]


def case_of(events, *, off=0.5, feeds=True, tier_dtype="float64", rough=False):
    """Three ranks, w wrong by `off` of itself; events: what each rank's all-reduce says besides.

    rough: each element up or down, as roundings are, and not by one factor.
    """
    drawn = torch.Generator().manual_seed(7)
    one = program_record(tiers={"structure": tier_dtype})
    ranks = {}
    for rank, held in one.ranks.items():
        (event,) = held.events[AT]
        event = {**event, "nonzero": True, "input": f"in{rank}", "grads": W_AND_B, **events[rank]}
        sign = 2.0 * torch.randint(0, 2, held.grads[AT]["w"].shape, generator=drawn) - 1
        wrong = off * held.grads[AT]["w"] * (sign if rough else 1)
        grads = {n: g + wrong if n == "w" else g for n, g in held.grads[AT].items()}
        info = held.info[AT] | ({} if feeds else {"feeds": []})
        ranks[rank] = replace(held, grads={AT: grads}, events={AT: [event]}, info={AT: info})
    started = {r: list(h.events[AT]) for r, h in ranks.items()}
    record = compared(replace(one, ranks=ranks, started=started))
    return Case(record=record.record, tier="structure", step=0, diffs=record.diffs)


def alike(**event):
    return [event] * 3


@pytest.mark.parametrize(
    ("events", "kind", "words", "ranks"),
    [
        ([{}, {}, {"grads": [], "nonzero": False}], "lost_contribution",
         "rank 2 puts zeros into the all-reduce over dp (ranks 0-2) at mine.py:9", (2,)),
        ([{}, {"grads": []}, {}], "changed_input",
         "rank 1 puts something else into the all-reduce over dp (ranks 0-2) at mine.py:9", (1,)),
        (alike(reduce="AVG"), "avg", "averages where others sum", (0, 1, 2)),
        (alike(dtype="bfloat16"), "low_precision", "runs in bfloat16", (0, 1, 2)),
        (alike(input="same"), "double_reduction", "sums the same bits", (0, 1, 2)),
    ],
)  # fmt: skip
def test_a_reduction_of_a_wrong_gradient_is_odd(events, kind, words, ranks):
    cause = cause_in_ledger(case_of(events))
    assert (cause.kind, cause.ranks) == (kind, ranks)
    assert words in cause.cause
    assert cause.standing == "likely"


def test_what_is_no_number_is_the_same_on_all_ranks_and_not_whole():
    case = case_of(alike(input="same"), off=float("nan"))
    assert cause_in_ledger(case) is None
    some = case_of(alike(input="same"))
    some.cells[0].got.view(-1)[0] = float("inf")
    assert cause_in_ledger(some) is None


@pytest.mark.parametrize(
    "events",
    [
        alike(),
        alike(grads=[]),  # nobody's is found by its values
        [{}, {}, {"grads": None}],  # too large to look into
        [{}, {"grads": []}, {"grads": []}],  # more others than own
        [{"grads": [["w", 0.5]]}, {}, {"grads": []}],  # those that put theirs weigh it otherwise
        [{"grads": [["b", 1.0]]}] * 2 + [{"grads": []}],  # of a gradient that is right
    ],
)
def test_a_reduction_like_any_other_is_no_cause(events):
    case = case_of(events)
    assert cause_in_ledger(case) is None
    assert something_else_goes_in(case) == ()


@pytest.mark.parametrize(
    ("gave", "accused"), [(None, False), (0.0, False), (2.0, True), ("nobody kept it", True)]
)
def test_a_rank_whose_backward_gave_nothing_is_right_to_put_zeros_in(gave, accused):
    case = case_of([{}, {}, {"grads": [], "nonzero": False}])
    own, at = (OWN, 0), (OWN_AT, 0)
    ranks = {}
    for rank, held in case.record.ranks.items():
        value = 1.0 if rank < 2 else gave
        kept = {"w": torch.full((1, 12), value)} if isinstance(value, float) else {}
        more = {} if gave == "nobody kept it" else {own: kept, at: {"w": torch.arange(12)}}
        ranks[rank] = replace(held, grads={**held.grads, **more})
    case = replace(case, record=replace(case.record, ranks=ranks), known={})
    assert (cause_in_ledger(case) is not None) == accused


def test_as_many_others_as_own_are_accused():
    pair = {"group": [0, 1]}
    case = case_of([pair, {"grads": [], **pair}, {"group": [2]}])
    (words,) = something_else_goes_in(case)
    assert words.startswith("rank 1 puts something else into the all-reduce")


def test_a_group_of_one_puts_in_what_it_likes():
    events = [{"group": [r], "grads": [] if r else W_AND_B} for r in range(3)]
    assert something_else_goes_in(case_of(events)) == ()
    alone = [{"dtype": "bfloat16", "numel": 8, "group": [r], "grads": []} for r in range(3)]
    assert list(runs_narrow(case_of(alone, off=3e-3, rough=True), frozenset())) == []


def test_a_reduction_of_what_is_right_is_not_accused():
    case = case_of([{}, {"grads": []}, {}], off=0.0)
    assert cause_in_ledger(case) is None


def narrow(dtype, off, *, of=8, **more):
    more = {"rough": True, **more}
    case = case_of(alike(dtype=dtype, numel=of, grads=[]), off=off, feeds=False, **more)
    return [found.diagnosis for found in runs_narrow(case, frozenset())]


@pytest.mark.parametrize(
    ("dtype", "off"),
    [("bfloat16", 3e-3), ("bfloat16", 0.1), ("bfloat16", 1e-6), ("float16", 1e-3),
     ("float32", 1e-7), ("float32", 1e-11)],
)  # fmt: skip
def test_few_digits_of_whatever_is_exchanged(dtype, off):
    (cause,) = narrow(dtype, off)
    assert (cause.kind, cause.ranks, cause.standing) == ("low_precision", (0, 1, 2), "likely")
    assert cause.cause == f"the all-reduce over dp (ranks 0-2) at mine.py:9 runs in {dtype}"


@pytest.mark.parametrize(
    ("dtype", "off", "more"),
    [
        ("bfloat16", 0.5, {}),  # off by more than its roundings
        ("bfloat16", 1e-7, {}),  # and by less
        ("float32", 3e-3, {}),
        ("float64", 3e-3, {}),
        ("int64", 3e-3, {}),
        ("bfloat16", 3e-3, {"of": 1}),  # a number for a log
        ("bfloat16", 3e-3, {"rough": False}),  # one factor on all of it
        ("bfloat16", 3e-3, {"tier_dtype": "float32"}),  # as its step wants it
    ],
)
def test_digits_that_do_not_tell(dtype, off, more):
    assert narrow(dtype, off, **more) == []


def test_the_sums_here_are_what_they_are_taken_for():
    case = case_of(alike(), off=0.5)
    assert {(c.name, c.rank) for c in case.failing_cells} == {("w", 0), ("w", 1), ("w", 2)}
    assert all(torch.isfinite(c.measured).all() for c in case.cells)


def after_a_sum(*before):
    """Two ranks that reduce over both what they have reduced; before: what each rank's first
    reduction says besides, None for a rank without one."""
    own = {"group": [0, 1], "pg": "5", "grads": [["w", 1.0]], "nonzero": True}
    case = case_of([{}] * 3)
    ranks, started = {}, {}
    for rank, said in enumerate(before):
        (event,) = case.record.ranks[rank].events[AT]
        first = {**event, "n": 0, "input": f"own{rank}", "output": "sum", "grads": [["w", 1.0]]}
        last = {**event, **own, "n": 1, "input": f"own{rank}"}
        if said is not None and said.get("whole"):
            last |= {"input": "sum", "grads": []}
        events = [last] if said is None else [{**first, **said}, last]
        ranks[rank] = replace(case.record.ranks[rank], events={AT: events})
        started[rank] = events
    record = replace(case.record, ranks={**case.record.ranks, **ranks},
                     started={**case.record.started, **started})  # fmt: skip
    return replace(case, record=record)


@pytest.mark.parametrize(
    ("first", "kind", "words"),
    [
        (None, "skipped_collective", "puts what a reduction before it gave: that one is missing"),
        ({"group": [1], "pg": "7", "site": "mine.py:5"}, "wrong_group",
         "puts what a reduction before it gave: its own is over one rank"),
        ({"group": [1], "pg": "7", "grads": [["b", 1.0]]}, "skipped_collective", "is missing"),
        ({"group": [1], "pg": "7", "n": 2}, "skipped_collective", "is missing"),
    ],
)  # fmt: skip
def test_a_rank_that_reduces_only_its_own_before(first, kind, words):
    whole = {"group": [0, 3], "pg": "6", "whole": True}
    cause = cause_in_ledger(after_a_sum(whole, first))
    assert (cause.kind, cause.ranks) == (kind, (1,))
    assert words in cause.cause
    assert ("its group is one rank at mine.py:5" in cause.because) == (kind == "wrong_group")


@pytest.mark.parametrize(("factor", "said"), [(1.0, ""), (1 + 1e-9, ""), (0.5, ", times 1/2"),
                                              (0.298137, ", times 0.298137")])  # fmt: skip
def test_with_which_factor_others_put_their_own_in(factor, said):
    assert ledger._times({factor}) == said
