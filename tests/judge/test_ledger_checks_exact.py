"""What ledgers made by hand show by themselves: disagreement, and what breaks the law."""

from __future__ import annotations

from dataclasses import replace

import pytest
from records_in_memory import compared, program_record, texts, topology_of
from sumgrad.judge.cells import steps_of
from sumgrad.judge.checks.ledgers import ranks_agree, sums_only
from sumgrad.judge.joint import (
    Joint,
    carried,
    carries,
    counts_again,
    entering,
    fed,
    identical,
    joint_operations,
    prescaled,
    sizes_of,
    unrecorded,
)

GROUP = (0, 1, 2)


def event(
    n, op="allreduce", *, label="structure/0/step", group=GROUP, numel=3, reduce="SUM", **more
):
    return {"n": n, "label": label, "op": op, "group": list(group), "dtype": "float32",
            "numel": numel, "reduce": reduce, "site": "train.py:31", "pg": "0", **more}  # fmt: skip


def record_of(*ledgers, tiers=None, steps=1, feeds=None):
    """Rank i wrote ledgers[i]. feeds: rank -> [{"call": .., "grads": [(name, factor)]}]."""
    one = program_record(tiers=tiers or {"structure": "float64"}, steps=steps)
    ranks = {}
    for r, events in enumerate(ledgers):
        info = {k: {**v, "feeds": (feeds or {}).get(r, [])} for k, v in one.ranks[r].info.items()}
        by_step = {}
        for e in events:
            tier, step, _ = e["label"].split("/")
            by_step.setdefault((tier, int(step)), []).append(e)
        ranks[r] = replace(one.ranks[r], events=by_step, info=info)
    return replace(one, ranks=ranks, started=dict(enumerate(map(list, ledgers))))


def joint(*, grads=(1.0, 1.0, 1.0), inputs="abc", **change) -> Joint:
    events = {
        r: event(0, grads=[["w", g]], input=i, nonzero=True, **change)
        for r, (g, i) in enumerate(zip(grads, inputs, strict=True))
    }
    return Joint(ranks=GROUP, number=0, events=events)


def test_collectives_are_joined_by_group_and_order_and_messages_are_not():
    pair = (0, 1)
    ledgers = (
        [event(0), event(1, group=pair), event(2, op="send", group=GROUP), event(3, numel=5)],
        [event(0), event(1, numel=5), event(2, group=pair)],
        [event(0), event(1, numel=5), event(2, label="structure/1/step"), event(3, pg="1")],
    )
    found = joint_operations(record_of(*ledgers), "structure", 0)
    assert [(j.ranks, j.number, sorted(j.events)) for j in found] == [
        (GROUP, 0, [0, 1, 2]), (GROUP, 1, [0, 1, 2]), (pair, 0, [0, 1]), (GROUP, 0, [2])
    ]  # fmt: skip
    assert found[1].first["numel"] == 5
    assert (found[0].family, found[0].site) == ("allreduce", "train.py:31")
    assert joint_operations(record_of(*ledgers), "structure", 1)[0].events.keys() == {2}


def test_steps_are_run_tier_by_tier():
    record = program_record(steps=2)
    assert list(steps_of(record)) == [
        ("structure", 0), ("structure", 1), ("precision", 0), ("precision", 1)
    ]  # fmt: skip


def test_members_that_issue_different_operations_disagree():
    same = [event(0), event(1, numel=7)]
    assert texts(ranks_agree, record_of(same, same, same)) == []
    (text,) = texts(ranks_agree, record_of(same, [event(0), event(1, numel=8)], same))
    assert text.startswith("ranks disagree: operation 2 over ranks 0-2 is on rank 0, 2 ")
    assert "but on rank 1 " in text
    (text,) = texts(ranks_agree, record_of(same, same[:1], same))
    assert text.startswith("ranks disagree: rank 1 never issues operation 2 over ranks 0-2, which "
                           "rank 0, 2 issues: ")  # fmt: skip


@pytest.mark.parametrize("status", ["raised", "killed", "missing", "timed_out", "ok"])
def test_a_rank_that_ended_early_issues_less_for_that_reason(status):
    same = [event(0), event(1)]
    record = record_of(same, same[:1], same)
    outcomes = tuple(replace(o, status=status) if o.rank == 1 else o for o in record.outcomes)
    found = texts(ranks_agree, replace(record, outcomes=outcomes))
    assert bool(found) == (status in ("timed_out", "ok"))
    other = record_of(same, [event(0), event(1, numel=9)], same)
    assert texts(ranks_agree, replace(other, outcomes=outcomes))  # which nothing excuses


