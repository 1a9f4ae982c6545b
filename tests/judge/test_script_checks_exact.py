"""What is judged of a script besides its gradients, on records made by hand."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from records_in_memory import FLOOR, SHAPES, compared, program_record, texts
from sumgrad.base.outcome import IN_WORKERS
from sumgrad.diagnose.doubts import _is_right_after, _layers, _unsure
from sumgrad.diagnose.of_script import other_than_the_single_run
from sumgrad.diagnose.verdict import judge
from sumgrad.judge.cells import cells
from sumgrad.judge.checks.beside import (
    gradients_read_elsewhere,
    nothing_to_see_of,
    nothing_trained_elsewhere,
)
from sumgrad.judge.checks.modes import modules_in_one_mode
from sumgrad.judge.checks.script import (
    as_many_steps,
    changed_between,
    left_behind,
    one_job,
    other_order,
    other_rows,
    something_is_exchanged,
    the_optimizers_together,
    the_same_rows,
    unowned,
)
from sumgrad.judge.checks.script_starts import the_same_start, unlike_shards, unlike_starts
from sumgrad.judge.checks.updates import the_same_weights_after, untold_updates, wrong_updates
from sumgrad.record.ranks import AFTER
from sumgrad.record.spec import Script

AT = ("structure", 0)


def row(name, *, cut="", size=None):
    digests = [f"once {name}", f"whole {name}", f"cut {cut or name}"]
    return digests if size is None else [*digests, size]


def record_of(single, *read, steps=1, **told):
    """Rank i read `read[i]` of the first step. told: what every rank says of it besides."""
    one = program_record(tiers={"structure": "float64"}, steps=steps, ranks=len(read) or 3)
    script = Script(command="c", rows=({"Net": single},) * steps, losses=((1.0,),) * steps)
    ranks = {}
    for rank, held in one.ranks.items():
        info = {k: {**v, **told} for k, v in held.info.items()}
        if read:
            info[AT] |= {"rows": {"Net": read[rank]}}
        ranks[rank] = replace(held, info=info)
    return replace(one, spec=replace(one.spec, script=script), ranks=ranks)


FOUR = [row(i) for i in range(4)]


@pytest.mark.parametrize("read", [
    (FOUR[:2], FOUR[2:]),  # divided
    (FOUR[::2], FOUR[1::2]),
    (FOUR, FOUR),  # replicated, as for tensor parallelism
    (FOUR, []),  # the first stage of a pipeline alone
    ([row("x"), row("y")], [row("z")]),  # a sequence that is cut: nothing can be told
])  # fmt: skip
def test_rows_that_are_the_single_runs(read):
    assert texts(the_same_rows, record_of(FOUR, *read)) == []


@pytest.mark.parametrize(("read", "missed", "uneven", "foreign", "cause"), [
    ((FOUR[:2], FOUR[:2]), (2, 3), (), {}, "rank 0-1 all read rows 0-1"),
    ((FOUR[:2], FOUR[1:3]), (3,), (1,), {}, "some are lost or read twice"),
    ((FOUR[:2], [FOUR[2], FOUR[2]]), (3,), (2,), {}, "some are lost or read twice"),
    ((FOUR[:2], [FOUR[2], row("x")]), (3,), (), {1: 1}, "rank 1 reads rows that the single run"),
    ((FOUR, [row(f"x{i}") for i in range(4)]), (), (), {1: 4}, "{N/ranks}"),
    (([FOUR[0], row("x")], [row("y"), row("z")]), (1, 2, 3), (), {0: 1, 1: 2}, "another order"),
    ((FOUR, FOUR[:3]), (), (0, 1, 2), {}, "some are lost or read twice"),
])  # fmt: skip
def test_rows_that_are_not(read, missed, uneven, foreign, cause):
    record = record_of(FOUR, *read)
    (other,) = other_rows(record, "structure")
    assert (other.missed, other.uneven, other.foreign) == (missed, uneven, foreign)
    (said,) = the_same_rows(compared(record))
    assert (said.level, said.text) == (
        "warning", f"{other.text}; every gradient that was compared is right all the same",
    )  # fmt: skip
    assert list(other_than_the_single_run(compared(record))) == []
    record.ranks[1].grads[AT]["w"] = record.ranks[1].grads[AT]["w"] + 1
    (said,) = the_same_rows(compared(record))
    assert (said.level, said.text) == ("fail", other.text)
    (found_here,) = other_than_the_single_run(compared(record))
    assert cause in found_here.cause
    assert found_here.standing == "likely"


@pytest.mark.parametrize(("read", "status"), [
    ((FOUR, [row(f"x{i}") for i in range(4)]), "unknown"),  # twice as many
    (([FOUR[0], row("x")], [row("y"), row("z")]), "unknown"),  # as many, in another order
    (([FOUR[0], row("x")], [row("x"), row("z")]), "unknown"),  # by chance
    (([row("x", size="8"), row("y", size="8")],) * 2, "fail"),  # and these are not
    (([FOUR[0], row("x")], [FOUR[0], row("z")]), "fail"),
    ((FOUR[:2], [row("x"), row("z")]), "unknown"),  # the second of two ranks draws its own
    ((FOUR[:2], [FOUR[2], row("x")]), "fail"),  # one of four
    (([row("v", size="8"), row("x", size="8")], [row("y", size="8"), row("z", size="8")]),
     "unknown"),
    (([row("v", size="4"), row("x", size="4")], [row("y", size="4"), row("z", size="4")]),
     "fail"),  # cut: the gradients decide
])  # fmt: skip
def test_another_batch_is_no_wrong_gradient(read, status):
    record = record_of([row(i, size="8") for i in range(4)], *read)
    record.ranks[1].grads[AT]["w"] = record.ranks[1].grads[AT]["w"] + 1
    verdict = judge(record)
    assert verdict.tiers[0].status == status
    if status == "unknown":
        assert "the runs do not train on the same rows" in verdict.tiers[0].reasons[0]


@pytest.mark.parametrize(("drawn", "status"), [
    (["a"], "fail"),  # the single run's
    (["a", "x"], "unknown"),
])  # fmt: skip
def test_other_draws_are_no_wrong_gradient(drawn, status):
    record = record_of(FOUR, FOUR[:2], FOUR[2:], draws={"train.py:9": ["a"]})
    record.ranks[1].info[AT]["draws"] = {"train.py:9": drawn, "train.py:4": ["of the script"]}
    draws = ({"train.py:9": ["a", "b"]},)
    record = replace(record, spec=replace(record.spec, script=replace(
        record.spec.script, draws=draws)))  # fmt: skip
    assert judge(record).tiers[0].status == "pass"
    off_on(record, *record.ranks)
    verdict = judge(record)
    assert verdict.tiers[0].status == status
    if status == "unknown":
        (reason,) = verdict.tiers[0].reasons
        assert "train.py:9 draws random numbers, at step 0 on rank 1 " in reason


def off_on(record, *ranks):
    for rank in ranks:
        held = record.ranks[rank].grads[AT]
        held["w"] = held["w"] + 1


def test_replicas_that_hold_unlike_gradients_part_whatever_they_drew():
    record = record_of(FOUR, FOUR[:2], FOUR[2:], draws={"train.py:9": ["x"]})
    script = replace(record.spec.script, draws=({"train.py:9": ["a"]},))
    record = replace(record, spec=replace(record.spec, script=script))
    off_on(record, 1)
    assert judge(record).tiers[0].status == "fail"
    off_on(record, 0)
    assert judge(record).tiers[0].status == "unknown"


@pytest.mark.parametrize(("drawn", "status"), [(["a"], "fail"), (["a", "x"], "unknown")])
def test_draws_of_other_processes_belong_to_every_step(drawn, status):
    """A DataLoader's workers draw for steps to come."""
    record = record_of(FOUR, FOUR[:2], FOUR[2:], steps=2)
    place = f"train.py:9{IN_WORKERS}"
    record.ranks[1].info[AT]["draws"] = {place: drawn}
    script = replace(record.spec.script, draws=({place: ["a", "b"]}, {}))
    record = replace(record, spec=replace(record.spec, script=script))
    for held in record.ranks.values():
        held.grads["structure", 1]["w"] = held.grads["structure", 1]["w"] + 1
    assert judge(record).tiers[0].status == status


