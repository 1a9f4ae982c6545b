"""Hooks on modules: names under wrappers, what is kept, what is a trial of a pipeline."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from sumgrad.record.trace import INTO, LOSS, read_trace, write_trace
from sumgrad.subjects.program.placed.seen_modules import source_of
from sumgrad.subjects.program.watched import watch
from sumgrad.subjects.program.watched.computations import Computations
from sumgrad.subjects.program.watched.watch import ModuleWatch
from torch import nn


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def seen(of: nn.Module, names=None, run=None):
    with ModuleWatch(of, names) as watching:
        (run or of)(torch.ones(5, 3)).sum().backward()
    return watching.trace()


def outputs(found):
    return [c for c in found.calls if not c.module.startswith(INTO)]


def test_outputs_and_the_gradients_that_reach_them():
    found = seen(model())
    assert [(c.module, c.number, c.recomputed) for c in outputs(found)] == [
        ("0", 0, False), ("1", 0, False), ("2", 0, False), ("", 0, False),
    ]  # fmt: skip
    shapes = {c.module: tuple(o.shape) for c, o in zip(found.calls, found.outputs, strict=True)}
    assert [shapes[name] for name in ("0", "1", "2", "")] == [(5, 4), (5, 4), (5, 2), (5, 2)]
    assert torch.equal(found.gradients[-1], torch.ones(5, 2))
    assert found.entered == ("", "0")
    assert not found.left_out


def test_names_are_those_of_build_under_wrappers_and_in_stages():
    inner = model()
    names = {id(m): n for n, m in inner.named_modules()}
    wrapped = nn.Module()
    wrapped.module = inner
    wrapped.forward = inner.forward
    assert [c.module for c in outputs(seen(wrapped, names))][:3] == ["0", "1", "2"]
    stage = nn.Sequential(inner[0], inner[2])  # a stage of a pipeline numbers its layers anew
    found = seen(stage, names, stage)
    assert [c.module for c in outputs(found)] == ["0", "2"]
    assert "" not in found.sources


def test_a_buffer_that_is_received_into_again_is_not_what_it_was():
    """A collective writes without a change that torch counts, as into numpy's view of it."""
    first = nn.Linear(3, 4)
    buffer = torch.zeros(5, 4)
    with ModuleWatch(first) as watching:
        for n in (1.0, 2.0):
            buffer.numpy()[...] = n
            first(torch.ones(5, 3)).backward(buffer)
    gradients = [g for g in watching.trace().gradients if g is not None]
    assert [float(g.max()) for g in gradients] == [1.0, 2.0]


def test_over_the_limit_a_module_is_left_out_by_name(monkeypatch):
    monkeypatch.setattr(watch, "MAX_BYTES", 5 * 4 * 4 + 5 * 3 * 4)
    found = seen(model())
    assert [c.module for c in outputs(found)] == ["0"]
    assert set(found.left_out) >= {"0", "1", "2"}


def test_what_a_pipeline_runs_to_learn_shapes_is_no_call(monkeypatch):
    name = "torch.distributed.pipelining"
    monkeypatch.setitem(sys.modules, name, sys.modules.get(name, ModuleType(name)))
    code = compile(
        "def _forward_metadata_inference(run):\n    return run()\n", "distributed/pipelining/x.py",
        "exec",
    )  # fmt: skip
    scope: dict = {}
    exec(code, scope)
    of = model()
    with ModuleWatch(of) as watching, Computations(lambda: ((), 0)) as computations:
        scope["_forward_metadata_inference"](lambda: of(torch.ones(5, 3)).exp())
        of(torch.ones(5, 3)).exp()
    assert [c.number for c in watching.trace().calls if c.module == ""] == [0]
    assert [c.function for c in computations.computed().computations].count("exp") == 1


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_is_computed_again(reentrant):
    from torch.utils.checkpoint import checkpoint

    of = model()

    def run(x):
        return of[2](checkpoint(of[:2], x.requires_grad_(), use_reentrant=reentrant))

    found = seen(of, run=run)
    calls = [(c.module, c.recomputed) for c in outputs(found)]
    assert calls[:4] == [("0", False), ("1", False), ("2", False), ("0", True)]
    # Without reentrance torch ends the second forward as soon as it has what it saved.
    assert calls[4:] == ([("1", True)] if reentrant else [])


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.left, self.right = (nn.Linear(3, 3) for _ in range(3))
        self.pair = nn.Sequential(nn.Linear(3, 3), nn.Tanh())

    def forward(self, x):
        x = self.first(x)
        return x + self.pair(self.left(x) * 2) + self.right(x).detach(), x


