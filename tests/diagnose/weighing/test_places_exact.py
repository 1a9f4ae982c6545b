"""Lists that a cause prints: one call in full, and what is not printed is said to be there."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from sumgrad.diagnose.explainers.by_modules import between
from sumgrad.diagnose.explainers.by_modules.between import places
from sumgrad.diagnose.explainers.by_modules.weighing.weighed import _tokens_in_words
from sumgrad.diagnose.explainers.by_modules.weighing.weights import _odd_ranks
from sumgrad.diagnose.modules.values.seen import Seen
from sumgrad.diagnose.modules.where.loss_weights import Share
from sumgrad.diagnose.names import block_counts
from sumgrad.diagnose.row_fit import Factors, Unit
from sumgrad.record.trace import Call


def seen(wrong, shape=(2, 3, 4), rank=0, number=0, state="wrong", back=None):
    call = Call(module="m", number=number, part=0, operation=0, operation_back=back,
                recomputed=False)  # fmt: skip
    held = None if wrong is None else torch.tensor(wrong)
    return Seen(rank=rank, call=call, shape=shape, forward=state, wrong=held)


ALL = list(range(6))


def test_one_call_is_told_and_that_there_are_others():
    assert places([seen([0, 2])]) == "at least vectors 0, 2 of 6 on rank 0 in call 0 (2 x 3 x 4)"
    told = places([seen([1, 4], rank=1, number=2), seen([5], rank=2)])
    assert told == "for one, at least positions 1 of 3 on rank 1 in call 2 (2 x 3 x 4)"


def test_a_call_of_which_some_is_wrong_tells_more_than_one_of_which_all_is():
    told = places([seen(ALL), seen([5], rank=1, number=3)])
    assert told == "for one, at least vectors 5 of 6 on rank 1 in call 3 (2 x 3 x 4)"
    told = places([seen(ALL), seen(ALL, rank=1)])
    assert told == "for one, all its 6 vectors, some elements or all, on rank 0 in call 0"


def test_of_several_outputs_it_is_said_which():
    one, two = seen(ALL), seen([0, 2])
    two = replace(two, call=replace(two.call, part=1))
    assert places([one, two]) == (
        "for one, at least vectors 0, 2 of 6 on rank 0 in call 0, second output (2 x 3 x 4)"
    )


def test_of_gradients_a_call_that_none_reaches_is_not_told():
    lost = seen([0], state="right", rank=0)
    told = places([lost, seen([1], state="right", rank=1, back=4)])
    assert told.startswith("for one, vectors 1 of 6 on rank 1")
    assert places([lost]).startswith("vectors 0 of 6 on rank 0")
    assert places([seen(None)]) == "all of it"


def factors(*values):
    units = tuple(Unit(term=None, rows=(i, i + 1)) for i in range(len(values)))
    return Factors(level="rows", units=units, values=values, sigmas=(None,) * len(values))


def test_runs_of_rows_that_are_not_written_out_are_counted():
    assert block_counts(factors(1.0, 1.0, 0.5)) == "rows 0-1: 1; rows 2: 0.5"
    told = block_counts(factors(*range(1, 9)))
    assert told.endswith("rows 5: 6; 2 more such runs of rows")
    assert "more" not in block_counts(factors(*range(1, 7)))


def share(rank, number, vectors):
    same = len({*vectors.values()}) == 1
    return Share(rank=rank, number=number, rows=(0, 1), factor=next(iter(vectors.values()))
                 if same else None, by_row={0: None} if not same else {}, shape=(4, 2),
                 vectors=vectors)  # fmt: skip


def odd(rank, number, at):
    return share(rank, number, {i: 0.0 if i == at else 1.0 for i in range(4)})


def test_calls_whose_tokens_are_not_written_out_are_counted():
    told = _tokens_in_words([odd(0, number, number % 4) for number in range(5)])
    assert told.endswith("; and 1 more such calls")
    assert "more" not in _tokens_in_words([odd(0, number, number) for number in range(4)])


def test_ranks_whose_tokens_are_all_weighed_alike_are_not_accused():
    usual = share(0, 0, dict.fromkeys(range(4), 1.0))
    assert _odd_ranks([usual, odd(1, 0, 2)]) == (1,)
    assert _odd_ranks([usual, share(1, 0, dict.fromkeys(range(4), 2.0))]) == (0, 1)
    by_rank = [usual, replace(usual, rank=1), share(2, 0, dict.fromkeys(range(4), 2.0))]
    assert _odd_ranks(by_rank) == (0, 1, 2)  # ranks that are weighed, and no tokens


def test_the_same_collective_again_is_counted_and_so_are_those_that_are_not_shown(monkeypatch):
    issued = ("a", "b", "b", "c", "d", "e", "e", "f")
    monkeypatch.setattr(between, "issued_between", lambda *_, back: issued)
    found = SimpleNamespace(seen=[SimpleNamespace(rank=1)], modules=("m",))
    monkeypatch.setattr(between, "_since", lambda *_, back: "in between" if back else "since")
    case = SimpleNamespace(traces="traces", tier="t", step=0)
    (said,) = between.between(case, found, back=True)
    assert said == "in between rank 1 issues a; b (2 times); c; d and 3 more"


@pytest.mark.parametrize(("earlier", "said"), [(4, "in between"), (2, "since what a gives,")])
def test_what_is_issued_before_the_last_of_several_is_since_the_first(monkeypatch, earlier, said):
    def called(operation, number=0):
        return SimpleNamespace(
            rank=0, call=SimpleNamespace(operation=operation, operation_back=None, number=number)
        )

    # What "a" gives in another call, and what it gives besides, tell nothing.
    look = SimpleNamespace(seen={"a": [called(1, 1), called(earlier), called(5)], "b": [called(4)]})
    monkeypatch.setattr(between, "looked", lambda _: look)
    found = SimpleNamespace(seen=[called(6)], modules=("a", "b"))
    assert between._since("case", found, back=False) == said
    assert between.range_between("case", found, 0, back=False) == range(earlier, 6)