def test_a_cause_that_is_proved_stays_a_failure_beside_other_draws():
    record = record_of(FOUR, FOUR[:2], FOUR[2:], draws={"train.py:9": ["x"]})
    script = replace(record.spec.script, draws=({"train.py:9": ["a"]},))
    record = replace(record, spec=replace(record.spec, script=script))
    off_on(record, *record.ranks)
    assert judge(record).tiers[0].status == "unknown"
    for rank, held in record.ranks.items():
        held.info[AT]["started_with"] = {"w": f"0:{rank}"}
    assert judge(record).tiers[0].status == "fail"


def test_gradients_that_hold_the_one_before_unlike_often_have_another_cause():
    record = record_of(FOUR, steps=2)
    for rank, held in record.ranks.items():
        now = held.grads["structure", 1]
        now["w"] = now["w"] + (1 + rank) * held.grads[AT]["w"]
    assert list(other_than_the_single_run(compared(record))) == []


@pytest.mark.parametrize(("times", "rest", "said"), [
    (1, 0.0, "step 1 still holds the gradient of step 0: nothing"),
    (3, 0.0, "step 1 still holds the gradient of step 0, 3 times: nothing"),
    (1, 1e-3, None),
    (0, 1e-3, None),
])  # fmt: skip
def test_a_gradient_that_nothing_made_zero(times, rest, said):
    record = record_of(FOUR, steps=2)
    for held in record.ranks.values():
        before, now = held.grads[AT], held.grads["structure", 1]
        now["w"] = now["w"] + times * before["w"] + rest * before["w"] ** 2
    causes = list(other_than_the_single_run(compared(record)))
    assert [c.cause.removeprefix("w at ")[: len(said or "")] for c in causes] == [said] * bool(said)


def test_a_row_is_found_whatever_it_was_padded_to():
    single = [["a1", "a", "-"], ["b1", "b+pad", "b"]]
    padded = [["a1", "a+pad", "a"]]
    whole = [["b", "b", "-"]]
    assert texts(the_same_rows, record_of(single, padded, whole)) == []


