"""Which target a gradient at the logits is of."""

from __future__ import annotations

import pytest
import torch
from sumgrad.diagnose.modules.inputs.targets import _target, other_targets
from sumgrad.diagnose.modules.where.first_wrong import first_wrong_backward
from sumgrad.diagnose.modules.where.look import look_at
from sumgrad.record.trace import Call, Trace, Traces
from torch.nn import functional as F

ROWS, CLASSES = 4, 7
LOGITS = torch.randn(ROWS, CLASSES, generator=torch.Generator().manual_seed(0)).double()


def gradient(targets: list[int], weights=1.0, *, smoothing: float = 0.0) -> torch.Tensor:
    """Of a weighed cross entropy, at the logits; -100 is no target."""
    logits = LOGITS.clone().requires_grad_(True)
    each = F.cross_entropy(
        logits, torch.tensor(targets), reduction="none", label_smoothing=smoothing
    )
    (each * torch.as_tensor(weights)).sum().backward()
    assert logits.grad is not None
    return logits.grad


RIGHT = [3, 0, 6, 2]


@pytest.mark.parametrize(
    ("got", "wanted", "told"),
    [
        (gradient([5, 0, 6, 2]), gradient(RIGHT), (3, 5)),
        (0.4 * gradient([5, 0, 6, 2]), gradient(RIGHT), (3, 5)),  # and another factor
        (-2 * gradient([5, 0, 6, 2]), -gradient(RIGHT), (3, 5)),  # a reward below zero
        (gradient([5, 0, 6, 2]), gradient([-100, 0, 6, 2]), (None, 5)),
        (gradient(RIGHT), gradient(RIGHT), None),
        (3 * gradient(RIGHT), gradient(RIGHT), None),
        (gradient([-100, 0, 6, 2]), gradient(RIGHT), None),
        (gradient(RIGHT, smoothing=0.1), gradient(RIGHT), None),
        (gradient([5, 0, 6, 2], smoothing=0.1), gradient(RIGHT), None),
        (LOGITS, gradient(RIGHT), None),
        (LOGITS, torch.zeros_like(LOGITS), None),
        (LOGITS[:, :4], gradient(RIGHT)[:, :4], None),
    ],
)  # fmt: skip
def test_one_vector(got, wanted, told):
    assert _target(got[0], wanted[0]) == told


def test_a_rank_with_other_targets():
    def trace(rows: slice, targets: torch.Tensor) -> Trace:
        call = Call(module="head", number=0, part=0, operation=0, operation_back=0,
                    recomputed=False)  # fmt: skip
        return Trace(calls=(call,), outputs=(LOGITS[rows],), gradients=(targets[rows],),
                     sources={"head": "Linear"}, batch={"x": LOGITS})  # fmt: skip

    def told(first: list[int], second: list[int]):
        ranks = {0: trace(slice(0, 2), gradient(first)), 1: trace(slice(2, 4), gradient(second))}
        traces = Traces(tier="structure", step=0, ranks=ranks,
                        single=trace(slice(None), gradient(RIGHT)))  # fmt: skip
        found = first_wrong_backward(look_at(traces, "float64", ()), ())
        targets = None if found is None else other_targets(traces, "head", found.seen)
        return targets and [(t.seen.rank, t.vector, t.was, t.now) for t in targets]

    assert told(RIGHT, RIGHT) is None
    assert told(RIGHT, [3, 0, 6, 5]) == [(1, 1, 2, 5)]
    assert told([4, 1, 6, 2], RIGHT) == [(0, 0, 3, 4), (0, 1, 0, 1)]
