"""What an accused line takes in another order, or broadcast, beside the single process's."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from sumgrad.diagnose.explainers.by_modules.forwards import wrong_outputs
from sumgrad.diagnose.explainers.by_modules.in_code.arguments_there import arguments_there
from sumgrad.diagnose.modules.in_code.arguments_there import (
    broadcast_here,
    in_another_order,
    parameters_taken,
)
from sumgrad.diagnose.modules.in_code.lines import AtLine
from sumgrad.diagnose.modules.in_code.made_by import line_that_computed
from sumgrad.diagnose.modules.values.seen import Seen
from sumgrad.diagnose.modules.where.first_wrong import FirstWrong
from sumgrad.record.computed import Computation, Computed
from sumgrad.record.line import NO_LINE
from sumgrad.record.trace import INTO, Call
from sumgrad.subjects.program.watched.computations import Computations
from torch.nn import functional as F

G = torch.Generator().manual_seed(3)
Q, K, V = (torch.randn(2, 2, 8, 4, generator=G, dtype=torch.float64) for _ in range(3))


def attend(q, k, v, order):
    k, v = torch.cat([k[..., i : i + 4, :] for i in order], -2), v.clone()
    return F.scaled_dot_product_attention(q, k, v)


def biased(scores, slopes, distance):
    bias = -slopes[:, None, None] * distance
    return scores + bias


def recorded(function, *given):
    with Computations(lambda: ((), 0)) as computations:
        function(*given)
    return computations.computed()


def last(computed):
    return computed.computations[-1]


def orders(mine, whole):
    return list(in_another_order(mine, whole, last(mine), 1e-8))


def test_an_argument_with_vectors_in_another_order_is_told():
    whole = recorded(attend, Q, K, V, (0, 4))
    (one,) = orders(recorded(attend, Q[:1], K[:1], V[:1], (4, 0)), whole)
    assert (one.at, one.dim, one.in_words()) == (1, 2, "4-7, 0-3")
    assert orders(recorded(attend, Q[:1, :, 2:5], K[:1], V[:1], (0, 4)), whole) == []


def test_an_argument_of_which_something_is_not_there_has_no_order():
    whole, odd = recorded(attend, Q, K, V, (0, 4)), K.clone()
    odd[0, 0, 3] += 1
    assert orders(recorded(attend, Q[:1], odd[:1], V[:1], (4, 0)), whole) == []


def test_vectors_of_one_place_that_stand_at_several_have_no_order():
    whole, odd = recorded(attend, Q, K, V, (0, 4)), K.clone()
    odd[:, 1] = odd[:, 1].flip(1)  # of one head in another order than of the other
    assert orders(recorded(attend, Q, odd, V, (0, 4)), whole) == []


SCORES, DISTANCE = (torch.randn(s, generator=G).double() for s in ((2, 3, 5, 5), (5, 5)))
SLOPES = torch.tensor([0.5, 0.25, 0.125]).double()


def casts(rank, single=(SCORES, SLOPES, DISTANCE)):
    mine, whole = recorded(biased, *rank), recorded(biased, *single)
    return list(broadcast_here(mine, whole, last(mine)))


def test_what_is_broadcast_on_the_rank_alone_is_told_with_where_it_begins():
    (one,) = casts((SCORES, SLOPES[:1], DISTANCE))
    assert (one.at, one.dim, one.size, one.now, one.was) == (1, 1, 3, (1,), (3,))
    assert one.line[1] == "bias = -slopes[:, None, None] * distance"


def test_what_has_one_place_in_all_is_not_broadcast():
    assert casts((SCORES[:, :1], SLOPES[:1], DISTANCE)) == []  # the rank has one head
    assert casts((SCORES, SLOPES, DISTANCE)) == []
    one = (SCORES, SLOPES[:1], DISTANCE)
    assert casts(one, one) == []


def test_both_in_words():
    whole = recorded(attend, Q, K, V, (0, 4))
    mine = recorded(attend, Q, K, V, (4, 0))
    spec = SimpleNamespace(tiers={"t": "float64"})
    case = SimpleNamespace(
        tier="t",
        record=SimpleNamespace(spec=spec),
        traces=SimpleNamespace(
            ranks={2: SimpleNamespace(computed=mine)},
            single=SimpleNamespace(computed=whole, params={}),
        ),
    )
    line = AtLine(rank=2, mine=last(mine), place=0)
    (said,) = arguments_there(case, [line])
    assert said.startswith("on rank 2 its second argument, made at ")
    assert said.endswith(
        "has what that of the single process has at places 4-7, 0-3 of dimension 2, in this order: "
        "what goes with it, as a mask, must be ordered so, too"
    )
    assert "`k, v = torch.cat([k[..., i : i + 4, :] for i in order], -2), v.clone()`" in said
    assert arguments_there(case, []) == []
    assert arguments_there(case, [AtLine(rank=2, mine=last(mine), place=0, back=True)]) == []


def call_of(module, number=0, part=0):
    return Call(module=module, number=number, part=part, operation=0, operation_back=None,
                recomputed=False)  # fmt: skip


@pytest.mark.parametrize(("mine", "source", "into", "told"), [
    ((3, 6, 6), "GRU", "right", True),
    ((9, 2, 6), "GRU", "right", False),  # rows are cut
    ((3, 2, 6), "GRU", "right", False),
    ((9, 6, 6), "GRU", "right", False),
    ((3, 6, 6), "Own at model.py:3", "right", False),  # may gather the rest itself
    ((3, 6, 6), "GRU", "wrong", False),
])  # fmt: skip
def test_a_module_that_is_handed_all_rows_and_a_part_of_the_rest(
    monkeypatch, mine, source, into, told
):
    single = SimpleNamespace(
        calls=(call_of(f"{INTO}gru"),), outputs=(torch.zeros(9, 6, 6),), batch={"x": range(6)}
    )
    monkeypatch.setattr(
        wrong_outputs, "traces_looked_at", lambda case: SimpleNamespace(single=single)
    )
    monkeypatch.setattr(wrong_outputs, "what_goes_into", lambda case, found: into)
    seen = Seen(rank=1, call=call_of(f"{INTO}gru", 2), shape=mine, forward="right")
    monkeypatch.setattr(wrong_outputs, "into_the_calls", lambda case, found: [seen])
    look = SimpleNamespace(sources={"gru": source})
    said = wrong_outputs.cut_in_words(None, look, FirstWrong(wrong="gru", seen=()))
    start = "on rank 1 in call 2 it is handed 3 of the 9 places of dimension 0, and all 6 of"
    assert [text.startswith(start) for text in said] == ([True] if told else [])


def twice(function, *calls):
    """The same call in the code, run with each of these."""
    for given in calls:
        function(*given)


def test_what_is_so_in_some_run_of_the_single_process_is_not_told():
    whole = recorded(twice, attend, (Q, K, V, (0, 4)), (Q, K, V, (4, 0)))
    assert orders(recorded(attend, Q[:1], K[:1], V[:1], (4, 0)), whole) == []
    single = recorded(twice, biased, (SCORES, SLOPES, DISTANCE), (SCORES, SLOPES[:1], DISTANCE))
    mine = recorded(biased, SCORES, SLOPES[:1], DISTANCE)
    assert list(broadcast_here(mine, single, last(mine))) == []


def test_the_line_near_by_is_not_the_one_that_computed_it():
    mine = recorded(biased, SCORES, SLOPES, DISTANCE)
    line = line_that_computed(mine, last(mine).takes[1])
    assert line[1] == "bias = -slopes[:, None, None] * distance"
    assert line_that_computed(mine, last(mine).takes[1], {line[0]}) == NO_LINE


def of_ones(x):
    sizes = torch.ones(4, 1).double()
    sizes = sizes[::2]
    return x * sizes


def of_one_less(x, y):
    less = x.cumsum(0) - y
    return x * (1 - less[0])


def test_before_the_line_near_by_is_the_one_that_computed_what_it_takes_alone():
    mine = recorded(of_one_less, X2, Y2)
    near = {last(mine).line}
    assert line_that_computed(mine, last(mine).takes[1], near)[1] == "less = x.cumsum(0) - y"


def test_what_is_filled_with_one_number_was_made_where_it_was_filled():
    mine = recorded(of_ones, X2)
    made = line_that_computed(mine, last(mine).takes[1])
    assert made[1] == "sizes = torch.ones(4, 1).double()"
    assert line_that_computed(mine, last(mine).takes[1], {made[0]}) == NO_LINE


def test_where_a_library_filled_it_is_no_line_of_the_steps_own():
    cut = Computation(function="getitem", line="/x/a.py:4", code="y = x[1:]", takes=(0, "1:"),
                      gives=(1,), made_at=(NO_LINE, NO_LINE))  # fmt: skip
    for line, told in ((f"{torch.__file__}:9", NO_LINE), ("/x/a.py:3", ("/x/a.py:3", "ones(2)"))):
        own = replace(cut, made_at=((line, "ones(2)"), NO_LINE))
        computed = Computed(computations=(own,), values=(X2, X2[1:]))
        assert line_that_computed(computed, 1) == told


def of_received(x):
    came = torch.empty(4, 1, dtype=torch.float64)
    with torch._C.DisableTorchFunction():  # as a message, which no torch function brings
        came.fill_(0.5)
    came = came[::2]
    return x * came


def test_what_is_made_empty_was_filled_by_something_else():
    mine = recorded(of_received, X2)
    assert line_that_computed(mine, last(mine).takes[1]) == NO_LINE


X2, Y2 = (torch.randn(2, 3, generator=G).double() for _ in range(2))


class AsItIs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


def through(slopes, distance):
    bias = -slopes[:, None, None] * distance
    bias = AsItIs.apply(bias)[..., :2]
    return bias.sum()


def test_what_a_function_hands_on_as_it_is_was_computed_before_it():
    mine = recorded(through, SLOPES, DISTANCE)
    line = line_that_computed(mine, last(mine).takes[0])
    assert line[1] == "bias = -slopes[:, None, None] * distance"


WEIGHTS = {f"layers.{i}.weight": torch.randn(4, 4, generator=G).double() for i in range(3)}


def layers(*names):
    h = torch.ones(2, 4).double()
    for name in names:
        h = torch.tanh(h @ WEIGHTS[name].clone())
    return h


def taken(names, there, params=None):
    mine, whole = recorded(layers, *names), recorded(layers, *there)
    c = [c for c in mine.computations if c.function == "matmul"][-1]
    found = parameters_taken(mine, whole, c, WEIGHTS if params is None else params)
    return [(one.at, one.name, one.there) for one in found]


def test_the_parameter_that_a_line_takes_beside_those_of_the_single_process():
    every = tuple(WEIGHTS)
    assert taken(every[:2], every) == [(1, every[1], every)]
    assert taken(every[:1], every[1:]) == [(1, every[0], every[1:])]
    assert taken(every[:1], every[1:2]) == []  # one alone, as of a layer of its own
    assert taken(every[:1], every, {**WEIGHTS, "twin": WEIGHTS[every[0]]}) == []
    assert taken(every[:1], every, {every[0]: WEIGHTS[every[0]]}) == []
