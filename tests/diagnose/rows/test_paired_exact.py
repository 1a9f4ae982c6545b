"""Weights whose gradients are put together by hand, of inputs and gradients of other calls."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sumgrad.diagnose.explainers.by_modules.rows import paired
from sumgrad.diagnose.modules.inputs import paired_inputs
from sumgrad.diagnose.modules.inputs.paired_inputs import paired_otherwise
from sumgrad.record.trace import INTO, Call, Trace

ROWS, WIDTH, OUT = 2, 6, 5


def call(module, number):
    return Call(module=module, number=number, part=0, operation=0, operation_back=0,
                recomputed=False)  # fmt: skip


def trace(seed, num=3):
    """`num` calls of a linear layer `m`: what goes in, and the gradient of what comes out."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num, ROWS, WIDTH, generator=generator, dtype=torch.float64)
    g = torch.randn(num, ROWS, OUT, generator=generator, dtype=torch.float64)
    calls, outputs, gradients = [], [], []
    for number in range(num):
        calls += [call(f"{INTO}m", number), call("m", number)]
        outputs += [x[number], torch.zeros(ROWS, OUT, dtype=torch.float64)]
        gradients += [None, g[number]]
    held = Trace(calls=tuple(calls), outputs=tuple(outputs), gradients=tuple(gradients), sources={})
    return held, x, g


def made_of(x, g, pairs):
    return sum(g[i].T @ x[j] for i, j in pairs)


def told(pairs):
    return [(p.rank, p.call, p.beside) for p in pairs]


def test_each_gradient_is_found_beside_the_input_of_another_call():
    one, x, g = trace(0)
    measured = made_of(x, g, [(0, 2), (1, 1), (2, 0)])
    assert told(paired_otherwise({1: one}, "m.weight", measured)) == [
        (1, 0, 2),
        (1, 1, 1),
        (1, 2, 0),
    ]
    halved = paired_otherwise({1: one}, "m.weight", measured / 2)
    assert told(halved) == [(1, 0, 2), (1, 1, 1), (1, 2, 0)]


def test_pairs_of_all_ranks_that_are_summed():
    (one, x, g), (two, y, h) = trace(0, 2), trace(1, 2)
    measured = made_of(x, g, [(0, 1), (1, 0)]) + made_of(y, h, [(0, 0), (1, 1)])
    assert told(paired_otherwise({0: one, 1: two}, "m.weight", measured)) == [
        (0, 0, 1), (0, 1, 0), (1, 0, 0), (1, 1, 1)
    ]  # fmt: skip


@pytest.mark.parametrize(
    "measured",
    [
        lambda x, g: made_of(x, g, [(0, 0), (1, 1), (2, 2)]),  # its own
        lambda x, g: made_of(x, g, [(0, 1), (1, 0)]) + 2 * made_of(x, g, [(2, 2)]),  # twice
        lambda x, g: made_of(x, g, [(0, 0), (0, 1), (1, 0)]),  # one beside two
        lambda x, g: made_of(x, g, [(0, 1), (1, 0)]) + 1e-3,  # and something else
        lambda x, g: torch.zeros(OUT, WIDTH, dtype=torch.float64),
        lambda x, g: torch.full((OUT, WIDTH), float("nan"), dtype=torch.float64),
        lambda x, g: g[0].sum(0),  # no matrix
    ],
)
def test_of_what_is_not_made_of_other_pairs_nothing_is_said(measured):
    one, x, g = trace(0)
    assert paired_otherwise({0: one}, "m.weight", measured(x, g)) == []


def test_only_weights_of_more_numbers_than_pairs_tell():
    one, x, g = trace(0, 4)
    measured = made_of(x, g, [(0, 1), (1, 0), (2, 2), (3, 3)])
    assert paired_otherwise({0: one}, "m.weight", measured) == []  # 16 pairs, 30 numbers
    assert paired_otherwise({0: one}, "m.table", measured) == []


def test_products_of_too_many_numbers_are_not_made(monkeypatch):
    one, x, g = trace(0)
    measured = made_of(x, g, [(0, 1), (1, 0), (2, 2)])
    assert paired_otherwise({0: one}, "m.weight", measured)
    monkeypatch.setattr(paired_inputs, "MOST_NUMBERS", 9 * OUT * WIDTH - 1)
    assert paired_otherwise({0: one}, "m.weight", measured) == []


@pytest.mark.parametrize("known", [True, False])
def test_it_is_said_where_every_wrong_weight_is_so(monkeypatch, known):
    one, x, g = trace(0)
    cells = [SimpleNamespace(rank=0, name="m.weight", measured=made_of(x, g, [(0, 1), (1, 0)]))]
    cells += [] if known else [SimpleNamespace(rank=0, name="m.bias", measured=g.sum((0, 1)))]
    monkeypatch.setattr(paired, "looked_by_rows", lambda case: SimpleNamespace(sources={}))
    monkeypatch.setattr(paired, "explained", lambda case, diagnosis: diagnosis)
    case = SimpleNamespace(traces=SimpleNamespace(ranks={0: one}), failing_cells=cells)
    said = list(paired.inputs_of_other_calls(case, None))
    assert len(said) == known
    for diagnosis in said:
        assert diagnosis.kind == "saved_input"
        assert diagnosis.because == (
            "m.weight is the sum of its calls' gradients, each times an input: on rank 0 that of "
            "call 0 with the input of call 1; on rank 0 that of call 1 with the input of call 0",
        )