def test_which_outputs_others_are_made_from():
    of = Branches()
    with ModuleWatch(of, with_paths=True) as watching:
        y, x = of(torch.ones(5, 3))
        loss = y.sum() + x.square().sum()
        watching.at_loss(loss)
        loss.backward()
    takes = {name: set(others) for name, others in watching.trace().takes.items()}
    assert takes["first"] == set()
    assert takes["left"] == takes["right"] == {"first"}
    assert takes["pair.0"] == {"left"}
    assert takes["pair"] == takes["pair.1"] == {"pair.0"}
    assert takes[""] == {"first", "pair", "pair.1"}
    assert takes[LOSS] == {"", "first"}
    assert not seen(model()).takes


def test_a_gradient_that_passes_twice_is_one():
    """A zero-bubble schedule goes through the graph for the inputs, and again for the weights."""
    of, x = model(), torch.ones(5, 3, requires_grad=True)
    with ModuleWatch(of) as watching:
        loss = of(x).sum()
        torch.autograd.grad(loss, x, retain_graph=True)
        torch.autograd.grad(loss, list(of.parameters()), retain_graph=True)
    once = seen(model()).gradients[-1]
    assert torch.equal(watching.trace().gradients[-1], once)
    with ModuleWatch(of) as watching:
        y = of(x)
        y.sum().backward(retain_graph=True)
        (2 * y).sum().backward()
    assert torch.equal(watching.trace().gradients[-1], 3 * once)  # two losses add up


class Own(nn.Sequential):
    """A user's class with torch's own forward."""


class Mine(nn.Linear):
    def forward(self, x):
        return super().forward(x)


def test_a_line_is_the_users_and_never_torchs():
    assert source_of(nn.Linear(2, 2)) == "Linear"
    assert source_of(Own()) == "Own"
    words, _, line = source_of(Mine(2, 2)).partition(" at ")
    assert (words, line.rpartition(":")[0]) == ("Mine", __file__)


class Doubled(nn.Module):
    """What goes into `last` is no module's output."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.last(2 * self.first(x))


def test_what_goes_into_modules_and_its_gradient(tmp_path):
    of = Doubled()
    found = seen(of)
    held = {c.module: i for i, c in enumerate(found.calls)}
    first, into, last = held["first"], held[f"{INTO}last"], held["last"]
    assert torch.equal(found.outputs[into], 2 * found.outputs[first])
    assert torch.equal(found.gradients[first], 2 * found.gradients[into])
    assert torch.equal(found.gradients[into], found.gradients[last] @ of.last.weight)
    assert found.gradients[held[f"{INTO}first"]] is None  # data
    assert set(found.sources) == {"first", "last", ""}
    write_trace(tmp_path / "t", found)
    again = read_trace(tmp_path / "t")
    assert again.calls == found.calls
    for kind in ("outputs", "gradients"):
        for mine, read in zip(getattr(found, kind), getattr(again, kind), strict=True):
            assert (mine is None) == (read is None)
            assert mine is None or torch.equal(mine, read)


def test_an_output_that_goes_into_another_module_is_kept_once():
    found = seen(model())
    held = {c.module: i for i, c in enumerate(found.calls)}
    for module, next_one in (("0", "1"), ("1", "2")):
        into = held[f"{INTO}{next_one}"]
        assert found.outputs[into] is found.outputs[held[module]]
        assert found.gradients[into] is found.gradients[held[module]]
    assert found.calls[held[f"{INTO}2"]].operation_back is not None


def test_what_was_changed_in_place_is_no_output_any_more():
    class InPlace(Doubled):
        def forward(self, x):
            return self.last(self.first(x).mul_(2))

    found = seen(InPlace())
    held = {c.module: i for i, c in enumerate(found.calls)}
    assert torch.equal(found.outputs[held[f"{INTO}last"]], 2 * found.outputs[held["first"]])


def test_data_of_several_modules_is_kept_once():
    found = seen(model())
    assert found.data[0] is found.data[1]


def test_what_goes_in_has_room_of_its_own(monkeypatch):
    monkeypatch.setattr(watch, "MAX_BYTES_INTO", 0)
    found = seen(Doubled())
    assert [c.module for c in outputs(found)] == ["first", "last", ""]
    assert f"{INTO}last" in found.left_out
    assert "last" not in found.left_out


class HandsOn(nn.Module):
    """A residual, and the first values that every block hands on."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x, first):
        return self.inner(x), first


