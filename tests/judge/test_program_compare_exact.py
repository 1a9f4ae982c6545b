"""A Program's shards, replicas and references: what is compared, and what must not be passed by."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from records_in_memory import (
    FLOOR,
    SCALE,
    SHAPES,
    compared,
    integers,
    program_record,
    program_reference,
    texts,
    with_rank,
)
from sumgrad.judge.cells import cells, compare, compare_again, compare_cell, expected, shard
from sumgrad.judge.checks.beside import nothing_to_see_of
from sumgrad.judge.checks.complete import nothing_left_out, something_to_see
from sumgrad.judge.checks.replicas import replicas_of_a_collective
from sumgrad.record.spec import Script

KEY = ("structure", 0)
# Rank 0 holds the first row of w, rank 1 the rest, rank 2 what rank 1 holds; all hold b.
SHARDS = {
    0: {"w": torch.arange(3).view(1, 3)},
    1: {"w": torch.arange(3, 12).view(3, 3)},
    2: {"w": torch.arange(3, 12).view(3, 3)},
}


@pytest.fixture(scope="module")
def record():
    return program_record(steps=2)


@pytest.fixture(scope="module")
def sharded():
    return program_record(index=SHARDS)


def changed(record, rank: int, name: str, by: float, key=KEY):
    grads = {k: dict(v) for k, v in record.ranks[rank].grads.items()}
    tensor = grads[key][name].clone()
    tensor.reshape(-1)[-1] += by
    grads[key][name] = tensor
    return with_rank(record, rank, grads=grads)


def with_feeds(record, rank: int, feeds: list):
    """The record of a run in which no all-reduce gave this rank its gradients."""
    info = {key: {**held, "feeds": feeds} for key, held in record.ranks[rank].info.items()}
    return with_rank(record, rank, info=info)


def failed(record) -> set[tuple[int, str, str, int]]:
    return {(d.rank, d.name, d.tier, d.step) for d in compare(record) if d.status == "fail"}


def with_reference(record, tier: str = "structure", at: int = 0, **change):
    """One reference changed."""
    references = list(record.references[tier])
    references[at] = replace(references[at], **change)
    return replace(record, references={**record.references, tier: references})


def test_what_is_expected_of_a_whole_parameter(record):
    reference = record.references["structure"][1]
    found = expected(record, reference, "train", "w", "structure")
    assert torch.equal(found.value, reference.grads["w"])
    assert torch.equal(found.same_dtype, reference.same_dtype["w"])
    assert (found.floor, found.scale, found.threshold) == (FLOOR, SCALE, 4 * FLOOR)
    assert set(found.terms) == {"main", "aux"}
    assert found.resolution == {"main": 1e-20, "aux": 1e-20}
    assert found.every_term
    assert found.size == float(reference.grads["w"].abs().max())
    precise = record.references["precision"][0]
    assert not expected(record, precise, "train", "w", "precision").every_term
    alone = program_record(tiers={"precision": "float32"})
    assert expected(alone, precise, "train", "w", "precision").every_term
    assert expected(record, precise, "train", "w", "precision").threshold == pytest.approx(4e-6)
    quiet = with_reference(record, floor={"w": 0.0, "b": 0.0})
    found = expected(quiet, quiet.references["structure"][0], "train", "w", "structure")
    assert found.floor == SCALE * 2**-52
    uneven = with_reference(record, scale={"w": 8.0, "b": 0.0})
    assert expected(uneven, uneven.references["structure"][0], "train", "w", "structure").scale == 8
    assert expected(uneven, uneven.references["structure"][0], "train", "b", "structure").scale == 0


def test_a_shard_is_held_against_its_own_elements(record):
    whole = expected(record, record.references["structure"][0], "train", "w", "structure")
    index = torch.tensor([[11, 0], [5, 4]])
    part = shard(whole, index)
    for got, full in (
        (part.value, whole.value),
        (part.same_dtype, whole.same_dtype),
        (part.terms["main"], whole.terms["main"]),
        (part.terms["aux"], whole.terms["aux"]),
    ):
        flat = full.flatten()
        assert got.tolist() == [[flat[11], flat[0]], [flat[5], flat[4]]]
    assert (part.scale, part.size, part.threshold) == (whole.scale, whole.size, whole.threshold)
    assert shard(whole, None) is whole
    assert shard(replace(whole, same_dtype=None), index).same_dtype is None


def test_every_tensor_of_every_rank_tier_and_step(record):
    diffs = compare(record)
    assert {d.status for d in diffs} == {"pass"}
    assert {(d.rank, d.name, d.tier, d.step) for d in diffs} == {
        (r, n, t, s) for r in range(3) for n in SHAPES for t in record.spec.tiers for s in (0, 1)
    }
    assert {d.pool for d in diffs} == {"train"}
    assert len(diffs) == 3 * 2 * 2 * 2


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("name", SHAPES)
def test_an_error_just_over_the_threshold_of_any_rank(record, sharded, rank, name):
    error = 2.0**-44  # 5.7e-14: 7 of them are under 4e-13, 8 above
    for key in (KEY, ("structure", 1)):
        for sign in (1, -1):
            assert failed(changed(record, rank, name, sign * 7 * error, key)) == set()
            assert failed(changed(record, rank, name, sign * 8 * error, key)) == {
                (rank, name, *key)
            }
    assert failed(changed(sharded, rank, name, 7 * error)) == set()
    assert failed(changed(sharded, rank, name, 8 * error)) == {(rank, name, *KEY)}
    assert failed(changed(record, rank, name, 3.5e-6, ("precision", 1))) == set()
    assert failed(changed(record, rank, name, 4.5e-6, ("precision", 1))) == {
        (rank, name, "precision", 1)
    }


def test_cells_are_what_ranks_hold(sharded):
    reference = sharded.references["structure"][0]
    partial = with_rank(sharded, 1, params=("w",))
    found = {(c.rank, c.name): c for c in cells(partial, "structure", reference)}
    assert set(found) == {(0, "w"), (1, "w"), (2, "w"), (0, "b"), (2, "b")}
    assert found[1, "w"].wanted.value.shape == (3, 3)
    assert found[0, "b"].index is None
    none = with_rank(sharded, 1, grads={})
    assert {c.rank for c in cells(none, "structure", reference)} == {0, 2}
    cell = replace(found[0, "b"], got=None)
    assert torch.equal(cell.measured, torch.zeros(3).double())
    assert found[0, "b"].measured.dtype == torch.float64
    half = replace(found[0, "b"], got=found[0, "b"].got.float())
    assert torch.equal(half.measured, found[0, "b"].wanted.value)


def lost(record, rank: int, name: str):
    grads = {k: {n: g for n, g in v.items() if n != name} for k, v in
             record.ranks[rank].grads.items()}  # fmt: skip
    return with_rank(record, rank, grads=grads)


def test_no_gradient_is_wrong_where_there_is_one_and_right_where_there_is_none(record):
    wrong = lost(record, 1, "b")
    bad = [d for d in compare(wrong) if d.status == "fail"]
    assert {(d.rank, d.name) for d in bad} == {(1, "b")}
    assert {d.reason for d in bad} == {
        "the step left no gradient (None); the reference is not zero"
    }
    zero = torch.zeros(3).double()
    unused = dict(
        grads={**record.references["structure"][0].grads, "b": zero},
        by_term={t: {**g, "b": zero} for t, g in
                 record.references["structure"][0].by_term.items()},
        scale={**record.references["structure"][0].scale, "b": 0.0},
        floor={"w": FLOOR, "b": 0.0},
    )  # fmt: skip
    one = program_record(tiers={"structure": "float64"})
    never = with_reference(one, reached=("w",), **unused)
    for rank in range(3):
        never = lost(never, rank, "b")
    assert {d.status for d in compare(never)} == {"pass"}  # nothing uses it
    used = replace(never, references={"structure": [replace(never.references["structure"][0],
                                                            reached=("w", "b"))]})  # fmt: skip
    unsure = [d for d in compare(used) if d.name == "b"]
    assert {d.status for d in unsure} == {"unknown"}
    assert "zero at these weights" in unsure[0].reason
    # Something where no term reaches: a failure, however little it is.
    for r in range(3):
        grads = {KEY: {**never.ranks[r].grads[KEY], "b": zero + 1e-300}}
        assert (r, "b", *KEY) in failed(with_rank(never, r, grads=grads))
    # It has a gradient at another step: there it was checked.
    two = program_record(tiers={"structure": "float64"}, steps=2)
    two = with_reference(two, **unused)
    for r in range(3):
        grads = {**two.ranks[r].grads, KEY: {**two.ranks[r].grads[KEY], "b": zero}}
        two = with_rank(two, r, grads=grads)
    assert {d.status for d in compare(two)} == {"pass"}


@pytest.mark.parametrize(
    ("info", "reason"),
    [
        ({"reshaped": {"b": [5]}}, "it has another shape (5,) after the step"),
        ({"elsewhere": {"b": "main_grad"}}, "the step left no .grad, but a gradient in main_grad"),
        (
            {"changed_without": ["b"]},
            "it had no .grad, and the optimizer's step changed it all the same",
        ),
    ],
)
def test_a_gradient_that_could_not_be_read_is_unknown(info, reason):
    one = program_record(tiers={"structure": "float64"})
    wrong = lost(one, 1, "b")
    wrong = with_rank(wrong, 1, info={KEY: {**one.ranks[1].info[KEY], **info}})
    (bad,) = [d for d in compare(wrong) if d.status != "pass"]
    assert (bad.rank, bad.name, bad.status) == (1, "b", "unknown")
    assert bad.reason == f"{reason}, which was not compared"


def test_what_changes_without_a_gradient_in_both_runs_was_not_compared():
    """None here and zero there is nothing that was seen, and no gradient of zeros."""
    one = program_record(tiers={"structure": "float64"})
    step = one.references["structure"][0]
    both = with_reference(
        one,
        grads={**step.grads, "b": torch.zeros(3).double()},
        scale={**step.scale, "b": 0.0},
        floor={**step.floor, "b": 0.0},
        reached=("w",),
    )
    for rank in range(3):
        both = lost(both, rank, "b")
    assert {d.status for d in compare(both)} == {"pass"}
    both = with_rank(both, 1, info={KEY: {**one.ranks[1].info[KEY], "changed_without": ["b"]}})
    assert [(d.rank, d.name) for d in compare(both) if d.status == "unknown"] == [(1, "b")]


def test_zero_by_mathematics_passes_without_a_gradient(record):
    """The reference is zero, its scale is not: no gradient is zeros, and was seen."""
    zero = torch.zeros(3).double()
    one = program_record(tiers={"structure": "float64"})
    step = one.references["structure"][0]
    quiet = with_reference(one, grads={**step.grads, "b": zero})
    cell = next(c for c in cells(quiet, "structure", quiet.references["structure"][0])
                if c.name == "b")  # fmt: skip
    assert compare_cell(quiet, replace(cell, got=None)).status == "pass"
    nearly = with_reference(one, grads={**step.grads, "b": zero + torch.tensor([0, 0, 1.0])})
    cell = next(c for c in cells(nearly, "structure", nearly.references["structure"][0])
                if c.name == "b")  # fmt: skip
    assert compare_cell(nearly, replace(cell, got=None)).status == "fail"


def test_another_model_another_batch_or_an_unsound_reference_is_not_compared(record):
    assert compare(with_rank(record, 2, built="other")) == []
    assert compare(with_rank(record, 0, batch="other")) == []
    unsound = with_reference(record, problems=("it draws",))
    diffs = compare(unsound)
    assert {(d.tier, d.step) for d in diffs} == {
        ("structure", 1), ("precision", 0), ("precision", 1)
    }  # fmt: skip


def test_steps_after_the_first_need_every_parameters_place(record):
    lostone = with_rank(record, 1, unknown=("x: nowhere",))
    assert {(d.tier, d.step) for d in compare(lostone)} == {KEY, ("precision", 0)}
    assert repeated(lostone) == []


def repeated(record):
    return compare_again(record, compare(record))


def test_the_repeated_step_is_the_last_of_the_last_tier(record):
    diffs = repeated(record)
    assert {(d.rank, d.name, d.tier, d.step) for d in diffs} == {
        (r, n, "precision", 1) for r in range(3) for n in SHAPES
    }
    assert {d.status for d in diffs} == {"pass"}
    again = {**record.ranks[2].again, "b": record.ranks[2].again["b"] + 1}
    (bad,) = [
        d
        for d in compare_again(
            with_rank(record, 2, again=again), compare(with_rank(record, 2, again=again))
        )
        if d.status == "fail"
    ]
    assert (bad.rank, bad.name) == (2, "b")
    none = record
    for rank in range(3):
        none = with_rank(none, rank, again={})
    assert repeated(none) == []
    assert len(repeated(with_rank(record, 0, again={}))) == 6
    assert (
        compare_again(
            with_rank(record, 0, built="other"), compare(with_rank(record, 0, built="other"))
        )
        == []
    )
    unsound = with_reference(record, "precision", at=1, problems=("it draws",))
    assert repeated(unsound) == []
    assert repeated(replace(record, references={})) == []


def uncovered(record) -> list[str]:
    return [t for t in texts(nothing_left_out, record) if t.startswith("no rank holds")]


def test_elements_that_no_rank_holds_are_counted(sharded, record):
    assert uncovered(sharded) == []
    assert uncovered(record) == []
    for rank, missing in ((0, 3), (1, 0)):
        left = {r: h for r, h in sharded.ranks.items() if r != rank}
        found = uncovered(replace(sharded, ranks=left))
        assert found == (
            [f"no rank holds {missing} of 12 elements of w, so its gradient was not compared"]
            if missing
            else []
        )
    only = {0: sharded.ranks[0]}
    assert uncovered(replace(sharded, ranks=only)) == [
        "no rank holds 9 of 12 elements of w, so its gradient was not compared"
    ]
    nobody = record
    for rank in range(3):
        nobody = with_rank(nobody, rank, params=("b",))
    assert uncovered(nobody) == ["no rank holds w, so its gradient was not compared"]
    # An index of a parameter that the rank says it does not hold counts nothing.
    liar = replace(sharded, ranks={0: sharded.ranks[0],
                                   1: replace(sharded.ranks[1], params=("b",))})  # fmt: skip
    assert uncovered(liar) == [
        "no rank holds 9 of 12 elements of w, so its gradient was not compared"
    ]


def test_ranks_that_hold_the_same_elements_have_the_same_bits(sharded, record):
    assert texts(replicas_of_a_collective, sharded) == []
    assert texts(replicas_of_a_collective, record) == []
    for key in (("structure", 1), ("precision", 0)):
        (text,) = texts(replicas_of_a_collective, changed(record, 2, "b", 2.0**-20, key))
        assert text == (
            f"replicas, {key[0]}, step {key[1]}: rank 0 and rank 2 hold other bits of b's "
            f"gradient, which one collective gave to both"
        )
    (text,) = texts(replicas_of_a_collective, changed(sharded, 2, "w", 1.0))
    assert "rank 1 and rank 2 hold other bits of w" in text
    apart = with_feeds(changed(record, 2, "b", 2.0**-20), 2, [])  # summed by another operation
    assert texts(replicas_of_a_collective, apart) == []
    alone = changed(sharded, 0, "w", 1.0)  # nobody else holds these elements
    assert texts(replicas_of_a_collective, alone) == []
    for rank in (0, 2):
        assert texts(replicas_of_a_collective, lost(record, rank, "b")) == []


def test_a_term_that_would_hide_makes_a_program_unknown():
    one = program_record(tiers={"structure": "float64"})
    small = {n: integers(s, 3) * 1e-14 for n, s in SHAPES.items()}
    step = program_reference()
    hidden = with_reference(one, by_term={**step.by_term, "aux": small})
    diffs = compare(hidden)
    assert {d.status for d in diffs} == {"unknown"}
    assert {d.reason for d in diffs} == {"a wrong factor on aux would not have been seen"}


def test_a_tier_in_which_every_gradient_is_zero_compared_nothing():
    """As of a loss that is multiplied by nought: nothing on any rank could have been noticed."""
    one = program_record(tiers={"structure": "float64"})
    assert list(something_to_see(compared(one))) == []
    step = one.references["structure"][0]
    zeros = {name: torch.zeros_like(g) for name, g in step.grads.items()}
    none = dict.fromkeys(zeros, 0.0)
    empty = with_reference(one, grads=zeros, scale=none, floor=none, reached=())
    for rank in range(3):
        empty = with_rank(empty, rank, grads={KEY: {n: torch.zeros(g.shape).double()
                                                    for n, g in zeros.items()}})  # fmt: skip
    assert {d.status for d in compare(empty)} == {"pass"}
    (finding,) = something_to_see(compared(empty))
    assert (finding.level, finding.tier) == ("unknown", "structure")
    half = with_reference(empty, scale={**none, "w": 1e-3})
    assert list(something_to_see(compared(half))) == []


def zero_of_b(*, reached, zero=None):
    """b has no gradient in the reference, nor on a rank. zero: patterns, of a script."""
    one = program_record(tiers={"structure": "float64"})
    (was,), none = one.references["structure"], torch.zeros(3).double()
    record = with_reference(
        one, reached=reached, grads={**was.grads, "b": none}, scale={**was.scale, "b": 0.0},
        by_term={t: {**g, "b": none} for t, g in was.by_term.items()},
        floor={"w": FLOOR, "b": 0.0},
    )  # fmt: skip
    for rank in range(3):
        record = with_rank(record, rank, grads={KEY: {**one.ranks[rank].grads[KEY], "b": none}})
    if zero is not None:
        script = Script(command="train.py", rows=({},), losses=((1.0,),), zero=zero)
        record = replace(record, spec=replace(record.spec, script=script))
    return record


@pytest.mark.parametrize(
    ("zero", "status"),
    [((), "unknown"), (("b",), "pass"), (("?",), "pass"), (("w", "*.b"), "unknown")],
)
def test_who_runs_a_script_may_say_that_a_gradient_has_to_be_zero(zero, status):
    found = [d for d in compare(zero_of_b(reached=("w", "b"), zero=zero)) if d.name == "b"]
    assert {d.status for d in found} == {status}
    assert all("--zero b" in d.reason for d in found if status == "unknown")
    wrong = zero_of_b(reached=("w", "b"), zero=zero)
    grads = {KEY: {**wrong.ranks[1].grads[KEY], "b": torch.full((3,), 1e-9).double()}}
    assert (1, "b", *KEY) in failed(with_rank(wrong, 1, grads=grads))


def test_what_was_zero_at_all_weights_is_told_beside_what_passes():
    (said,) = texts(nothing_to_see_of, zero_of_b(reached=("w",)))
    assert said.startswith("the gradient of b is zero on these rows at all weights")
    assert texts(nothing_to_see_of, zero_of_b(reached=("w", "b"))) == []  # it is unknown
    assert texts(nothing_to_see_of, program_record()) == []
