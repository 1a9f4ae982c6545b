"""What a line's backward leaves in every gradient, and what is cleared after all of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from records_in_memory import compared, program_record
from sumgrad.diagnose import own_gradients
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.left_over import left_by_a_line as by_line
from sumgrad.diagnose.explainers.left_over.left_by_a_line import left_by_a_line
from sumgrad.diagnose.explainers.left_over.zeroed_after import zeroed_after
from sumgrad.diagnose.explanation import Left
from sumgrad.record.ranks import OWN, OWN_AT
from sumgrad.record.reference import ALL
from sumgrad.record.trace import Trace, Traces

AT, RANKS, ROWS, WIDTH = ("structure", 0), 3, 6, 5
LOSS, ATTACK, PROBE = "step.py:76", "step.py:35", "step.py:40"
LINES = [(ATTACK, LOSS, ATTACK, LOSS), (ATTACK, LOSS), (LOSS, ATTACK, LOSS)]


def own_of(rank, passes, sparse):
    drawn = torch.Generator().manual_seed(rank)
    own = torch.randn(passes, ROWS, WIDTH, generator=drawn).double()
    for row in range(ROWS if sparse else 0):
        own[:, row] *= row // 2 == rank  # each row is one rank's alone
    return own


def case_of(held, *, lines=LINES, wanted=(LOSS,), known=True, index=None, times=1.0,
            sparse=False, other=0.0):  # fmt: skip
    """held: what a rank ends with, of the sum of each line's backwards and of its own. wanted:
    lines whose backwards add up to the right gradient, beside so much of another."""
    record = program_record(tiers={"structure": "float64"}, ranks=RANKS)
    own = [own_of(rank, len(lines[rank]), sparse) for rank in range(RANKS)]
    sums = {}
    for mine, called in zip(own, lines, strict=True):
        for line, gave in zip(called, mine, strict=True):
            sums[line] = sums.get(line, 0) + gave
    right = times * sum(sums[line] for line in wanted) + other * own_of(7, 1, False)[0]
    (reference,) = record.references["structure"]
    reference = replace(
        reference, grads={"w": right}, scale={"w": 4.0}, same_dtype={}, partials={},
        by_term={"loss": {"w": right}}, resolution={"loss": {"w": 1e-20}},
        kinds={"loss": "coupled"}, counts={"loss": 1},
    )  # fmt: skip
    ranks, traces = {}, {}
    for rank, one in record.ranks.items():
        part = slice(None) if index is None else index(rank)
        at = torch.arange(ROWS * WIDTH).view(ROWS, WIDTH)
        mine = own[rank].sum(0)
        more = {(OWN, 0): {"w": own[rank].reshape(len(own[rank]), -1)},
                (OWN_AT, 0): {"w": at.reshape(-1)}}  # fmt: skip
        places = {} if index is None else {"w": at[part]}
        grads = {AT: {"w": held(sums, right, mine, rank)[part]}, **more}
        ranks[rank] = replace(one, grads=grads, index=places)
        traces[rank] = Trace(calls=(), outputs=(), gradients=(), sources={},
                             own_lines={"w": lines[rank] if known else ()})  # fmt: skip
    facts = replace(record.spec.facts, params={"w": (ROWS, WIDTH)}, terms=("loss",), num_rows=1)
    empty = Trace(calls=(), outputs=(), gradients=(), sources={})
    record = replace(
        record, spec=replace(record.spec, facts=facts), ranks=ranks,
        references={"structure": [reference]},
        traces=Traces(tier="structure", step=0, ranks=traces, single=empty),
    )  # fmt: skip
    return Case(record=record, tier="structure", step=0, diffs=compared(record).diffs)


def causes(explainer, *args, **more):
    return [e.diagnosis for e in explainer(case_of(*args, **more), Left(()))]


def with_attack(sums, right, mine, rank):
    return right + sums[ATTACK] / 3


def test_what_a_lines_backward_leaves_is_told_by_the_line():
    (told,) = causes(left_by_a_line, with_attack)
    assert told.cause == (
        "every gradient: what the backward called at step.py:35 gives is left in it, each time, "
        "and is no part of the right one: look whether that should leave anything in .grad "
        "(torch.autograd.grad leaves nothing), or what should clear it"
    )
    assert told.because == (
        "what those called at step.py:76 gave on all ranks is there as it should be, and adds up "
        "to the right gradient",
    )
    assert (told.kind, told.standing, told.ranks) == ("left_in", "proved", (0, 1, 2))
    # A mean over ranks, of losses that were scaled up.
    assert len(causes(left_by_a_line, with_attack, times=1 / 3)) == 1


@pytest.mark.parametrize(
    ("held", "more"),
    [
        (lambda sums, right, mine, rank: 2 * right, {}),  # a factor, and nothing is left in it
        (lambda sums, right, mine, rank: 2 * right + sums[ATTACK], {}),  # nor is that all
        (lambda sums, right, mine, rank: right + mine, {}),  # no sum over all ranks
        (with_attack, {"known": False}),
        (with_attack, {"wanted": (LOSS, ATTACK)}),  # it belongs in it, by another weight
        (with_attack, {"lines": [("", LOSS), (ATTACK, LOSS), (LOSS, ATTACK)]}),
    ],
)
def test_other_mistakes_are_not_left_by_a_line(held, more):
    assert causes(left_by_a_line, held, **more) == []


def test_lines_that_differ_from_gradient_to_gradient_are_none(monkeypatch):
    left = iter([{ATTACK: 1.0, LOSS: 1.0, PROBE: 0.0}, {ATTACK: 0.0, LOSS: 1.0, PROBE: 1.0}] * 2)
    wanted = {ATTACK: 0.0, LOSS: 1.0, PROBE: 0.0}
    monkeypatch.setattr(
        by_line, "_weights", lambda *_: by_line._Weights(got=next(left), wanted=wanted)
    )
    monkeypatch.setattr(by_line, "are_of_rows", lambda *_: False)
    monkeypatch.setattr(
        by_line, "_sums_by_line", lambda *_: dict.fromkeys((ATTACK, LOSS, PROBE), torch.ones(3))
    )
    assert causes(left_by_a_line, with_attack) == []


@pytest.mark.parametrize(
    ("told", "are"),
    [((True, True), True), ((True, None), True), ((True, False), False), ((None,), False),
     ((), False)],
)  # fmt: skip
def test_rows_are_read_again_if_all_that_can_be_told_are(monkeypatch, told, are):
    answers = iter(told)
    monkeypatch.setattr(own_gradients, "_is_of_rows", lambda *_: next(answers))
    assert own_gradients.are_of_rows(None, [(None, None)] * len(told)) is are


def test_of_as_many_rows_as_numbers_nothing_is_told():
    case = case_of(with_attack)
    (reference,) = case.record.references["structure"]
    rows = torch.randn(20, ROWS, WIDTH).double()
    reference = replace(
        reference, kinds={"loss": "sum"}, intervals=tuple((i, i + 1) for i in range(20)),
        partials={("loss", ALL): {"w": rows}},
    )  # fmt: skip
    case = replace(case, record=replace(case.record, references={"structure": [reference]}))
    columns = own_gradients.columns_of(
        case.failing_cells[0], own_gradients.given_by_ranks(case), uneven=True
    )
    assert own_gradients._is_of_rows(case, columns, rows[0].reshape(-1)) is None


def test_two_lines_may_leave_theirs():
    lines = [(ATTACK, PROBE, LOSS), (LOSS, PROBE), (ATTACK, LOSS)]
    (told,) = causes(
        left_by_a_line, lambda s, right, mine, rank: right + s[ATTACK] + 0.5 * s[PROBE], lines=lines
    )
    assert "called at step.py:35, step.py:40 gives is left in it" in told.cause
    (told,) = causes(left_by_a_line, lambda s, right, mine, rank: right + s[PROBE], lines=lines,
                     wanted=(LOSS, ATTACK))  # fmt: skip
    assert "called at step.py:40 gives" in told.cause
    assert "called at step.py:35, step.py:76 gave" in told.because[0]


@pytest.mark.parametrize(("repeats", "num"), [(True, 0), (False, 1)])
def test_a_backward_of_rows_that_are_read_once_more_is_another_mistake(repeats, num):
    """As of a sampler that pads a rank's last micro-batch with rows that were read before."""
    case = case_of(with_attack)
    own = [own_of(rank, len(LINES[rank]), False) for rank in range(RANKS)]
    rows = [g for mine, called in zip(own, LINES, strict=True)
            for g, line in zip(mine, called, strict=True)
            if line == (ATTACK if repeats else LOSS)]  # fmt: skip
    reference = replace(
        case.record.references["structure"][0],
        kinds={"loss": "sum"}, intervals=tuple((i, i + 1) for i in range(len(rows))),
        partials={("loss", ALL): {"w": torch.stack(rows)}},
    )  # fmt: skip
    record = replace(case.record, references={"structure": [reference]})
    assert len(list(left_by_a_line(replace(case, record=record), Left(())))) == num


