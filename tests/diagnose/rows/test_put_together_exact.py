"""What is said of whose micro-batches a rank holds, and of vectors whose factors are no weights."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sumgrad.diagnose.explainers.by_modules.rows import put_together, readings
from sumgrad.diagnose.explainers.by_modules.rows.readings import (
    Counted,
    Part,
    by_group,
    by_number,
    late,
    lost_everywhere,
    own_only,
    some_ranks,
)
from sumgrad.diagnose.explainers.by_modules.weighing import weighed, weights
from sumgrad.diagnose.modules.where.loss_weights import Share

PARTS = [
    Part(ranks=(0, 1), number=0, weights=torch.tensor([1.0, 0, 0]).double()),
    Part(ranks=(2,), number=0, weights=torch.tensor([0.0, 1, 0]).double()),
    Part(ranks=(3,), number=0, weights=torch.tensor([0.0, 0, 1]).double()),
]


def held(*often: tuple[float, ...]) -> list[Counted]:
    return [Counted(rank=r, names=("w",), often=own) for r, own in enumerate(often)]


@pytest.mark.parametrize(
    ("often", "kind", "cause"),
    [
        ([(1, 1, 0)] * 4, "lost_contribution", "what rank 3 made is not in w, on any rank"),
        ([(0, 0, 1)] * 4, "lost_contribution", "what rank 0-2 made is not in w, on any rank"),
        ([(3, 0, 3)] * 4, "lost_contribution",
         "what rank 2 made is not in w, on any rank; the rest is, 3 times"),
        ([(1, 1, 0), (1, 1, 0), (1, 1, 0), (0, 0, 1)], "too_few_ranks",
         "w is reduced over too few ranks: rank 0-2 holds what rank 0-2 made; rank 3 holds what "
         "rank 3 made"),
        ([(1, 1, 1)] * 4, "", None),
        ([(0, 0, 0)] * 4, "", None),
    ],
)  # fmt: skip
def test_parts_of_some_ranks(often, kind, cause):
    assert some_ranks(PARTS, held(*often), ["w"]) == (kind, cause)


def turns(*each):
    """Micro-batches of two ranks, so many of each."""
    row = iter(torch.eye(sum(each)).double())
    return [Part(ranks=(rank,), number=n, weights=next(row))
            for rank, num in enumerate(each) for n in range(num)]  # fmt: skip


@pytest.mark.parametrize(
    ("each", "often", "cause"),
    [
        ((2, 2), [(1, 1, 1, 0), (1, 0, 1, 1)],
         "w is reduced too early: micro-batch 1 is added after its reduction and stays on its own "
         "rank, micro-batch 0 is reduced"),
        ((3, 2), [(1, 1, 1, 1, 0), (1, 1, 0, 1, 1)],
         "w is reduced too early: micro-batch 2 of rank 0; 1 of rank 1 is added after its "
         "reduction and stays on its own rank, those before are reduced"),
        ((3, 2), [(1, 1, 1, 0, 1), (1, 1, 0, 1, 1)], None),  # of one rank it is the first
        ((3, 2), [(1, 1, 1, 1, 0), (1, 1, 0, 1, 0)], None),  # it is not on its own rank either
    ],
)  # fmt: skip
def test_what_the_last_backwards_gave_stays_on_its_rank(each, often, cause):
    kind, said = late(turns(*each), held(*often), ["w"])
    assert (said, kind) == (cause, "late_gradient" if cause else "")


@pytest.mark.parametrize(
    ("each", "often", "told"),
    [
        ((3, 3), [(1, 1, 1, 1, 1, 0)] * 2, "rank 1 in micro-batch 2 is"),
        ((3, 2), [(1, 0, 1, 0, 1)] * 2, "rank 0 in micro-batch 1, rank 1 in micro-batch 0 is"),
        ((2, 3), [(1, 1, 1, 1, 0)] * 2, None),  # all of that number
        ((2, 2), [(1, 1, 0, 0)] * 2, None),  # all of that rank
        ((3, 3), [(1, 1, 1, 1, 1, 0), (1, 1, 1, 1, 1, 1)], None),  # on its own it is
        ((3, 3), [(1, 1, 2, 1, 1, 0)] * 2, None),
        ((3, 3), [(1, 1, 1, 1, 1, 1)] * 2, None),
    ],
)
def test_micro_batches_that_no_rank_has_were_lost_where_they_were_made(each, often, told):
    kind, said = lost_everywhere(turns(*each), held(*often), ["w"])
    assert kind == ("lost_rows" if told else "")
    assert said is None if told is None else said.startswith(f"what was made on {told} not in w,")
    # Of those that made it none is among the ranks that were looked at.
    others = [Counted(rank=7, names=("w",), often=own) for own in often]
    assert lost_everywhere(turns(*each), others, ["w"]) == ("", None)


def share(rank: int, vectors: dict[int, float], by_row: dict[int, float | None]) -> Share:
    same = len(set(vectors.values())) == 1
    return Share(
        rank=rank, number=0, rows=tuple(by_row), factor=vectors[0] if same else None,
        by_row=by_row, shape=(len(vectors), 3), vectors=vectors,
    )  # fmt: skip


MANY = {0: 1.0, 1: 3.4, 2: -0.07, 3: 4.3, 4: 26.0}


@pytest.mark.parametrize(
    ("shares", "narrow"),
    [
        ([share(0, MANY, {})], True),  # nobody knows whose rows these are
        ([share(0, MANY, {}), share(1, {0: 1.0, 1: 1.0}, {})], True),
        ([share(0, {0: 1.0, 1: 1.0}, {})], False),
        ([share(0, {0: 1.0, 1: 0.0, 2: 1.0}, {})], False),  # a token that is lost
        ([share(0, MANY, {0: 1.0, 1: 3.4, 2: -0.07, 3: 4.3, 4: 26.0})], False),  # weights of rows
    ],
)
def test_many_factors_of_vectors_of_unknown_rows_are_no_weights(monkeypatch, shares, narrow):
    monkeypatch.setattr(weights, "behind_few_directions", lambda look, module: None)
    seen = {"router": [SimpleNamespace(shape=torch.Size((5, 3)))]}
    look = SimpleNamespace(modules=("router",), seen=seen)
    monkeypatch.setattr(weights, "named", lambda look, module: module)
    found = weights._single_numbers(look, "router", shares, "main")
    assert (found is not None) == narrow
    if found is not None:
        assert found.cause.startswith(
            "the gradient of main that reaches router is wrong, by a factor of its own in each "
            "vector of 3 numbers: on rank 0 "
        )


def of_part(part: int, *factors: float, number: int = 0) -> list[Share]:
    return [
        Share(rank=r, number=number, rows=(), factor=f, by_row={}, part=part)
        for r, f in enumerate(factors)
    ]


@pytest.mark.parametrize(
    ("shares", "words"),
    [
        ([*of_part(0, 2.0, 2.0, 2.0), *of_part(1, 1.0, 1.0, 3.0)],
         "of 2 outputs the second alone, every other has one factor: the loss of rank 2 has the "
         "factor 3, that of all other ranks 1: its rows count 3 times as much"),
        (of_part(1, 1.0, 1.0, 3.0),
         "the loss of rank 2 has the factor 3, that of all other ranks 1: its rows count 3 times "
         "as much"),
        ([*of_part(0, 2.0, 2.0), *of_part(1, 3.0, 3.0)],
         "the model's outputs enter the loss with factors of their own: 1: 2, 2: 3"),
        (of_part(0, 2.0, 2.0), None),
        ([*of_part(0, 2.0, 3.5), *of_part(0, 1.25, 2.0, number=1)],
         "ranks and micro-batches have factors of their own: rank 0 micro-batch 0: 2, rank 1 "
         "micro-batch 0: 3.5, rank 0 micro-batch 1: 1.25, rank 1 micro-batch 1: 2"),
    ],
)  # fmt: skip
def test_the_output_that_is_weighed_otherwise_is_looked_at_alone(monkeypatch, shares, words):
    monkeypatch.setattr(weighed, "_row_counts", lambda *_: None)
    case = SimpleNamespace(traces=None, record=SimpleNamespace(spec=SimpleNamespace(facts=None)))
    assert weighed.shares_in_words(case, shares) == words


def numbered(rank: int, *numbers: int) -> list[Part]:
    one = torch.ones(1).double()
    return [Part(ranks=(rank,), number=number, weights=one) for number in numbers]


def test_what_a_sum_must_have_been_multiplied_by_is_said():
    parts = [*numbered(0, 0, 1, 2), *numbered(1, 0, 1)]
    often = (2 / 9, 1 / 3, 1.0, 2 / 9, 1 / 3)
    kind, cause = by_number(parts, held(often, often), ["w"])
    assert kind == "row_factors"
    assert cause == (
        "micro-batches are counted 0: 2/9, 1: 1/3, 2: 1 in w, as if what was added up was "
        "multiplied by 2/3 after micro-batch 0, 1/3 after micro-batch 1: look for a clip, a "
        "division or a reduction of .grad there"
    )


def test_where_there_are_no_other_ranks_nothing_is_left_out():
    assert own_only(None, numbered(0, 0, 1), held((1.0, 1.0)), ["w"]) == ("", None)


OWN_PARTS = [
    Part(ranks=(0,), number=0, weights=torch.tensor([1.0, 0, 0]).double()),
    Part(ranks=(0,), number=1, weights=torch.tensor([0.0, 1, 0]).double()),
    Part(ranks=(1,), number=0, weights=torch.tensor([0.0, 0, 1]).double()),
]


@pytest.mark.parametrize(
    ("own", "often", "said"),
    [
        ([[1.0], [0.0]], (1, 0, 1), "rank 0 in micro-batch 1"),
        ([[0.0], [0.0]], (0, 0, 1), "rank 0 in micro-batch 0-1"),
        ([[1.0], [2.0]], (1, 0, 1), None),  # it gave something, that is lost later
        ([[1.0]], (1, 0, 1), None),  # which backward it is is not known
        ([[1.0], [0.0]], (1, 1, 1), None),
    ],
)
def test_what_the_backward_itself_gave_nothing_is_not_lost_in_a_reduction(
    monkeypatch, own, often, said
):
    given = {0: ({"w": torch.tensor(own)}, {}), 1: ({"w": torch.ones(1, 1)}, {})}
    monkeypatch.setattr(readings, "given_by_ranks", lambda case: given)
    kind, cause = readings.given_nothing(None, OWN_PARTS, held(often, often), ["w"])
    assert (cause is not None) == (said is not None)
    if said:
        assert kind == "lost_rows"
        assert cause.startswith(f"what the backward gives w is zero on {said}, though the modules")


@pytest.mark.parametrize(("losses", "unit"), [(2, "micro-batch"), (0, "micro-batch"), (1, "call")])
def test_a_call_is_a_micro_batch_where_each_has_a_loss(losses, unit):
    case = SimpleNamespace(traces=SimpleNamespace(
        ranks={rank: SimpleNamespace(losses=(1.0,) * losses) for rank in (0, 1)}
    ))  # fmt: skip
    shares = [*of_part(0, 2.0, 3.5), *of_part(0, 1.25, 2.0, number=1)]
    assert weighed._unit(case, shares) == unit


def joint(at, ranks, *names):
    return SimpleNamespace(at=at, ranks=ranks, names=names)


@pytest.mark.parametrize(
    ("joints", "said"),
    [
        ([joint("a", (0, 1), "w", "v"), joint("b", (0, 1), "v")], ["that reduction is a"]),
        ([joint("a", (0, 1), "w"), joint("b", (0, 1), "w")], []),  # at two places
        ([joint("a", (0, 1), "w"), joint("b", (0,), "w")], ["that reduction is a"]),
        ([joint("a", (0, 1), "v")], []),
    ],
)
def test_where_what_is_reduced_too_early_is_reduced(monkeypatch, joints, said):
    monkeypatch.setattr(put_together, "reductions_of", lambda case: joints)
    monkeypatch.setattr(put_together, "carried_by", lambda case, joint: joint.names)
    monkeypatch.setattr(put_together, "describe", lambda record, joint: joint.at)
    monkeypatch.setattr(put_together, "own_only", lambda *_: ("", None))
    case = SimpleNamespace(record=None)
    assert put_together._where_it_is_reduced(case, ["w"]) == said
    parts = [*numbered(0, 0, 1), *numbered(1, 0, 1)]
    found = [Counted(rank=rank, names=("w",), often=(1.0, float(rank == 0), 1.0, float(rank == 1)))
             for rank in (0, 1)]  # fmt: skip
    monkeypatch.setattr(put_together, "given_nothing", lambda *_: ("", None))
    told = put_together._in_words(case, parts, found)
    assert told.kind == "late_gradient"
    assert [*told.because][-1:] == (said or [told.because[-1]])
    assert ("that reduction is a" in told.because) == bool(said)


@pytest.mark.parametrize(("often", "said"), [
    ((4.0, 2.0, 1.0), "each call rescales what was there before"),
    ((1.0, 2 / 5, 4 / 25), "each is multiplied by 2/5 once more than the one before it, as by a "
                           "hook or a factor that is there once more each time"),
])  # fmt: skip
def test_what_is_multiplied_again_and_again_is_told_by_which_is_right(often, said):
    kind, cause = by_number([*numbered(0, 0, 1, 2)], held(often), ["w"])
    assert kind == "rescaled"
    assert cause.endswith(f"in w: {said}")


def of_rows(rank: int, by_row: dict[int, float]) -> Share:
    return Share(rank=rank, number=0, rows=tuple(by_row), factor=None, by_row=dict(by_row))


@pytest.mark.parametrize(
    ("shares", "words"),
    [
        ([of_rows(0, {0: 2.0, 1: 3.5}), of_rows(1, {2: 2.0, 1: 3.5})], "0, 2: 2; 1: 3.5"),
        ([of_rows(0, {0: 2.0, 1: 3.5}), of_rows(1, {0: 2.0, 1: 4.25})],
         "on rank 0 0: 2; 1: 3.5; on rank 1 0: 2; 1: 4.25"),
        ([of_rows(r, {0: 2.0 + r, 1: 7.0}) for r in range(6)],
         "on rank 0 0: 2; 1: 7; on rank 1 0: 3; 1: 7; on rank 2 0: 4; 1: 7; on rank 3 0: 5; 1: 7; "
         "and on 2 more ranks"),
    ],
)  # fmt: skip
def test_rows_that_ranks_weigh_unlike_are_told_rank_by_rank(monkeypatch, shares, words):
    monkeypatch.setattr(weighed, "_row_counts", lambda *_: None)
    case = SimpleNamespace(traces=None, record=SimpleNamespace(spec=SimpleNamespace(facts=None)))
    start = "the rows' gradients at the loss have factors of their own: "
    assert weighed.shares_in_words(case, shares) == start + words


@pytest.mark.parametrize(
    ("by_row", "more", "said"),
    [
        ({0: 1 / 2, 1: 1 / 4}, (), "every row is divided by its own count, not all rows by the"),
        ({0: 1 / 4, 1: 1 / 4}, (), "the rows' gradients at the loss have factors of their own"),
        ({0: 1 / 2, 1: 1 / 3}, (), "the rows' gradients at the loss have factors of their own"),
        ({0: 1 / 2, 3: 1 / 2}, (), "the rows' gradients at the loss have factors of their own"),
        ({0: 1 / 2}, (), None),  # of one row it is nothing
        ({0: 1 / 2, 1: 1 / 4}, (Share(rank=1, number=0, rows=(2,), factor=None, by_row={}),), None),
    ],
)
def test_rows_are_divided_by_their_own_counts_where_all_of_them_are(
    monkeypatch, by_row, more, said
):
    monkeypatch.setattr(weighed, "_row_counts", lambda *_: torch.tensor([2.0, 4.0, 3.0, 2.0]))
    case = SimpleNamespace(traces=None, record=SimpleNamespace(spec=SimpleNamespace(facts=None)))
    told = weighed.shares_in_words(case, [of_rows(0, by_row), *more])
    assert (told or "").startswith(said or "")
    assert said or "row" not in (told or "")


def test_calls_whose_vectors_are_all_right_are_not_told():
    def share(number, *factors):
        return Share(rank=0, number=number, rows=(0,), factor=None, shape=(3, 1), by_row={},
                     vectors=dict(enumerate(factors)))  # fmt: skip

    shares = [share(0, -0.75, 1.0, 2.5), share(1, 1.0, 1.0, 1.0), share(2, 4.0, 1.0, 1.0)]
    told = weights._odd_in_words(shares, None)
    assert told == {0: "factors such as -0.75 and 2.5 in call 0, and others in call 2"}


@pytest.mark.parametrize(("often", "again"), [
    ([4.0, 3.0, 2.0, 1.0], True), ([3.0, 3.0, 1.0], True), ([2 / 3, 1 / 3, 1 / 3], True),
    ([220 / 243, 44 / 81, 11 / 27, 1 / 3], False), ([2.0, 1.0, 0.0], False), ([1.0, 2.0], False),
])  # fmt: skip
def test_what_is_counted_again_is_so_in_whole_numbers(often, again):
    assert readings._are_counted_again(often) == again


@pytest.mark.parametrize(("often", "kind"), [
    ([(1, 1, 0), (0, 0, 1)], ""),  # each its own: rank 1 has one micro-batch less, and that is all
    ([(1, 1, 1), (1, 0, 1)], "late_gradient"),  # the second of rank 0 is not on rank 1
])  # fmt: skip
def test_a_rank_with_fewer_micro_batches_is_not_reduced_over_others_each_time(often, kind):
    parts = turns(2, 1)
    assert by_group(parts, held(*often), ["w"])[0] == kind
