"""What the backward runs again, beside the forward."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from sumgrad.diagnose.modules.in_code.run_again import run_otherwise
from sumgrad.record.computed import (
    Change,
    Computation,
    Computed,
    computed_as_json,
    computed_as_tensors,
    computed_from,
)
from sumgrad.subjects.program.watched import kept_values
from sumgrad.subjects.program.watched.computations import Computations
from sumgrad.subjects.program.watched.watch import ModuleWatch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

WEIGHT = torch.randn(3, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def computed_of(function, **kwargs):
    weight = nn.Parameter(WEIGHT.clone())
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with Computations(lambda: ((), 0)) as computations:
        kept = x.clone().requires_grad_() * 1.0
        # In a list: of a tensor that it is handed itself, a checkpoint asks the version.
        run = function(weight)
        checkpoint(
            lambda held: run(held[0]), [kept], use_reentrant=False, **kwargs
        ).sum().backward()
    return computations.computed()


def right(weight):
    return lambda x: (x @ weight).sin() * 2.0


def adds_in_place(weight):
    def block(x):
        x += weight[0]
        return x + (x @ weight).sin()

    return block


def adds_to_a_view(weight):
    def block(x):
        x[0] += 1.0
        return (x @ weight).sin()

    return block


def in_place_of_its_own(weight):
    def block(x):
        h = x @ weight
        h += 1.0
        return h.sin() * h

    return block


def drops(weight):
    return lambda x: (F.dropout(x, 0.5) @ weight).sin()


class Turns:
    """Another slope when it runs again."""

    def __init__(self):
        self.slope = 0.5

    def __call__(self, weight):
        def block(x):
            slope, self.slope = self.slope, 0.25
            return F.leaky_relu(x @ weight, slope).sin()

        return block


def lines(found):
    return [(one.again.code, one.argument, [c.code for c in one.changes]) for one in found]


@pytest.mark.parametrize(
    ("function", "options", "expected"),
    [
        (right, {}, []),
        (in_place_of_its_own, {}, []),
        (drops, {}, []),
        (drops, {"preserve_rng_state": False},
         [("return lambda x: (F.dropout(x, 0.5) @ weight).sin()", -1, [])]),
        (adds_in_place, {}, [("x += weight[0]", 0, ["x += weight[0]"])]),
        (adds_to_a_view, {}, [("x[0] += 1.0", 0, ["x[0] += 1.0"])] * 2),  # what is read, and set
    ],
)  # fmt: skip
def test_lines_that_are_run_again(function, options, expected):
    torch.manual_seed(0)
    assert lines(run_otherwise(computed_of(function, **options))) == expected


@pytest.mark.parametrize(("second", "num"), [(2, 1), (3, 0)])
def test_of_two_other_arguments_neither_is_told(second, num):
    """The first was changed in place; where the second is another, too, that explains nothing."""
    call = Computation(function="mul", line="a:1", code="", takes=(0, 2), gives=(),
                       made_at=(("", ""),) * 2, site="1")  # fmt: skip
    values = tuple(torch.full((2,), float(i)) for i in range(4))
    computed = Computed(
        computations=(call,), values=values, again=(replace(call, takes=(1, second)),),
        values_again=values, changes=(Change(before=0, after=1, line="a:2", code="x += 1"),),
    )  # fmt: skip
    assert len(list(run_otherwise(computed))) == num


def test_what_only_has_what_was_there_tells_nothing():
    call = Computation(function="empty_like", line="a:1", code="", takes=(0,), gives=(1,),
                       made_at=(("", ""),), site="1")  # fmt: skip
    values = (torch.zeros(2), torch.ones(2), torch.zeros(2))
    for function, num in (("empty_like", 0), ("rand_like", 1)):
        c = replace(call, function=function)
        computed = Computed(
            computations=(c,), values=values[:2],
            again=(replace(c, gives=(1,)),), values_again=(values[0], values[2]),
        )  # fmt: skip
        assert len(list(run_otherwise(computed))) == num


def test_of_other_options_it_may_give_something_else():
    assert lines(run_otherwise(computed_of(Turns()))) == []


def test_arguments_that_are_too_large_are_not_said_to_be_the_same(monkeypatch):
    monkeypatch.setattr(kept_values, "MOST_ELEMENTS", 11)
    torch.manual_seed(0)
    computed = computed_of(drops, preserve_rng_state=False)
    assert all(isinstance(c.takes[0], str) for c in computed.again if c.function == "dropout")
    assert lines(run_otherwise(computed)) == []


def test_a_kept_product_that_is_changed_in_place():
    def keeps(ctx, op, *args, **kwargs):
        kept = op == torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    computed = computed_of(
        in_place_of_its_own,
        context_fn=lambda: create_selective_checkpoint_contexts(
            keeps, allow_cache_entry_mutation=True
        ),
    )
    first = next(run_otherwise(computed))
    assert lines([first]) == [("h = x @ weight", -1, ["h += 1.0"])]
    again = computed_from(computed_as_json(computed), computed_as_tensors(computed))
    assert lines(run_otherwise(again)) == lines(run_otherwise(computed))
    assert first.at == 0  # h = x @ weight is the first that runs again


def test_what_a_module_takes_the_second_time():
    """A checkpoint by hand that keeps its input by reference, and a residual added into it."""

    class Rerun(torch.autograd.Function):
        @staticmethod
        def forward(ctx, layer, x, *weights):
            ctx.layer, ctx.x, ctx.weights = layer, x.detach(), weights
            with torch.no_grad():
                return layer(x)

        @staticmethod
        def backward(ctx, grad):
            with torch.enable_grad():
                x = ctx.x.detach().requires_grad_()
                out = ctx.layer(x)
            return None, *torch.autograd.grad(out, (x, *ctx.weights), grad)

    def step(into):
        layer = nn.Linear(3, 3).double()
        with ModuleWatch(layer) as watching, Computations(watching.now) as computations:
            watching.of_module = computations.of_module
            x = torch.ones(2, 3, dtype=torch.float64).requires_grad_() * 1.5
            y = Rerun.apply(layer, x, *layer.parameters())
            x = x.add_(y) if into else x + y
            x.square().sum().backward()
        return list(run_otherwise(computations.computed()))

    assert step(False) == []
    (found,) = step(True)
    assert (found.again.function, found.argument) == ("module ", 0)
    assert [c.code for c in found.changes] == ["x = x.add_(y) if into else x + y"]


def test_a_forward_that_stops_early_leaves_no_module_behind():
    """A checkpoint ends its second run as soon as it has all that the backward needs."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    with ModuleWatch(model) as watching, Computations(watching.now) as computations:
        watching.of_module = computations.of_module
        for _ in range(2):
            x = model[0](torch.ones(2, 3))
            checkpoint(model[1], x, use_reentrant=False).sum().backward()
        assert watching.now()[0] == ()
    inside = {c.inside for c in computations.computed().computations if c.function == "module 0"}
    assert inside == {()}