def without_rows(*rows, on=(1, 2)):
    def held(sums, right, mine, rank):
        out = right.clone()
        out[list(rows)] = 0 if rank in on else out[list(rows)]
        return out

    return held


ONE_LINE = [(LOSS,)] * RANKS


def test_rows_that_are_cleared_after_right_backwards():
    (told,) = causes(zeroed_after, without_rows(1, 2, 4), lines=ONE_LINE)
    assert told.cause == (
        "a part of w is zero at the end, and should not be: rows 1-2, 4 on rank 1-2; what the "
        "ranks' own backwards gave adds up to the right gradient there: look for what clears it "
        "after them, or leaves it out (a hook, a mask, an index, a part of a buffer, a `.grad` "
        "that is reset in between)"
    )
    assert (told.kind, told.standing, told.ranks) == ("zeroed", "proved", (1, 2))
    assert len(causes(zeroed_after, without_rows(0), lines=ONE_LINE, times=0.25)) == 1


def test_columns_and_scattered_elements_are_no_rows():
    def column(sums, right, mine, rank):
        out = right.clone()
        out[:, 2] = 0
        return out

    def some(sums, right, mine, rank):
        out = right.clone()
        out.view(-1)[::4] = 0
        return out

    (told,) = causes(zeroed_after, column, lines=ONE_LINE)
    assert "should not be: columns 2 on rank 0-2;" in told.cause
    (told,) = causes(zeroed_after, some, lines=ONE_LINE)
    assert "should not be: 8 of 30 elements on rank 0-2;" in told.cause