def test_what_is_only_handed_on_is_no_output():
    block, first = HandsOn(), torch.ones(5, 3, requires_grad=True)
    found = seen(block, run=lambda x: sum(block(x, first * 2)))
    assert [(c.module, c.part) for c in outputs(found)] == [("inner", 0), ("", 0)]


def test_what_one_tensor_hands_on_is_its_output():
    found = seen(nn.Sequential(nn.Linear(3, 4), nn.Identity()))
    assert [c.module for c in outputs(found)] == ["0", "1", ""]


class Score(nn.Module):
    def __init__(self):
        super().__init__()
        self.score = nn.Linear(3, 1)

    def forward(self, x):
        return self.score(x).squeeze(-1)


def test_one_number_for_each_row_is_a_vector_for_each_row():
    found = seen(Score())
    assert [tuple(o.shape) for o in found.outputs[-1:]] == [(5, 1)]
    assert tuple(found.gradients[-1].shape) == (5, 1)


def test_a_number_for_each_row_is_written_though_it_is_data_elsewhere(tmp_path):
    """safetensors writes no two tensors that share memory."""
    score, weigh = Score(), nn.Identity()
    scores = torch.ones(5)
    found = seen(nn.ModuleList([score, weigh]), run=lambda x: score(x) * weigh(weigh(scores)))
    write_trace(tmp_path / "trace", found)
    read = read_trace(tmp_path / "trace")
    assert {tuple(o.shape) for o in read.outputs} == {(5, 1), (5, 3)}
    assert [tuple(d.shape) for d in read.data if d.dim() == 1] == [(5,), (5,)]


class Moving(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.register_buffer("bias", torch.zeros(3))

    def forward(self, x):
        out = self.norm(self.inner(x)) + self.bias
        self.bias += 1
        return out


def test_a_buffer_that_moves_between_calls_is_kept_in_each_state():
    module = Moving()
    found = seen(module, run=lambda x: module(x) + module(x))
    assert [t.tolist() for t in found.used["forward/bias"]] == [[0, 0, 0], [1, 1, 1]]
    assert len(found.used["forward/inner.weight"]) == 1
    assert "forward/norm.running_mean" not in found.used  # written, and not computed with


def test_statistics_that_are_computed_with_are_kept():
    module = Moving().eval()
    assert "forward/norm.running_mean" in seen(module).used


class NoGradient(torch.autograd.Function):
    """Its backward gives the first of its arguments nothing."""

    @staticmethod
    def forward(ctx, first, second):
        return first + second

    @staticmethod
    def backward(ctx, grad):
        return None, grad


def test_a_backward_that_gives_nothing_is_no_error():
    """Then the hook of a leaf is called with None."""
    layer = nn.Linear(3, 4).double()
    x = torch.ones(5, 3, dtype=torch.float64)
    with ModuleWatch(layer) as watching, Computations(watching.now) as computations:
        leaf = torch.zeros(5, 4, dtype=torch.float64, requires_grad=True)
        NoGradient.apply(leaf * 1, NoGradient.apply(layer(x), leaf)).sum().backward()
    (call,) = [c for c in watching.trace().calls if c.module == ""]
    assert call.operation_back is None
    assert len(computations.computed().arrivals) == 1