def test_equal_rows_are_counted_as_often_as_they_are_there():
    twice = [row("a"), row("a"), row("b")]
    assert texts(the_same_rows, record_of(twice, twice[:1], twice[1:])) == []
    (text,) = texts(the_same_rows, record_of(twice, twice[:1], twice[2:]))
    assert "row 2 more often" in text


def test_replicas_that_start_unlike_each_other():
    same = {"started_with": {"w": ":1", "b": ":2"}}
    assert texts(the_same_start, record_of(FOUR, **same)) == []
    record = record_of(FOUR, **same)
    record.ranks[2].info[AT]["started_with"] = {"w": ":1", "b": ":3"}
    start = unlike_starts(record)
    assert (start.rank, start.text) == (2, "rank 2 starts from other weights than rank 0, in b")
    assert [f.level for f in the_same_start(compared(record))] == ["fail"]
    record.ranks[2].info[AT]["started_with"] = {"w": ":1", "b": "other part:3"}
    assert unlike_starts(record) is None


SHARDS = {0: "0-1", 1: "2-3", 2: "4-5"}


def cut_between(*others, drawn=True, names=("w", "b")):
    """Every rank has a shard of its own; others: ranks whose are not the single run's."""
    record = record_of(FOUR)
    for rank, held in record.ranks.items():
        held.info[AT] |= {
            "started_with": {n: f"{SHARDS[rank]}:{rank}" for n in names},
            "other_start": list(names) if rank in others else [],
            "drawn_otherwise": drawn and rank in others,
        }
    return record


@pytest.mark.parametrize(("others", "drawn", "names", "is_said"), [
    ((1,), True, ("w", "b"), True),
    ((1, 2), True, ("w", "b"), True),
    ((1,), False, ("w", "b"), False),  # by roundings
    ((1,), True, ("w",), False),  # by chance
    ((0, 1, 2), True, ("w", "b"), False),  # all drew their own
    ((), True, ("w", "b"), False),
])  # fmt: skip
def test_shards_of_two_models(others, drawn, names, is_said):
    record = cut_between(*others, drawn=drawn, names=names)
    assert unlike_starts(record) is None
    findings = [*the_same_start(compared(record))]
    assert [f.level for f in findings] == (["fail"] if is_said else ["warning"] * bool(others))
    causes = [cause for cause in other_than_the_single_run(compared(record))]
    assert [cause.kind for cause in causes] == ["unlike_start"] * is_said
    if is_said:
        (cause,) = causes
        assert cause.cause == (
            "the shards do not start equal: the shards of rank 0 are the single run's, and those "
            "of rank 1 are others, in w, b"
        )
        assert findings[0].text.endswith("in w, b: together they are neither's")


def test_shards_that_are_handed_on_after_a_dry_run_say_nothing():
    record = cut_between(1)
    for events in ([OWN], [{**OWN, "op": "scatter"}]):
        record.ranks[1] = replace(record.ranks[1], events={AT: events})
        assert unlike_shards(record) is None
    reduced = {"op": "allreduce", "numel": 3, "dtype": "float64", "grads": ["b"]}
    for events in ([reduced, OWN], [{**OWN, "dtype": "int64"}], []):
        record.ranks[1] = replace(record.ranks[1], events={AT: events})
        assert unlike_shards(record) is not None


def test_parameters_that_only_one_rank_has_say_nothing():
    record = cut_between(1)
    told = record.ranks[1].info[AT]
    told["started_with"] = {f"stage.{n}": v for n, v in told["started_with"].items()}
    told["other_start"] = [f"stage.{n}" for n in told["other_start"]]
    assert unlike_shards(record) is None


OWN = {"op": "broadcast", "dtype": "float64", "numel": 3}
BY_DDP = {**OWN, "by": "nn/parallel/distributed.py", "numel": 15}


@pytest.mark.parametrize(("events", "level"), [
    ([OWN], "warning"),
    ([{**OWN, "dtype": "int64"}], "fail"),
    ([{**OWN, "numel": 5}], "fail"),  # of something else
    ([BY_DDP], "warning"),
    ([{**BY_DDP, "by": "", "numel": 15}], "fail"),
    ([{"op": "allreduce", "numel": 3, "dtype": "float64", "grads": ["b"]}, OWN], "fail"),
    ([], "fail"),
])  # fmt: skip
def test_replicas_that_are_made_equal_after_a_dry_run(events, level):
    record = record_of(FOUR, started_with={"w": ":1", "b": ":2"})
    record.ranks[2].info[AT]["started_with"] = {"w": ":1", "b": ":3"}
    record.ranks[2] = replace(record.ranks[2], events={AT: events})
    assert record.references["structure"][0].grads["b"].numel() == 3
    (finding,) = the_same_start(compared(record))
    assert finding.level == level
    causes = [cause.kind for cause in other_than_the_single_run(compared(record))]
    assert ("unlike_start" in causes) == (level == "fail")


