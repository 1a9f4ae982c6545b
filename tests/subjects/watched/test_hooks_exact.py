"""What a user's hooks compute while a backward runs."""

from __future__ import annotations

import contextlib
import json

import torch
from sumgrad.record.computed import computed_as_json, computed_as_tensors, computed_from
from sumgrad.subjects.program.watched.computations import Computations
from torch import nn
from torch.autograd import Function
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

Y = X + 1


class Doubled(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad.mul(2.0)


def computed_of(hook, *, at=torch.nn.Parameter.register_hook, run=lambda x, w: (x @ w).tanh()):
    weight = nn.Parameter(torch.eye(3, dtype=torch.float64) + 0.1)
    at(weight, hook)
    computations = Computations(lambda: ((), 0))
    with computations:
        for x in (X, Y):
            (run(x, weight).sum() * 1.0).backward()
    return computations.computed()


def names(hooks):
    return [(at, one.function) for at, one in hooks]


def test_lines_of_hooks_are_kept_by_themselves_and_in_order():
    def halve(grad):
        return (grad / 2).mul_(3.0)

    computed = computed_of(halve)
    every = len(computed.computations)
    assert names(computed.hooks) == [(4, "div"), (4, "mul"), (8, "div"), (8, "mul")]
    assert every == 8
    assert all(one.line.startswith(__file__) for _, one in computed.hooks)
    assert "div" not in {one.function for one in computed.computations}
    ordered = [one.function for one in computed.in_order()]
    assert len(ordered) == every + 4
    assert ordered.index("div") == 4
    div = computed.hooks[0][1]
    assert torch.equal(computed.values[div.gives[0]], computed.values[div.takes[0]] / 2)
    said = json.loads(json.dumps(computed_as_json(computed)))
    assert computed_from(said, computed_as_tensors(computed)).hooks == computed.hooks


def test_a_hook_when_a_gradient_is_accumulated_is_one_too():
    def clip(param):
        param.grad.clamp_(max=0.5)

    computed = computed_of(clip, at=nn.Parameter.register_post_accumulate_grad_hook)
    assert [name for _, name in names(computed.hooks)] == ["clamp", "clamp"]


def test_the_backward_of_a_function_and_what_runs_again_are_no_hooks():
    def nothing(grad):
        return None

    assert not computed_of(nothing, run=lambda x, w: Doubled.apply(x @ w)).hooks

    def again(x, w):
        return checkpoint(lambda h: F.gelu(h @ w), x, use_reentrant=False)

    computed = computed_of(nothing, run=again)
    assert not computed.hooks
    assert computed.again


def test_a_line_of_the_forward_that_a_hook_runs_is_what_runs_again():
    def both(x, scale):
        return x * scale

    computed = computed_of(lambda grad: both(grad, 2.0), run=lambda x, w: both(x @ w, 3.0))
    assert not computed.hooks
    assert len(computed.again) == 2


def test_after_a_hook_that_raised_the_forward_is_none():
    def fails(grad):
        with contextlib.suppress(RuntimeError):
            grad.view(7)
        return grad * 1.0

    def only_fails(grad):
        with contextlib.suppress(RuntimeError):
            grad.view(7)

    for hook in (fails, only_fails):
        computed = computed_of(hook)
        assert len(computed.computations) == 8
        assert {c.function for c in computed.computations} == {"matmul", "tanh", "sum", "mul"}
