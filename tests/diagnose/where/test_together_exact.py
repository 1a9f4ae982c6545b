"""Outputs that are another row's than what stands beside them; of modules that are called again on
the way, the one that a rank meets first; outputs that the loss of a rank alone is made of."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from sumgrad.diagnose.explainers.by_modules.backwards.way_back import outputs_used_otherwise
from sumgrad.diagnose.explainers.by_modules.forwards.wrong_outputs import no_slice
from sumgrad.diagnose.modules.where.first_wrong import FirstWrong, first_wrong_forward
from sumgrad.diagnose.modules.where.look import look_at
from sumgrad.record.trace import Call, Trace, Traces

G = torch.Generator().manual_seed(11)
ROWS, PLACES = 6, 4
HIDDEN = torch.randn(ROWS, 3, generator=G).double()
COUNTS = torch.tensor([3, 1, 4, 1, 5, 9]).double()[:, None]
WORDS = torch.randn(ROWS, PLACES, 3, generator=G).double()
TABLE = torch.randn(PLACES, 3, generator=G).double()
PLACED = TABLE[torch.tensor([[0, 1, 2, 3], [0, 1, 0, 1], [0, 0, 1, 2], [0, 1, 2, 0], [0, 1, 0, 1],
                             [0, 1, 2, 3]])]  # fmt: skip
BATCH = {"x": torch.arange(ROWS)}


def trace(*held, takes=None, batch=None, dead=()):
    """held: module, number of the call, part, what it gives. dead: those without a gradient."""
    calls = tuple(Call(module=m, number=n, part=p, operation=0, operation_back=0, recomputed=False)
                  for m, n, p, _ in held)  # fmt: skip
    gradients = tuple(None if m in dead else torch.ones_like(t) for m, _, _, t in held)
    return Trace(calls=calls, outputs=tuple(h[3] for h in held), gradients=gradients, sources={},
                 takes=takes or {}, batch=batch)  # fmt: skip


def look(single, *ranks):
    traces = Traces(tier="structure", step=0, ranks=dict(enumerate(ranks)), single=single)
    return look_at(traces, "float64", ())


def of_flow(rows, counts, *, hidden=None, dead=()):
    rows = torch.tensor(rows)
    mine = HIDDEN[rows] if hidden is None else hidden
    return trace(("flow", 0, 0, mine), ("flow", 0, 1, counts), dead=dead)


FLOW = trace(("flow", 0, 0, HIDDEN), ("flow", 0, 1, COUNTS), batch=BATCH)


def odd(found, module):
    return {(s.rank, s.call.part): s.wrong.tolist() for s in found.seen[module]
            if s.forward == "wrong" and s.told_by}  # fmt: skip


def test_a_number_of_another_row_is_told_by_the_vectors_beside_it():
    found = look(FLOW, of_flow([0, 1, 2], COUNTS[[0, 2, 2]]), of_flow([3, 4, 5], COUNTS[3:]))
    assert odd(found, "flow") == {(0, 1): [1]}
    assert found.forward("flow") == "wrong"
    wrong = first_wrong_forward(found)
    assert no_slice(found, wrong) == (
        "all vectors of the second of the 2 outputs of flow are the single process's, and some are "
        "not those of the rows and places where they stand, which its first output tells: vectors "
        "1 of 3 on rank 0 in call 0 (3 x 1)"
    )
    others = replace(wrong, seen=(*wrong.seen, replace(wrong.seen[0], told_by=None)))
    assert "is no slice of the single process's" in no_slice(found, others)


def test_a_number_that_several_rows_have_may_be_any_of_theirs():
    found = look(FLOW, of_flow([1, 2], COUNTS[[3, 2]]), of_flow([3, 0], COUNTS[[1, 0]]))
    assert odd(found, "flow") == {}


def test_rows_that_are_not_told_tell_nothing():
    same = HIDDEN.clone()
    same[1:] = same[0]
    single = trace(("flow", 0, 0, same), ("flow", 0, 1, COUNTS), batch=BATCH)
    found = look(single, of_flow([0, 1, 2], COUNTS[[0, 2, 2]], hidden=same[:3]))
    assert odd(found, "flow") == {}


def test_one_number_of_a_row_tells_nothing_of_others():
    single = trace(("flow", 0, 0, HIDDEN[:, :1]), ("flow", 0, 1, COUNTS), batch=BATCH)
    found = look(single, of_flow([0, 1, 2], COUNTS[[0, 2, 2]], hidden=HIDDEN[:3, :1]))
    assert odd(found, "flow") == {}


def test_where_most_are_another_row_s_the_order_may_be_meant():
    found = look(FLOW, of_flow([0, 1, 2], COUNTS[[2, 2, 0]]))
    assert odd(found, "flow") == {}


def test_what_does_not_count_in_the_loss_may_be_anything():
    found = look(FLOW, of_flow([0, 1, 2], COUNTS[[0, 2, 2]], dead=("flow",)))
    assert odd(found, "flow") == {}


def placed(rows, positions, *, numbers=(0, 0), takes=None, batch=None, sums=None, words=None):
    mine = WORDS[rows] if words is None else words
    total = mine + positions if sums is None else sums
    return trace(("words", numbers[0], 0, mine), ("places", numbers[1], 0, positions),
                 ("sum", 0, 0, total), takes=takes, batch=batch)  # fmt: skip


EVERY = list(range(ROWS))
SUMMED = placed(EVERY, PLACED, takes={"sum": ("words", "places"), "the loss": ("sum",)},
                batch=BATCH)  # fmt: skip


def test_positions_of_another_row_are_told_by_the_words_beside_them():
    other = PLACED[[0, 1, 2]].clone()
    other[1] = PLACED[2]
    found = look(SUMMED, placed([0, 1, 2], other), placed([3, 4, 5], PLACED[3:]))
    assert odd(found, "places") == {(0, 0): [5, 6, 7]}
    assert odd(found, "words") == {}
    wrong = first_wrong_forward(found)
    assert wrong.wrong == "places"
    assert "which what words gives tells: for one, vectors 5-7" in no_slice(found, wrong).replace(
        "tells: vectors", "tells: for one, vectors"
    )


def test_the_same_positions_elsewhere_in_the_row_are_not_those():
    other = PLACED[[0, 1, 2]].clone()
    other[0, 2:] = PLACED[0, [3, 2]]
    found = look(SUMMED, placed([0, 1, 2], other), placed([3, 4, 5], PLACED[3:]))
    assert odd(found, "places") == {(0, 0): [2, 3]}


def test_where_nothing_that_is_made_of_both_is_wrong_both_are_right():
    other = PLACED[[0, 1, 2]].clone()
    other[1] = PLACED[2]
    sums = (WORDS + PLACED)[:3]
    found = look(SUMMED, placed([0, 1, 2], other, sums=sums), placed([3, 4, 5], PLACED[3:]))
    assert odd(found, "places") == {}


def test_modules_that_are_called_apart_belong_to_no_call_together():
    other = PLACED[[0, 1, 2]].clone()
    other[1] = PLACED[2]
    found = look(SUMMED, placed([0, 1, 2], other, numbers=(0, 1)))
    assert odd(found, "places") == {}


def test_right_positions_in_rows_of_any_order_are_right():
    found = look(SUMMED, placed([2, 0, 1], PLACED[[2, 0, 1]]), placed([5, 3, 4], PLACED[[5, 3, 4]]))
    assert {s.forward for m in found.modules for s in found.seen[m]} == {"right"}


@pytest.mark.parametrize(("first", "said"), [(True, "out"), (False, "joint")])
def test_of_modules_called_again_the_one_that_a_rank_meets_first(first, said):
    """joint -> out -> joint -> out -> the loss: each twice, with the same weights."""
    one, two, three, four = (torch.randn(ROWS, 3, generator=G).double() for _ in range(4))
    takes = {"out": ("joint",), "joint": ("out",), "the loss": ("out",)}
    single = trace(("joint", 0, 0, one), ("out", 0, 0, two), ("joint", 1, 0, three),
                   ("out", 1, 0, four), takes=takes, batch=BATCH)  # fmt: skip
    other = two[:3] + 1 if first else two[:3]
    rank = trace(("joint", 0, 0, one[:3]), ("out", 0, 0, other), ("joint", 1, 0, three[:3] + 1),
                 ("out", 1, 0, four[:3] + 1))  # fmt: skip
    found = first_wrong_forward(look(single, rank))
    assert found.wrong == said


def test_what_is_not_made_of_the_other_comes_in_the_order_of_the_single_process():
    one, two = (torch.randn(ROWS, 3, generator=G).double() for _ in range(2))
    single = trace(("a", 0, 0, one), ("b", 0, 0, two), takes={"the loss": ("a", "b")}, batch=BATCH)
    rank = trace(("a", 0, 0, one[:2]), ("b", 0, 0, two[:2] + 1), ("a", 1, 0, one[2:4] + 1))
    assert first_wrong_forward(look(single, rank)).wrong == "a"


def test_what_is_wrong_before_any_right_call_of_the_first_comes_in_that_order_too():
    """As where a rank warms up."""
    one, two, three, four = (torch.randn(ROWS, 3, generator=G).double() for _ in range(4))
    takes = {"out": ("joint",), "joint": ("out",), "the loss": ("out",)}
    single = trace(("joint", 0, 0, one), ("out", 0, 0, two), ("joint", 1, 0, three),
                   ("out", 1, 0, four), takes=takes, batch=BATCH)  # fmt: skip
    rank = trace(("out", 0, 0, two[:3] + 1), ("joint", 0, 0, one[:3] + 1), ("out", 1, 0, four[:3]))
    assert first_wrong_forward(look(single, rank)).wrong == "joint"


def two_outputs(first, second):
    """A module with two outputs, and whether a gradient reaches each."""
    held = trace(("m", 0, 0, HIDDEN), ("m", 0, 1, HIDDEN))
    gradients = tuple(torch.ones(2) if live else torch.zeros(2) for live in (first, second))
    return replace(held, gradients=gradients)


def used(single, *ranks):
    traces = Traces(tier="structure", step=0, ranks=dict(enumerate(ranks)), single=single)
    found = first_wrong_forward(look(FLOW, of_flow([0], HIDDEN[:1, :1] + 7)))
    seen = tuple(replace(found.seen[0], rank=rank) for rank in traces.ranks)
    return outputs_used_otherwise(traces, FirstWrong(wrong="m", seen=seen))


def test_outputs_that_the_loss_of_the_ranks_alone_is_made_of():
    there, here = two_outputs(False, True), two_outputs(True, True)
    assert used(there, here, here) == [
        "of its 2 outputs the first gets a gradient on rank 0-1, and none in the single process: "
        "look at which output the loss is made of"
    ]
    assert used(here, there, there) == [
        "of its 2 outputs the first gets none on rank 0-1, and one in the single process"
    ]
    assert used(there, there, here) == []  # not on each
    assert used(here, here, there) == []
    one = replace(there, calls=there.calls[:1], outputs=there.outputs[:1],
                  gradients=there.gradients[1:])  # fmt: skip
    assert used(there, one) == []  # it has another number of outputs there


def test_words_that_stand_in_another_order_tell_nothing():
    """As positions that are dealt out in turn: which of them belong together is not known."""
    words, other = WORDS[[0, 1, 2]].clone(), PLACED[[0, 1, 2]].clone()
    words[0], other[1] = words[0].roll(1, 0), PLACED[2]
    found = look(SUMMED, placed([0, 1, 2], other, words=words), placed([3, 4, 5], PLACED[3:]))
    assert not next(s for s in found.seen["words"] if s.rank == 0).in_order
    assert odd(found, "places") == {}


def test_of_one_output_nothing_is_another():
    one = replace(two_outputs(True, True), calls=FLOW.calls[:1], outputs=(HIDDEN,),
                  gradients=(torch.ones(2),))  # fmt: skip
    held = replace(one, calls=(replace(one.calls[0], module="m"),))
    assert used(replace(held, gradients=(torch.zeros(2),)), held) == []


def test_vectors_of_fewer_rows_belong_to_other_rows_of_the_call():
    """As where a module gives pooled states of some rows alone beside all of them."""
    found = look(FLOW, of_flow([0, 1, 2], COUNTS[[2, 2]]), of_flow([3, 4, 5], COUNTS[3:]))
    assert odd(found, "flow") == {}


def test_modules_that_are_called_more_often_go_with_no_call_of_others():
    """Which of them goes with which is not told by their numbers."""
    words, other = WORDS[[0, 1, 2]], PLACED[[0, 1, 2]].clone()
    other[1] = PLACED[2]
    rank = trace(("words", 0, 0, words), ("places", 0, 0, other),
                 ("places", 1, 0, PLACED[[0, 1, 2]]), ("sum", 0, 0, words + other))  # fmt: skip
    assert odd(look(SUMMED, rank, placed([3, 4, 5], PLACED[3:])), "places") == {}