@pytest.mark.parametrize(("told", "status"), [
    ({}, "pass"),
    ({"unreduced": ["w"]}, "unknown"),
    ({"unreduced": ["b"]}, "pass"),
    ({"unreduced": ["w"], "zero": ("w*",)}, "pass"),
])  # fmt: skip
def test_what_no_step_gives_a_gradient_and_nothing_would_reduce(told, status):
    zero = told.pop("zero", ())
    record = record_of(FOUR, stepped=["w", "b"], **told)
    record = replace(record, spec=replace(record.spec, script=replace(
        record.spec.script, zero=zero)))  # fmt: skip
    (reference,) = record.references["structure"]
    nothing = torch.zeros_like(reference.grads["w"])
    record.references["structure"][0] = replace(
        reference, grads={**reference.grads, "w": nothing}, scale={**reference.scale, "w": 0.0},
        by_term={t: {**held, "w": nothing} for t, held in reference.by_term.items()},
        reached=tuple(n for n in reference.reached if n != "w"),
    )  # fmt: skip
    for held in record.ranks.values():
        held.grads[AT].pop("w")
    assert judge(record).tiers[0].status == status
    still = replace(record, ranks={
        r: replace(h, info={AT: {**h.info[AT], "still_frozen": ["w"]}})
        for r, h in record.ranks.items()
    })  # fmt: skip
    for one, words in ((record, "is zero on these rows"), (still, "is frozen in all steps")):
        warnings = texts(nothing_to_see_of, one)
        assert [words in text for text in warnings] == ([True] if status == "pass" else [])


def test_buffers_and_frozen_weights_that_were_made_equal_are_not_compared():
    record = record_of(FOUR, made_equal=["buffer:f", "w"], drawn_otherwise=True)
    (finding,) = the_same_start(compared(record))
    assert finding.level == "unknown"
    assert "other buffers and frozen weights than the single run, in f, w, and from" in finding.text
    (finding,) = the_same_start(compared(record_of(FOUR, made_equal=["w"], drawn_otherwise=True)))
    assert "other frozen weights than" in finding.text


@pytest.mark.parametrize(("left", "drawn", "status"), [
    (["buffer:f"], True, "unknown"), (["buffer:f"], False, "fail"), ([], True, "fail"),
])  # fmt: skip
def test_what_fails_is_not_known_where_weights_were_drawn_otherwise(left, drawn, status):
    record = record_of(FOUR, left_unlike=left, drawn_otherwise=drawn)
    off_on(record, 0)
    assert judge(record).tiers[0].status == status


def test_models_that_are_met_later_are_told_of_too():
    record = record_of(FOUR, steps=2, started_with={"w": ":1"})
    for rank, value in ((0, "2"), (1, "3")):
        record.ranks[rank].info["structure", 1]["started_with"] = {"v": f":{value}"}
    start = unlike_starts(record)
    assert (start.rank, start.names) == (1, ("v",))
    record = record_of(FOUR, steps=2)
    record.ranks[0].info["structure", 1] |= {"made_equal": ["v"], "drawn_otherwise": True}
    (finding,) = the_same_start(compared(record))
    assert finding.level == "unknown"


def test_buffers_that_were_left_unlike_are_said_and_are_a_cause_of_what_fails():
    record = record_of(FOUR, left_unlike=["buffer:f"])
    (finding,) = the_same_start(compared(record))
    assert finding.level == "warning"
    assert "other buffers than the single run, in f: they were left so" in finding.text
    assert list(other_than_the_single_run(compared(record))) == []  # nothing fails
    off_on(record, *record.ranks)
    (cause,) = other_than_the_single_run(compared(record))
    assert (cause.kind, cause.standing) == ("other_buffers", "likely")
    assert cause.cause == "every rank computes with another f than the single run"
    record.ranks[1].info[AT]["left_unlike"] = []  # by design, of some ranks
    assert list(other_than_the_single_run(compared(record))) == []


@pytest.mark.parametrize(
    ("event", "found"),
    [
        ({}, 0),
        ({"numel": 1}, 1),
        ({"op": "broadcast"}, 1),
        ({"op": "barrier", "numel": 0}, 1),
        ({"op": "send", "numel": 2}, 0),
    ],
)
def test_ranks_that_exchange_nothing_are_no_distributed_step(event, found):
    record = record_of(FOUR)
    for rank, held in record.ranks.items():
        events = {at: [{**e, **event} for e in own] for at, own in held.events.items()}
        record.ranks[rank] = replace(held, events=events)
    assert len(texts(something_is_exchanged, record)) == found
    alone = replace(record, ranks={
        r: replace(h, info={at: {**i, "alone": True} for at, i in h.info.items()})
        for r, h in record.ranks.items()
    })  # fmt: skip
    assert texts(something_is_exchanged, alone) == []  # one_job says it
    of_program = replace(record, spec=replace(record.spec, script=None))
    findings = list(something_is_exchanged(compared(of_program)))
    assert [finding.level for finding in findings] == ["warning"] * found
    off_on(of_program, *of_program.ranks)
    assert texts(something_is_exchanged, of_program) == []  # what fails has causes


def test_another_start_than_the_single_runs_is_only_said():
    record = record_of(FOUR, other_start=["w"])
    (finding,) = the_same_start(compared(record))
    assert finding.level == "warning"
    assert "1 parameters" in finding.text


