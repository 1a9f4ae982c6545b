"""Weights that a module computes with beside the single process's, from traces made by hand."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from sumgrad.diagnose.explainers.by_modules.forwards.other_weights import held_beside
from sumgrad.diagnose.modules.weights.weights_used import how, other_weights, uncalled_state
from sumgrad.record.ranks import sample_of
from sumgrad.record.trace import MAX_SAMPLE, MAX_USED, Trace, Traces, read_trace, write_trace
from sumgrad.subjects.program.watched.watch import ModuleWatch
from torch import nn

WEIGHT = torch.tensor([1.0, -2.0, 3.0, 0.5, 4.0, -1.5], dtype=torch.float64)
EMPTY = Trace(calls=(), outputs=(), gradients=(), sources={})


def trace_of(*states, when="forward", name="up.weight", numel=6):
    return replace(EMPTY, used={f"{when}/{name}": states}, used_numel={name: numel})


def found(rank_trace, single=None, *, module="up", when="forward"):
    single = trace_of(WEIGHT) if single is None else single
    ranks = {0: trace_of(WEIGHT), 1: rank_trace}
    return other_weights(Traces(tier="structure", step=0, ranks=ranks, single=single), module, when)


def changed(places, value):
    out = WEIGHT.clone()
    out[places] = value
    return out


def test_what_a_module_that_is_never_called_holds(monkeypatch):
    single = trace_of(WEIGHT, when="uncalled", name="drawn.a")
    ranks = {0: single, 1: trace_of(WEIGHT + 1, when="uncalled", name="drawn.a")}
    ranks[2] = trace_of(WEIGHT + 1, when="forward", name="drawn.a")  # that is called
    traces = Traces(tier="structure", step=0, ranks=ranks, single=single)
    assert [(one.rank, one.name) for one in uncalled_state(traces)] == [(1, "drawn.a")]
    last = replace(traces, ranks={0: single, 1: ranks[1]})
    assert [one.rank for one in uncalled_state(last)] == [1]
    spec = SimpleNamespace(tiers={"structure": "float64"}, script=None)
    case = SimpleNamespace(tier="structure", step=0, traces=traces,
                           record=SimpleNamespace(spec=spec))  # fmt: skip
    said = "drawn.a holds other values on rank 1 than in the single process"
    assert held_beside(case, (1,)) == [said]
    assert held_beside(case, (0, 1)) == []  # what is wrong on other ranks is not by it
    spec.tiers = {"structure": "float32"}
    assert held_beside(case, (1,)) == []


def test_where_as_many_states_are_kept_as_may_be_others_may_have_been_there():
    several = [changed(0, 10.0 + i) for i in range(MAX_USED)]
    other = trace_of(changed(1, 7.0))
    assert found(other, trace_of(*several[1:]))
    assert not found(other, trace_of(*several))


def test_states_of_modules_that_are_never_called_are_kept_at_the_end():
    class Holds(nn.Module):
        def __init__(self):
            super().__init__()
            self.drawn = nn.ParameterDict({"a": torch.ones(2)})

        def forward(self, x):
            return x * self.drawn["a"]

    watching = ModuleWatch(model := Holds())
    with watching:
        model(torch.ones(3, 2))
    assert set(watching.trace().used) == {"uncalled/drawn.a"}


@pytest.mark.parametrize(
    ("got", "words"),
    [
        (changed([2, 3], 0.0), "elements 2-3 of 6 are zeros"),
        (torch.zeros_like(WEIGHT), "all its elements are zeros"),
        (changed([4, 5], WEIGHT[4:] * 1.5), "elements 4-5 of 6 are 1.5 times what they should be"),
        (changed([1, 4], 9.0), "2 of 6 elements between 1 and 4 have other values"),
        (changed([0], float("nan")), "elements 0-0 of 6 are not finite"),
        ((WEIGHT * 1.1).bfloat16().double() / 1.1, "as if rounded to few digits"),
    ],
)
def test_what_a_gather_left(got, words):
    (one,) = found(trace_of(WEIGHT, got))
    assert (one.rank, one.name, one.when) == (1, "up.weight", "forward")
    assert words in how(one)


@pytest.mark.parametrize(
    ("rank_trace", "single"),
    [
        (trace_of(WEIGHT), None),
        (trace_of(WEIGHT + 1e-9), None),  # roundings
        (trace_of(WEIGHT[:3], numel=3), None),  # a slice of it
        (trace_of(WEIGHT + 1), trace_of(WEIGHT, WEIGHT + 1)),  # the single process has both
        (trace_of(WEIGHT + 1), trace_of(WEIGHT, name="down.weight")),  # and this it does not know
        (trace_of(WEIGHT + 1, when="backward"), None),  # another time
        (trace_of(WEIGHT + 1, name="down.weight"), None),  # another module
    ],
)
def test_what_is_no_other_weight(rank_trace, single):
    assert found(rank_trace, single) == []


def test_what_is_kept_of_a_weight_comes_back_from_its_file(tmp_path):
    one = trace_of(WEIGHT, WEIGHT + 1, when="backward")
    write_trace(tmp_path / "t", one)
    back = read_trace(tmp_path / "t")
    assert back.used_numel == {"up.weight": 6}
    (states,) = back.used.values()
    assert [t.tolist() for t in states] == [WEIGHT.tolist(), (WEIGHT + 1).tolist()]


def test_of_a_large_weight_some_places_are_kept_the_same_everywhere():
    few, many = sample_of(5, MAX_SAMPLE), sample_of(1 << 20, MAX_SAMPLE)
    assert few.tolist() == [0, 1, 2, 3, 4]
    assert len(many) == MAX_SAMPLE == len(set(many.tolist()))
    assert len({at % 1024 for at in many.tolist()}) > 500  # of a square one, not one column
    assert torch.equal(many, many.sort().values)
    assert int(many.max()) < 1 << 20