@pytest.mark.parametrize(("waits", "level", "words"), [
    (None, "unknown", "rank 1 had not come to operation 2 over ranks 0-2 when the run was ended, "
     "and rank 0, 2 waits in it: "),
    ("recv of 4 float64", "fail", "ranks disagree: rank 1 never issues operation 2"),
])  # fmt: skip
def test_a_rank_that_computes_at_the_deadline_may_only_be_slow(waits, level, words):
    same = [event(0), event(1)]
    record = record_of(same, same[:1], same)
    late = [replace(o, status="timed_out", waiting_in=waits) if o.rank == 1 else o
            for o in record.outcomes]  # fmt: skip
    (found,) = ranks_agree(compared(replace(record, outcomes=tuple(late))))
    assert found.level == level
    assert found.text.startswith(words)


def test_a_mismatch_is_said_before_an_absence_and_the_earlier_one_first():
    a, b = (0, 1), (1, 2)
    ledgers = (
        [event(0, group=a)],
        [event(0, group=b), event(1, group=b, numel=4), event(2, group=GROUP)],
        [event(0, group=b), event(1, group=b, numel=5), event(2, group=GROUP)],
    )
    (text,) = texts(ranks_agree, record_of(*ledgers))
    assert "operation 2 over ranks 1-2 is on rank 1" in text


# ---- the law -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grads", "found"),
    [
        ((1 / 3,) * 3, (1 / 3, "dp")),
        ((1 / 3 + 0.9e-7,) * 3, (1 / 3 + 0.9e-7, "dp")),
        ((1 / 3 + 4e-7,) * 3, None),  # three times it is off by 1.2e-6
        ((1 / 3, 1 / 3, 1 / 3 + 2e-6), None),  # not one factor
        ((1 / 3, 1 / 3, 1 / 3 - 0.2e-6), (1 / 3, "dp")),
        ((1.0,) * 3, None),
        ((1 / 2,) * 3, None),  # no size of the topology
    ],
)
def test_one_factor_of_a_size_on_every_rank_is_an_average(grads, found):
    sizes = {"one": 1, "dp": 3, "world": 3}
    assert prescaled(joint(grads=grads), sizes) == (pytest.approx(found) if found else None)


def test_a_factor_is_of_a_size_above_one_and_the_first_name_counts():
    assert prescaled(joint(grads=(0.999999,) * 3), {"dp": 1}) is None
    assert prescaled(joint(grads=(1 / 6,) * 3), {"dp": 3, "dp*tp": 6, "world": 6}) == (
        pytest.approx(1 / 6), "dp*tp"
    )  # fmt: skip
    assert prescaled(Joint(ranks=GROUP, number=0, events={0: event(0)}), {"dp": 3}) is None


def test_names_of_sizes():
    record = program_record()
    mesh = topology_of(train={"axes": {"dp": 2, "tp": 3}})
    assert sizes_of(replace(record, spec=replace(record.spec, topology=mesh))) == {
        "dp": 2, "tp": 3, "dp*tp": 6, "world": 6
    }  # fmt: skip
    two = topology_of(a={"axes": {"dp": 2, "tp": 2}}, b={"axes": {"dp": 5}})
    assert sizes_of(replace(record, spec=replace(record.spec, topology=two))) == {
        "a.dp": 2, "a.tp": 2, "a.dp*a.tp": 4, "b.dp": 5, "world": 9
    }  # fmt: skip


def test_inputs_that_are_the_same_everywhere():
    assert identical(joint(inputs="aaa"))
    assert not identical(joint(inputs="aab"))
    assert not identical(joint(inputs=[None] * 3))
    zero = joint(inputs="aaa")
    events = {r: {**e, "nonzero": False} for r, e in zero.events.items()}
    assert not identical(replace(zero, events=events))
    assert not identical(replace(zero, events={0: zero.events[0], 1: zero.events[1]}))
    assert not identical(Joint(ranks=(0,), number=0, events={0: zero.events[0]}))


def test_what_an_operation_carries():
    events = {0: event(0, grads=[["w", 1.0]]), 1: event(4, grads=None), 2: event(2)}
    one = Joint(ranks=GROUP, number=0, events=events)
    assert one.gradients() == {"w": {0: 1.0}}
    assert carries(one, {}) == []
    assert carries(one, {(2, 2): ("w",)}) == ["w"]
    assert carries(one, {(1, 4): ("b", "w"), (2, 2): ("w",), (2, 3): ("x",)}) == ["b", "w"]


def in_a_row(**change):
    """A rank's reduce-scatter of w's gradient, and an all-reduce of what it gives; changed."""
    scatter = event(0, call=0, op="_reduce_scatter_base", input="a", output="b", nonzero=True)
    again = event(1, call=1, input="b", output="c", nonzero=True) | change
    return [scatter, again, event(2, call=2, input="d", output="e", nonzero=True)]


@pytest.mark.parametrize(
    ("change", "goes_in"),
    [({}, {(0, 1): ("w",)}), ({"input": "B"}, {}), ({"nonzero": False}, {}), ({"numel": 1}, {})],
)
def test_what_one_reduction_gives_and_another_takes_is_the_same_gradient(change, goes_in):
    record = record_of(*[in_a_row(**change)] * 3, feeds={0: [{"call": 0, "grads": [["w", 1.0]]}]})
    found = entering(record, "structure", 0)
    assert {key: names for key, names in found.items() if names} == goes_in
    both = carried(record, "structure", 0)
    assert {key: names for key, names in both.items() if names} == {(0, 0): ("w",)} | goes_in