def test_ranks_that_end_before_the_others():
    record = record_of(FOUR, steps=2)
    assert texts(as_many_steps, record) == []
    del record.ranks[1].info["structure", 1]
    (finding,) = as_many_steps(compared(record))
    assert finding.level == "unknown"
    assert finding.text.startswith("rank 1 ended after 1 of 2 optimizer steps")
    del record.ranks[1].info["structure", 0]
    (finding,) = as_many_steps(compared(record))
    assert finding.text.startswith("rank 1 takes none of the 2 optimizer steps of the single run:")
    missing = " ".join(judge(record).reasons)
    assert "its record is missing" not in missing


def test_rows_of_a_rank_that_took_no_step_are_not_known():
    record = record_of(FOUR, FOUR[:2], FOUR[2:])
    del record.ranks[1].info[AT]
    assert texts(the_same_rows, record) == []


def test_processes_that_are_no_job():
    assert texts(one_job, record_of(FOUR)) == []
    record = record_of(FOUR, alone=True)
    (finding,) = one_job(compared(record))
    assert finding.level == "unknown"
    record.ranks[1].info[AT]["alone"] = False
    assert texts(one_job, record) == []


def test_weights_that_a_script_changes_on_one_rank_only():
    record = record_of(FOUR, steps=2)
    assert changed_between(record) is None
    record.ranks[2].info["structure", 1]["other_weights"] = ["w", "b"]
    moved = changed_between(record)
    assert (moved.rank, moved.text) == (2, "w, b before step 1")


def test_what_no_ranks_optimizer_has():
    record = record_of(FOUR, steps=2)
    assert list(unowned(record)) == []  # an older record does not say what was stepped
    for reference in record.references["structure"]:
        reference.after.update(dict.fromkeys(("w", "b"), torch.zeros(1)))
    for rank, held in record.ranks.items():
        for info in held.info.values():
            info["stepped"] = ["w"] if rank == 0 else ["b"]
    assert list(unowned(record)) == []
    record.ranks[0].info["structure", 1]["stepped"] = []
    assert list(unowned(record)) == [(["w"], 1)]
    assert texts(the_optimizers_together, record) == [
        "no rank's optimizer has w at step 1; the single run's does"
    ]
    others = {rank: replace(held, params=("b",)) for rank, held in record.ranks.items()}
    assert list(unowned(replace(record, ranks=others))) == []  # held by no rank


def in_turns(*of_ranks, single=("w", "b")):
    """A record whose single run steps these one after the other, and its ranks those."""
    record = record_of(FOUR, steps=len(single))
    for name, reference in zip(single, record.references["structure"], strict=True):
        reference.after[name] = torch.zeros(1)
    for held in record.ranks.values():
        for (_, step), info in held.info.items():
            info["stepped"] = [of_ranks[step]]
        held.grads[AT]["w"] = held.grads[AT]["w"] + 1
    return record


def test_optimizers_that_step_in_another_order_are_not_compared():
    record = in_turns("b", "w")
    verdict = judge(record)
    assert verdict.status == "unknown"
    said = " ".join(verdict.tiers[0].reasons)
    assert "optimizers step in another order than in the single run: at step 0 the ranks'" in said
    assert "have b, which that run's have at step 1" in said
    assert list(unowned(record)) == []
    (text,) = texts(the_optimizers_together, record)
    assert text.startswith("optimizers step in another order")
    for same in (in_turns("w", "b"), in_turns("b", "b", single=("w", "w"))):
        assert not list(other_order(same))
        assert judge(same).status == "fail"


def test_what_its_owner_keeps_to_itself():
    record = record_of(FOUR, steps=2)
    assert list(left_behind(record)) == []
    record.ranks[2].info["structure", 1]["left_behind"] = ["w", "b"]
    (left,) = left_behind(record)
    assert left.rank == 2
    assert left.text.startswith("w, b on rank 2, which no optimizer of that rank has stepped")
    assert left.text.endswith("before step 1")
    (finding,) = the_optimizers_together(compared(record))
    assert finding.level == "fail"


def test_a_gradient_is_compared_where_an_optimizer_takes_it():
    record = record_of(FOUR)
    (reference,) = record.references["structure"]

    def ranks():
        return {cell.rank for cell in cells(record, "structure", reference) if cell.name == "w"}

    assert ranks() == {0, 1, 2}
    for rank, held in record.ranks.items():
        held.info[AT]["stepped"] = ["w", "b"] if rank == 1 else ["b"]
    assert ranks() == {1}
    record.ranks[1].info[AT]["stepped"] = []
    assert ranks() == {0, 1, 2}  # nobody's: all of them miss it


def updated(off, *, floor=FLOOR, gradient=None):
    """A record whose rank 1 leaves one weight `off` from the single run's 2."""
    record = record_of(FOUR)
    after = {n: torch.full(s, 2.0, dtype=torch.float64) for n, s in SHAPES.items()}
    (reference,) = record.references["structure"]
    grads = reference.grads if gradient is None else {**reference.grads, "b": gradient}
    reference = replace(
        reference, grads=grads, after=after, after_floor=dict.fromkeys(SHAPES, floor)
    )
    for rank, held in record.ranks.items():
        own = {n: t.clone() for n, t in after.items()}
        own["b"][1] += off if rank == 1 else 0
        held.grads[AFTER, 0] = own
        held.grads[AT] = {n: g.clone() for n, g in grads.items()}
    return replace(record, references={"structure": [reference]})


