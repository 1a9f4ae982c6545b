"""An output that its module goes on with: its gradient is of more than what comes after."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from sumgrad.diagnose.modules.where.look import look_at
from sumgrad.record.trace import Traces
from sumgrad.subjects.program.watched.computations import Computations
from sumgrad.subjects.program.watched.watch import ModuleWatch
from torch import nn
from torch.autograd import Function

X = torch.randn(5, 4, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


class AddSin(Function):
    """x + y, and its sine; `scale` of what reaches the sum goes on."""

    @staticmethod
    def forward(ctx, x, y, scale):
        total = x + y
        ctx.save_for_backward(total)
        ctx.scale = scale
        return total.sin(), total

    @staticmethod
    def backward(ctx, grad, grad_total):
        (total,) = ctx.saved_tensors
        out = grad * total.cos() + ctx.scale * grad_total
        return out, out, None


class Block(nn.Module):
    def __init__(self, fused, scale):
        super().__init__()
        self.fused, self.scale = fused, scale

    def forward(self, x, y):
        if self.fused:
            return AddSin.apply(x, y, self.scale)
        total = x + y
        return total.sin(), total


def traced(fused, scale=1.0, after=1.0):
    model = Block(fused, scale)
    with ModuleWatch(model) as watching, Computations(watching.now) as computations:
        x, y = X.clone().requires_grad_(), X.cos().requires_grad_()
        one, other = model(x, y)
        (one.square().sum() + (after * other**3).sum()).backward()
    return replace(watching.trace({"x": X}), computed=computations.computed())


def states(mine, single):
    traces = Traces(tier="structure", step=0, ranks={0: mine}, single=single)
    return {s.call.part: s.backward for s in look_at(traces, "float64", ()).seen[""]}


@pytest.mark.parametrize(("mine", "single"), [(True, False), (False, True)])
def test_it_is_not_told_where_only_one_of_both_goes_on_with_it(mine, single):
    assert states(traced(mine), traced(single)) == {0: "right", 1: "untold"}


@pytest.mark.parametrize("fused", [False, True])
def test_it_is_told_where_both_do_or_none_does(fused):
    assert states(traced(fused), traced(fused)) == {0: "right", 1: "right"}
    wrong = traced(fused, after=torch.linspace(1, 2, 20).reshape(5, 4).double())
    assert states(wrong, traced(fused))[1] == "wrong"