def test_what_leads_to_a_gradient_carries_it():
    record = record_of(*[in_a_row()] * 3, feeds={1: [{"call": 1, "grads": [["w", 1.0]]}]})
    assert not any(entering(record, "structure", 0).values())
    found = carried(record, "structure", 0)
    assert {k: names for k, names in found.items() if names} == {(1, 0): ("w",), (1, 1): ("w",)}
    two = [in_a_row()[:2]] * 3
    found = carried(
        record_of(*two, feeds={2: [{"call": 1, "grads": [["w", 1.0]]}]}), "structure", 0
    )
    assert {k: names for k, names in found.items() if names} == {(2, 0): ("w",), (2, 1): ("w",)}
    own = [[e | {"grads": [["w", 1.0]]} if e["n"] == 0 else e for e in in_a_row()]] * 3
    found = entering(record_of(*own), "structure", 0)
    assert [found[2, n] for n in range(3)] == [("w",), ("w",), ()]


def test_feeds_are_found_by_the_call_that_gave_them():
    ledgers = [[event(5, call=11), event(6, call=12)]] * 3
    feeds = {1: [{"call": 12, "grads": [["w", 0.5], ["b", 1.0]]}, {"call": 99, "grads": []}]}
    record = record_of(*ledgers, feeds=feeds)
    assert fed(record, "structure", 0) == {(1, 6): {"w": 0.5, "b": 1.0}}
    assert fed(record, "structure", 1) == {}


def ledgers(**change):
    """Three ranks, one all-reduce of w's gradient; change: of the event, or by rank."""
    return [
        [event(0, call=0, grads=[["w", 1.0]], input="abc"[r], nonzero=True)
         | {k: (v[r] if isinstance(v, list) and len(v) == 3 else v) for k, v in change.items()}]
        for r in range(3)
    ]  # fmt: skip


WHERE = "the all-reduce over dp (ranks 0-2) at train.py:31"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, []),
        ({"reduce": "AVG"}, [f"law: {WHERE} is an AVG, not a SUM, of the gradients of w"]),
        ({"reduce": "AVG", "grads": None}, []),  # it carries no gradient
        ({"reduce": None, "op": "broadcast"}, []),
        ({"grads": [[["w", 1 / 3]]] * 3}, [
            f"law: the gradients of w are multiplied by 0.333333 = 1/dp before {WHERE}: an average"
        ]),
        ({"input": "a"}, [
            f"law: {WHERE} sums inputs that are the same bits on all 3 ranks: what is already "
            "whole is counted 3 times, unless it is divided again"
        ]),
    ],
)  # fmt: skip
def test_findings_of_the_law(change, words):
    assert texts(sums_only, record_of(*ledgers(**change))) == words


def test_a_group_of_one_breaks_no_law_and_every_step_of_every_tier_is_read():
    alone = [[{**ledgers(reduce="AVG")[0][0], "group": [0]}], [], []]
    assert texts(sums_only, record_of(*alone)) == []
    tiers = {"structure": "float64", "precision": "float32"}
    for label in ("structure/1/step", "precision/0/step", "precision/1/step"):
        record = record_of(*ledgers(reduce="AVG", label=label), tiers=tiers, steps=2)
        assert len(texts(sums_only, record)) == 1
    twice = [[*a, {**a[0], "n": 1, "label": "precision/0/step"}] for a in ledgers(reduce="AVG")]
    assert len(texts(sums_only, record_of(*twice, tiers=tiers))) == 1  # said once


def test_a_result_that_becomes_a_gradient_is_carried_too():
    feeds = {r: [{"call": 0, "grads": [["b", 1.0]]}] for r in range(3)}
    (text,) = texts(sums_only, record_of(*ledgers(reduce="AVG", grads=None), feeds=feeds))
    assert text.endswith("of the gradients of b")


def test_calls_that_are_not_recorded_are_named_with_rank_and_place():
    strange = event(0, op="new_window")
    found = list(unrecorded(record_of([event(0)], [strange, event(1)], [strange])))
    assert len(found) == 1
    assert found[0].startswith("rank 1-2 calls new_window at train.py:31")
    assert list(unrecorded(record_of([event(0)], [event(0)], [event(0)]))) == []


def test_equal_bits_count_again_only_where_each_put_in_the_whole():
    assert counts_again(joint(inputs="aaa"))
    assert not counts_again(joint())
    third = 1 / 3
    assert not counts_again(joint(inputs="aaa", grads=(third, third, third)))
    assert counts_again(joint(inputs="aaa", grads=(0.5, 0.5, 0.5)))
    assert counts_again(joint(inputs="aaa", grads=(third, third, 1.0)))
    assert not counts_again(joint(inputs="aaa", numel=1))