@pytest.mark.parametrize(("factor", "found"), [(3.9, 0), (4.1, 1), (-4.1, 1)])
def test_an_update_is_held_to_four_times_its_noise(factor, found):
    assert len(texts(the_same_weights_after, updated(factor * FLOOR))) == found


def test_an_update_is_never_held_to_less_than_its_roundings():
    rounding = 2 * torch.finfo(torch.float64).eps * 2.0
    assert texts(the_same_weights_after, updated(3.9 * rounding, floor=0.0)) == []
    assert len(texts(the_same_weights_after, updated(4.5 * rounding, floor=0.0))) == 1


def test_an_update_by_a_gradient_that_is_noise_is_not_compared():
    """Adam divides by its size: of noise it makes a whole step in either direction."""
    noise = torch.tensor([1.0, 900 * FLOOR, 1.0]).double()
    assert texts(the_same_weights_after, updated(1e-2, gradient=noise)) == []
    told = torch.tensor([1.0, 1100 * FLOOR, 1.0]).double()
    assert len(texts(the_same_weights_after, updated(1e-2, gradient=told))) == 1


def test_a_weight_without_any_gradient_is_compared():
    """Decay and momentum move it; where no rank and no single run has a gradient, that is told."""
    nothing = torch.tensor([1.0, 0.0, 1.0]).double()
    assert len(texts(the_same_weights_after, updated(1e-2, gradient=nothing))) == 1
    record = updated(1e-2, gradient=nothing)
    record.ranks[1].grads[AT]["b"] = torch.tensor([1.0, 1e-30, 1.0]).double()  # noise of a rank
    assert texts(the_same_weights_after, record) == []


@pytest.mark.parametrize(("noise", "found"), [(0.9, 0), (1.1, 1)])
def test_an_update_that_noise_hides_is_not_compared(noise, found):
    """A step of twice the size has to be seen; several optimizers take turns."""
    record = updated(0.0)
    (first,) = record.references["structure"]
    moved, limit = 1e-3, 1e-3 * 0.5 / 4
    after = {n: v + moved for n, v in first.after.items()}
    between = replace(first, step=1, after={}, after_floor={})
    last = replace(first, step=2, after=after,
                   after_floor=dict.fromkeys(SHAPES, noise * limit))  # fmt: skip
    three = replace(record, references={"structure": [first, between, last]})
    said = texts(the_same_weights_after, three)
    assert len(said) == found
    if found:
        assert "the optimizer's own step of w at step 2 was not compared" in said[0]


@pytest.mark.parametrize(("by", "told"), [((3.0, 3.0), 3.0), ((3.0, 2.0), None), ((0.5, 0.5), 0.5)])
def test_a_step_that_goes_so_many_times_as_far_is_a_rate(by, told):
    """Of all its weights and ranks alike; from what the step before left."""
    record = updated(0.0)
    (first,) = record.references["structure"]
    step = {
        n: torch.arange(1.0, v.numel() + 1).reshape(v.shape).double()
        for n, v in first.after.items()
    }
    second = replace(first, step=1, after={n: v + step[n] for n, v in first.after.items()})
    for rank, held in record.ranks.items():
        held.info["structure", 1] = held.info[AT]
        held.grads["structure", 1] = held.grads[AT]
        far = {n: by[rank == 1] * v for n, v in step.items()}
        held.grads[AFTER, 1] = {n: first.after[n] + far[n] for n in far}
    spec = replace(record.spec, steps=2)
    both = replace(record, spec=spec, references={"structure": [first, second]})
    (wrong,) = wrong_updates(both)
    assert wrong.ranks == tuple(record.ranks)
    assert wrong.times == (pytest.approx(told) if told else None)
    (cause,) = other_than_the_single_run(compared(both))
    said = [text for text in cause.because if "times as far" in text]
    assert len(said) == (told is not None)
    assert cause.ranks == wrong.ranks


@pytest.mark.parametrize(("size", "found"), [(1e-20, False), (1.0, True), (0.0, True)])
def test_no_update_is_told_by_a_gradient_that_is_noise(size, found):
    """A key's bias: zero by mathematics, and an optimizer that divides makes a step of it. One of
    no gradient at all has a step of what was before, which is told."""
    record = updated(0.0)
    (first,) = record.references["structure"]
    faint = {n: torch.full_like(g, size) for n, g in first.grads.items()}
    first = replace(first, grads=faint, after_floor=dict.fromkeys(SHAPES, 1e-3))
    after = {n: v + 1e-3 for n, v in first.after.items()}
    both = replace(record, references={"structure": [first, replace(first, step=1, after=after)]})
    assert bool([*untold_updates(both)]) == found


def test_updates_beside_a_reference_that_is_none_are_not_judged():
    record = updated(1e-2)
    assert len(texts(the_same_weights_after, record)) == 1
    (reference,) = record.references["structure"]
    none = replace(reference, problems=("not finite",))
    assert texts(the_same_weights_after, replace(record, references={"structure": [none]})) == []


def test_a_weight_of_no_known_gradient_ends_nothing():
    record = updated(0.0)
    record.references["structure"][0].after["frozen"] = torch.zeros(2)
    record.ranks[1].grads[AFTER, 0]["frozen"] = torch.ones(2)
    assert texts(the_same_weights_after, record) == []


