"""Where the ledger of a failed step parts from that of a run that passed, from ledgers by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from records_in_memory import SHAPES, compared, program_record, with_rank
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.of_ledgers.clean_run import (
    changed_values,
    first_difference,
    which_step_it_is,
    zeros_put_in,
)

AT = ("structure", 0)
SUM = {"op": "allreduce", "reduce": "SUM", "line": 9}
GATHER = {"op": "allgather", "reduce": None, "line": 4}


def ledgers(*operations, changed=(), at=AT):
    """Three ranks that issue these; changed: (rank, place, what is otherwise), None: not issued."""
    record = program_record()
    ranks = {}
    for rank, held in record.ranks.items():
        events = []
        for i, operation in enumerate(operations):
            own = {"input": f"in{rank}.{i}", "output": f"out{i}", "nonzero": True}
            event = {**held.events[AT][0], **own, **operation, "n": i}
            event["site"] = f"mine.py:{event.pop('line')}"
            others = [c for r, place, c in changed if (r, place) == (rank, i)]
            if None not in others:
                events.append({**event, **(others[0] if others else {})})
        ranks[rank] = replace(held, events={at: events})
    return replace(record, ranks=ranks)


def parted(*changed, operations=(GATHER, SUM)):
    found = first_difference(ledgers(*operations, changed=changed), ledgers(*operations), *AT)
    return found and (found.diagnosis.kind, found.diagnosis.ranks, found.structural), found


def test_the_same_ledgers_do_not_part():
    assert parted() == (None, None)


@pytest.mark.parametrize(
    ("changed", "kind", "ranks", "structural"),
    [
        ([(1, 1, None)], "skipped_collective", (1,), True),
        ([(2, 1, {"dtype": "bfloat16"})], "low_precision", (2,), True),
        ([(r, 1, {"reduce": "AVG"}) for r in range(3)], "avg", (0, 1, 2), True),
        ([(0, 1, {"group": [0, 1]})], "wrong_group", (0,), True),
        ([(1, 1, {"input": "x", "nonzero": False})], "lost_contribution", (1,), True),
        ([(1, 1, {"input": "x"})], "changed_input", (1,), True),
        ([(r, 1, {"input": f"x{r}"}) for r in range(3)], "unused_result", (0, 1, 2), False),
        ([(r, 1, {"input": f"x{r}"}) for r in range(2)], "unused_result", (0, 1), False),
        ([(r, 0, {"input": f"x{r}"}) for r in range(3)], "unused_result", (0, 1, 2), False),
        ([(2, 1, {"output": "x"})], "wrong_result", (2,), False),
    ],
)
def test_what_is_otherwise_says_what_kind_it_is(changed, kind, ranks, structural):
    assert parted(*changed)[0] == (kind, ranks, structural)


def test_an_operation_more_is_told_with_its_place():
    twice = first_difference(ledgers(GATHER, SUM, SUM | {"line": 11}), ledgers(GATHER, SUM), *AT)
    assert twice.diagnosis.kind == "double_reduction"
    assert "issued once more" in twice.diagnosis.cause
    assert "mine.py:11" in twice.diagnosis.cause


def test_an_operation_more_is_not_the_other_one_that_stands_where_it_was_missed():
    barrier = {"op": "barrier", "reduce": None, "line": 2}
    less = first_difference(ledgers(SUM, GATHER), ledgers(barrier, SUM, GATHER), *AT)
    assert "at mine.py:2" in less.diagnosis.cause
    other = [(r, 0, {"input": "x"}) for r in range(3)]
    more = first_difference(ledgers(GATHER, SUM, SUM, changed=other), ledgers(GATHER, SUM), *AT)
    assert more.diagnosis.cause.startswith("one allreduce@dp is issued once more: allreduce(SUM)")


def test_other_values_of_one_rank_may_be_a_result_before_them_that_it_did_not_use():
    told = parted((1, 1, {"input": "x"}))[1].diagnosis.because[-1]
    assert told.startswith("or the result of allgather of ")
    assert told.endswith("at mine.py:4, which is right, is not used there, or read too early")


def test_before_it_there_is_a_result_only_of_what_gives_one():
    barrier = {"op": "barrier", "reduce": None, "line": 2, "output": None}
    found = parted((1, 1, {"input": "x"}), operations=(barrier, SUM))[1]
    assert len(found.diagnosis.because) == 1


def test_a_rank_alone_in_its_group_is_no_member_unlike_the_others():
    alone = [(r, 1, {"input": f"x{r}", "group": [r]}) for r in range(3)]
    now, then = (ledgers(GATHER, SUM, changed=c) for c in
                 (alone, [(r, 1, {"group": [r]}) for r in range(3)]))  # fmt: skip
    assert first_difference(now, then, *AT).diagnosis.kind == "unused_result"


@pytest.mark.parametrize(("nonzero", "told"), [(False, 1), (True, 0)])
def test_zeros_that_go_in_are_told_before_the_rows_that_count_nowhere(nonzero, told):
    now = compared(ledgers(SUM, changed=[(1, 0, {"input": "x", "nonzero": nonzero})]))
    case = Case(record=now.record, tier="structure", step=0, diffs=now.diffs, clean=ledgers(SUM))
    found = [e.diagnosis.kind for e in zeros_put_in(case, frozenset())]
    assert found == ["lost_contribution"] * told


def test_of_zeros_and_of_the_first_operation_no_result_before_is_told():
    for changed in ((1, 1, {"input": "x", "nonzero": False}), (1, 0, {"input": "x"})):
        (told,) = parted(changed)[1].diagnosis.because
        assert told == "everything before it on rank 1 is as in a run that passed"


def test_a_sent_message_is_always_its_own_and_accuses_no_rank():
    send = {"op": "send", "reduce": None, "line": 5, "peer": 0}
    assert parted((1, 1, {"input": "x"}), operations=(GATHER, send))[0][0] == "unused_result"


def test_in_a_later_step_something_is_carried_over():
    later = ("structure", 1)
    changed = [(1, 0, {"input": "x"})]
    found = first_difference(
        ledgers(SUM, changed=changed, at=later), ledgers(SUM, at=later), *later
    )
    assert found.diagnosis.kind == "stale_buffer"


def test_the_operation_itself_is_told_before_what_flows_through_another():
    flows, itself = (0, 0, {"output": "x"}), (2, 1, {"reduce": "AVG"})
    assert parted(flows, itself)[0] == ("avg", (2,), True)
    assert parted(flows, (2, 1, None))[0] == ("skipped_collective", (2,), True)


def not_used(*lost, kind="skipped_collective", wrong=(0, 1, 2), counted=0, changed=()):
    """A case whose gradients of `wrong` ranks are doubled; lost: what its reduction no longer
    makes; counted: operations of other tiers before those of the clean run."""
    clean, now = ledgers(SUM), ledgers(SUM, changed=changed)
    for rank, held in clean.ranks.items():
        events = [{**e, "n": e["n"] + counted} for e in held.events[AT]]
        clean = with_rank(clean, rank, events={AT: events})
    for rank in wrong:
        held = now.ranks[rank]
        grads = {AT: {n: 2.0 * g for n, g in held.grads[AT].items()}}
        (fed,) = held.info[AT]["feeds"]
        left = [[n, c] for n, c in fed["grads"] if n not in lost]
        info = {AT: {**held.info[AT], "feeds": [{**fed, "grads": left}]}}
        now = with_rank(now, rank, grads={**held.grads, **grads}, info={**held.info, **info})
    started = {r: held.events[AT] for r, held in now.ranks.items()}
    held = compared(replace(now, started=started))
    case = Case(record=held.record, tier="structure", step=0, diffs=held.diffs, clean=clean)
    case.known["fitted"] = (Diagnosis(cause=kind, kind=kind), [])
    return case


def told(explainer, case):
    return [(e.diagnosis.kind, e.diagnosis.ranks) for e in explainer(case, frozenset())]


@pytest.mark.parametrize("kind", ["skipped_collective", "late_gradient"])
def test_numbers_that_call_a_reduction_missing_give_way_to_the_operation_that_differs(kind):
    flows = [(r, 0, {"input": f"x{r}"}) for r in range(3)]
    case = not_used(kind=kind, changed=[(1, 0, {"reduce": "AVG"})])
    assert told(which_step_it_is, case) == [("avg", (1,))]
    assert told(which_step_it_is, not_used(kind=kind, changed=flows)) == [
        ("unused_result", (0, 1, 2))
    ]
    wrong_result = not_used(kind=kind, changed=[(1, 0, {"output": "x"})])
    assert told(which_step_it_is, wrong_result) == []


def test_other_numbers_do_not_nor_do_those_without_a_clean_run():
    changed = [(1, 0, {"reduce": "AVG"})]
    assert told(which_step_it_is, not_used(kind="double_reduction", changed=changed)) == []
    assert told(which_step_it_is, replace(not_used(changed=changed), clean=None)) == []
    assert told(changed_values, replace(not_used(*SHAPES), clean=None)) == []


@pytest.mark.parametrize("explainer", [which_step_it_is, changed_values])
@pytest.mark.parametrize("counted", [0, 7])
def test_a_reduction_as_in_the_clean_run_that_makes_nothing_any_more(explainer, counted):
    found = list(explainer(not_used(*SHAPES, counted=counted), frozenset()))
    assert [(e.diagnosis.kind, e.diagnosis.ranks) for e in found] == [("unused_result", (0, 1, 2))]
    assert found[0].diagnosis.cause.startswith(
        "what the all-reduce over dp (ranks 0-2) at mine.py:9 gives is right, and the step does "
        "not end with it in "
    )


def test_only_ranks_that_are_wrong_are_named():
    assert told(changed_values, not_used(*SHAPES, wrong=(0, 2))) == [("unused_result", (0, 2))]


def test_what_its_reduction_still_makes_went_wrong_elsewhere():
    assert told(changed_values, not_used()) == []
    assert told(changed_values, not_used(*list(SHAPES)[1:])) == []
