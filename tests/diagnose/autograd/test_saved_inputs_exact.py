"""A weight's gradient that is the product with another input, from traces made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from sumgrad.diagnose.modules.autograd.saved_inputs import saved_otherwise
from sumgrad.record.trace import INTO, Call, Trace

G = torch.Generator().manual_seed(3)
CALLS, ROWS, IN, OUT = 3, 4, 5, 6
X = torch.randn(CALLS, ROWS, IN, generator=G, dtype=torch.float64)
GRADS = torch.randn(CALLS, ROWS, OUT, generator=G, dtype=torch.float64)
AT = torch.arange(0, OUT * IN, 2)


def call(module, number):
    return Call(module=module, number=number, part=0, operation=0, operation_back=0,
                recomputed=False, arrivals=1)  # fmt: skip


def trace_of(saved, *, name="up.weight", extra=0.0):
    """saved: of each backward, the number of the call whose input it multiplies with."""
    gave = [(GRADS[i].T @ X[j]).reshape(-1)[AT] + extra for i, j in enumerate(saved)]
    calls, outputs, gradients = [], [], []
    for i in range(CALLS):
        calls += [call(f"{INTO}up", i), call("up", i)]
        outputs += [X[i], torch.zeros(ROWS, OUT, dtype=torch.float64)]
        gradients += [None, GRADS[i]]
    return Trace(calls=tuple(calls), outputs=tuple(outputs), gradients=tuple(gradients), sources={},
                 own={name: torch.stack(gave)}, own_at={name: AT})  # fmt: skip


def found(trace, name="up.weight"):
    return [(one.call.number, one.saved.number) for one in saved_otherwise(1, trace, name)]


def test_another_calls_input():
    assert found(trace_of([2, 2, 2])) == [(0, 2), (1, 2)]
    assert found(trace_of([0, 2, 1])) == [(1, 2), (2, 1)]
    flat = trace_of([0, 2, 1])
    square = tuple(o.view(2, 2, -1) if o.shape[-1] == IN else o for o in flat.outputs)
    assert found(replace(flat, outputs=square)) == [(1, 2), (2, 1)]  # rows of rows
    one = saved_otherwise(1, trace_of([2, 1, 2]), "up.weight")[0]
    assert (one.rank, one.name, one.saved.module) == (1, "up.weight", f"{INTO}up")


@pytest.mark.parametrize(
    ("trace", "name"),
    [
        (trace_of([0, 1, 2]), "up.weight"),  # as it has to be
        (trace_of([2, 2, 2], extra=1e-3), "up.weight"),  # no product of the two
        (trace_of([2, 2, 2]), "up.bias"),
        (trace_of([2, 2, 2]), "down.weight"),
        (trace_of([2, 2, 2], name="up.bias"), "up.bias"),  # a bias has no input
    ],
)
def test_what_is_none(trace, name):
    assert found(trace, name) == []


def test_a_backward_of_nothing_is_no_product():
    trace = trace_of([0, 1, 2])
    trace.own["up.weight"].zero_()
    assert found(trace) == []