def test_a_programs_run_is_asked_none_of_it():
    record = program_record()
    for check in (the_same_rows, the_same_start, as_many_steps, the_same_weights_after):
        assert texts(check, record) == []
    assert list(other_than_the_single_run(compared(record))) == []


@pytest.mark.parametrize(
    ("twins", "by_name", "wrong", "status"),
    [
        ((), ("w",), [("w", 0)], "fail"),
        ((("w", "b"),), ("w",), [("w", 0)], "unknown"),
        ((("w", "b"),), (), [("w", 0)], "fail"),  # its siblings tell it
        ((("b", "w"),), ("b",), [("w", 0)], "fail"),  # at equal weights
        ((("b", "w"),), ("b",), [("w", 1)], "unknown"),  # b may have moved by another's step
        ((("b", "w"),), ("b",), [("w", 1), ("w", 0)], "fail"),
    ],
)
def test_what_may_be_another_parameter_is_no_wrong_gradient(twins, by_name, wrong, status):
    """Stages that number their own layers, whose norms begin alike."""
    record = record_of(FOUR, steps=2)
    script = replace(record.spec.script, twins=twins)
    ranks = {r: replace(held, by_name=by_name) for r, held in record.ranks.items()}
    record = replace(record, spec=replace(record.spec, script=script), ranks=ranks)
    for name, step in wrong:
        held = record.ranks[1].grads["structure", step]
        held[name] = held[name] + 1
    verdict = judge(record)
    assert verdict.tiers[0].status == status
    if status == "unknown":
        assert "too, which began with the same values as" in str(verdict.data)


def test_what_only_names_tell_is_not_known_where_names_are_a_ranks_own():
    """Linears are layers 1 and 2 by their weights; the norms beside them, by their names alone."""
    record = record_of(FOUR)
    script = replace(record.spec.script, twins=(("w", "b"),))
    record = replace(record, spec=replace(record.spec, script=script))
    record.ranks[1].grads[AT]["w"] = record.ranks[1].grads[AT]["w"] + 1
    assert judge(record).tiers[0].status == "fail"
    ranks = {**record.ranks, 1: replace(record.ranks[1], by_name=("w",))}
    assert judge(replace(record, ranks=ranks)).tiers[0].status == "unknown"
    ranks = {**record.ranks, 2: replace(record.ranks[2], by_name=("w",))}
    assert judge(replace(record, ranks=ranks)).tiers[0].status == "fail"


