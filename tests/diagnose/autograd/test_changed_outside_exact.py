"""A mask that acts on a parameter's numbers alone, beside one that a gradient passes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sumgrad.diagnose.explainers.left_over import not_zeroed
from sumgrad.diagnose.modules.autograd.changed_outside import changed_outside
from sumgrad.subjects.program.watched.computations import Computations

G = torch.Generator().manual_seed(5)
W = torch.randn(4, 3, generator=G, dtype=torch.float64)
MASK = torch.tensor([[1.0], [0.0], [1.0], [1.0]], dtype=torch.float64)
X = torch.randn(2, 3, generator=G, dtype=torch.float64)


def masked(x, w, mask):
    return (x @ (w * mask).T).square().sum()


def in_place(x, w, mask):
    w.data *= mask
    return (x @ w.T).square().sum()


def by_hand(x, w, mask):
    shown = w.detach() * mask
    return (x @ w.T).square().sum() + 0 * shown.sum()


def recorded(step, weight=W, mask=MASK):
    w = weight.clone().requires_grad_()
    with Computations(lambda: ((), 0)) as computations:
        step(X, w, mask).backward()
    return SimpleNamespace(computed=computations.computed(), params={"a.w": weight})


def found(*ranks, single=masked, names=("a.w",)):
    traces = SimpleNamespace(ranks=dict(enumerate(ranks)), single=recorded(single))
    return [(one.rank, one.name, one.mine.part, one.its.part)
            for one in changed_outside(traces, names)]  # fmt: skip


def test_a_mask_that_is_multiplied_into_the_data():
    told = ("a.w", "w.data *= mask", "w * mask")
    assert found(recorded(in_place), recorded(in_place)) == [(0, *told), (1, *told)]


def test_that_is_in_the_weights_already():
    """As where the model is built so: then the numbers stay the same."""
    single = recorded(masked, weight=W * MASK)
    traces = SimpleNamespace(ranks={0: recorded(in_place, weight=W * MASK)}, single=single)
    assert [one.rank for one in changed_outside(traces, ["a.w"])] == [0]


def with_a_graph(x, w, mask):
    v = w * 1.0
    v *= mask
    return (x @ v.T).square().sum()


def in_another_way(x, w, mask):
    w.data.masked_fill_(mask == 0, 0.0)
    return (x @ w.T).square().sum()


@pytest.mark.parametrize("rank", [
    recorded(masked), recorded(in_place, mask=MASK + 1), recorded(by_hand), recorded(with_a_graph),
    recorded(in_another_way),
])  # fmt: skip
def test_what_has_a_graph_gives_other_numbers_or_is_another_call_is_no_such_line(rank):
    assert found(rank) == []


def test_what_is_done_to_the_parameter_alone():
    def bounded(x, w, mask):
        return (x @ w.tanh().T).square().sum()

    def outside(x, w, mask):
        w.data.tanh_()
        return (x @ w.T).square().sum()

    assert found(recorded(outside), single=bounded) == [(0, "a.w", "w.data.tanh_()", "w.tanh()")]


def test_of_other_parameters_and_of_none_nothing_is_told():
    assert found(recorded(in_place), names=("b.w",)) == []
    assert found(recorded(in_place), single=in_place) == []


def test_the_words_stand_in_place_of_what_may_be(monkeypatch):
    traces = SimpleNamespace(ranks={0: recorded(in_place), 1: recorded(in_place)},
                             single=recorded(masked))  # fmt: skip
    (said,) = not_zeroed._changed_outside(SimpleNamespace(traces=traces), ["a.w"])
    assert "`w.data *= mask` changes the numbers of a.w outside of autograd on rank 0-1" in said
    assert "in it `w * mask`, which a gradient passes" in said
    assert not_zeroed._changed_outside(SimpleNamespace(traces=None), ["a.w"]) == []