def test_rows_of_a_shard_are_numbered_as_the_whole_has_them():
    def index(rank):
        return slice(2 * rank, 2 * rank + 2)

    (told,) = causes(zeroed_after, without_rows(3, 4, on=(0, 1, 2)), lines=ONE_LINE, index=index)
    assert "rows 3 on rank 1, rows 4 on rank 2;" in told.cause


def own_alone(sums, right, mine, rank):
    return mine


@pytest.mark.parametrize(
    "held",
    [
        own_alone,  # not reduced: another mistake, and not zero
        lambda sums, right, mine, rank: 0 * right,  # all of it is lost
        lambda sums, right, mine, rank: 0.5 * right,
        lambda sums, right, mine, rank: right + without_rows(1)(sums, right, mine, rank),
    ],
)
def test_what_is_not_cleared_is_not_said_to_be(held):
    assert causes(zeroed_after, held, lines=ONE_LINE) == []


def test_what_the_backwards_did_not_give_right_is_not_cleared_after_them():
    assert len(causes(zeroed_after, without_rows(1), lines=ONE_LINE)) == 1
    assert causes(zeroed_after, without_rows(1), lines=ONE_LINE, other=0.1) == []


def test_rows_that_a_rank_itself_never_had_may_only_not_be_reduced():
    assert causes(zeroed_after, own_alone, lines=ONE_LINE, sparse=True) == []