def test_a_layer_in_which_all_began_alike_is_not_told_on_a_part_of_the_model():
    record = record_of(FOUR)
    names = [f"experts.{i}.{n}" for i in (0, 1) for n in ("w", "b")] + ["head.w"]
    facts = replace(record.spec.facts, params={n: (2, 3) for n in names})
    twins = (("experts.0.w", "experts.1.w"), ("experts.0.b", "experts.1.b"))
    record = replace(record, spec=replace(record.spec, facts=facts))

    def unsure(*held, twins=twins, more=()):
        ranks = {0: replace(record.ranks[0], params=held),
                 1: replace(record.ranks[1], params=(*names, *more))}  # fmt: skip
        script = replace(record.spec.script, twins=twins)
        params = {n: (2, 3) for n in (*names, *more)}
        spec = replace(record.spec, script=script, facts=replace(facts, params=params))
        return {n: o for (r, n), o in _unsure(replace(record, ranks=ranks, spec=spec)).items()
                if not r}  # fmt: skip

    assert unsure("experts.0.w", "head.w") == {"experts.0.w": ["experts.1.w"]}
    assert unsure(*names) == {}  # all of them are here
    assert unsure("experts.0.w", "head.w", twins=twins[:1]) == {}  # its bias tells which it is
    assert unsure("experts.0.w", more=("experts.0.mlp.2.w",)) == {}  # and so does what is in it
    assert [_layers(n) for n in ("w", "a.w", "a.3.w", "a.3.b.4.c.w")] == [
        [], [], ["a.3"], ["a.3", "a.3.b.4"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("before", "is_right"), [({}, True), ({"w": 0.0}, True), ({"w": 1.0}, False)]
)
def test_a_weight_that_another_optimizer_moves_later_has_no_step_before(before, is_right):
    """Of a gradient that turns, and a weight that is right after it: if the step moved it."""
    record = record_of(FOUR, steps=2)
    first, second = record.references["structure"]
    ones = torch.ones(SHAPES["w"], dtype=torch.float64)
    first = replace(first, after={n: value * ones for n, value in before.items()})
    second = replace(second, after={"w": ones}, after_floor={"w": 1e-12})
    held = record.ranks[1]
    held.grads[AFTER, 1] = {"w": ones}
    held.grads["structure", 1]["w"] = second.grads["w"].flip(0).flip(1)
    record = replace(record, references={"structure": [first, second]})
    found = SimpleNamespace(tier="structure", step=1, rank=1, name="w")
    assert _is_right_after(record, found) is is_right


def test_gradients_kept_elsewhere_are_said():
    record = updated(0.0)
    assert texts(nothing_trained_elsewhere, record) == texts(gradients_read_elsewhere, record) == []
    record.ranks[1].info[AT] |= {"changed_without": ["w"], "read_from": {"b": "main_grad"}}
    (unseen,) = texts(nothing_trained_elsewhere, record)
    assert unseen.startswith("w has no .grad before the optimizer's step on rank 1, and the step ")
    (read,) = texts(gradients_read_elsewhere, record)
    assert read.startswith("b has no .grad when the optimizer steps: compared is what is in its ")


def test_a_wrong_update_of_a_gradient_that_nobody_saw_is_not_said_to_have_a_right_one():
    record = updated(1e-2)
    (seen,) = other_than_the_single_run(compared(record))
    assert seen.cause.startswith("the optimizer's own step: its gradients are right; after it ")
    for held in record.ranks.values():
        held.info[AT]["changed_without"] = ["w"]
    (cause,) = other_than_the_single_run(compared(record))
    assert (cause.kind, cause.standing) == ("update", "likely")
    assert "or a gradient that it finds elsewhere than in .grad; after it " in cause.cause


def test_a_wrong_gradient_is_not_called_a_wrong_update():
    record = updated(1e-2)
    (cause,) = other_than_the_single_run(compared(record))
    assert cause.kind == "update"
    record.ranks[1].grads[AT]["w"] += 1
    assert list(other_than_the_single_run(compared(record))) == []
    assert texts(the_same_weights_after, record) == []


@pytest.mark.parametrize(
    ("stepped", "levels", "words"),
    [
        (({"w"}, {"w"}), set(), ""),
        (({"w"}, {"b"}), {"unknown"}, "the optimizer of rank 1 lacks w at step 0, and whether"),
        (({"w", "b"}, {"w", "b"}), {"unknown"}, "of rank 0-1 has b at step 0, and the single run"),
        (({"b"}, {"b"}), {"fail", "unknown"}, "no rank's optimizer has w at step 0"),
    ],
)
def test_what_optimizers_have_at_the_last_step(stepped, levels, words):
    record = record_of(FOUR, FOUR[:2], FOUR[2:])
    (reference,) = record.references["structure"]
    reference = replace(reference, after={"w": reference.grads["w"]}, after_floor={"w": 1e-16})
    record = replace(record, references={"structure": [reference]})
    for rank, names in enumerate(stepped):
        record.ranks[rank].info[AT]["stepped"] = sorted(names)
    found = list(the_optimizers_together(compared(record)))
    assert {f.level for f in found} == levels
    assert any(words in f.text for f in found) is bool(words), found


def test_what_a_rank_lacks_may_be_among_what_is_not_known_of_it():
    """As where parameters were put in the place of those that were met."""
    record = record_of(FOUR, FOUR[:2], FOUR[2:])
    record.references["structure"][0].after["w"] = torch.zeros(1)
    for held in record.ranks.values():
        held.info[AT]["stepped"] = ["b"]
        held.grads[AT].pop("w")
    assert [names for names, _ in unowned(record)] == [["w"]]
    assert {d.status for d in compared(record).diffs if d.name == "w"} == {"fail"}
    ranks = {r: replace(held, unknown=("x: of no model",)) for r, held in record.ranks.items()}
    record = replace(record, ranks=ranks)
    assert list(unowned(record)) == []
    assert {d.status for d in compared(record).diffs if d.name == "w"} == {"unknown"}


def test_nothing_is_said_of_rows_where_no_gradient_was_compared():
    record = record_of(FOUR, FOUR[:2], [])
    assert len(texts(the_same_rows, record)) == 1
    assert [*the_same_rows(replace(compared(record), diffs=[]))] == []


@pytest.mark.parametrize(("few", "level"), [(True, "warning"), (False, "unknown")])
def test_a_step_that_a_weights_own_digits_round_away_is_a_warning(few, level):
    record = updated(0.0)
    (first,) = record.references["structure"]
    weight = torch.tensor(2.0 if few else 2.0 + 2.0**-50, dtype=torch.float64)
    after = {n: weight.expand(v.shape) for n, v in first.after.items()}
    moved = {n: v + 2.0**-6 for n, v in after.items()}
    floor = dict.fromkeys(SHAPES, 2.0**-6)
    both = [replace(first, after=after, after_floor=floor),
            replace(first, step=1, after=moved, after_floor=floor)]  # fmt: skip
    two = replace(record, references={"structure": both})
    found = list(the_same_weights_after(replace(compared(two), diffs=[])))
    assert [f.level for f in found] == [level]


def test_a_model_that_one_rank_evaluates_while_others_train_it():
    record = record_of(FOUR, modes={"Net": [7, []], "Other": [8, ["norm"]]})
    assert texts(modules_in_one_mode, record) == []
    record.ranks[1].info[AT]["modes"] = {"Net": [7, ["", "drop"]], "Other": [8, ["norm"]]}
    (text,) = texts(modules_in_one_mode, record)
    assert text.startswith("Net is called in training on some ranks and in evaluation on rank 1")
    assert judge(record).status == judge(record_of(FOUR)).status
    record.ranks[1].info[AT]["modes"] = {"Net": [9, ["", "drop"]]}  # of other modules
    assert texts(modules_in_one_mode, record) == []
