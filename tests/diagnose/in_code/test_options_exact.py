"""Losses that a rank calls with other options than the single process does, as they really ran."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from sumgrad.diagnose.explainers.by_modules.weighing.losses import options_of_losses
from sumgrad.diagnose.modules.in_code.options import other_options
from sumgrad.subjects.program.watched.computations import Computations

G = torch.Generator().manual_seed(2)
X = torch.randn(6, 5, generator=G, dtype=torch.float64)
TARGET = torch.randn(6, 5, generator=G, dtype=torch.float64).softmax(-1)
LABELS = torch.tensor([0, 4, 2, 1, 3, 3])


def recorded(reduction, rows=slice(None), classes="sum", x=X):
    with Computations(lambda: ((), 0)) as computations:
        mine = x[rows].clone().requires_grad_()
        soft = F.kl_div(mine.log_softmax(-1), TARGET[rows], reduction=reduction)
        hard = F.cross_entropy(mine, LABELS[rows], reduction=classes, ignore_index=2)
        (soft + hard).backward()
    return computations.computed()


def told(mine, whole):
    return [(o.mine.function, o.now, o.was) for o in other_options(mine, whole)]


def test_another_reduction_of_the_same_numbers_is_told():
    whole = recorded("sum")
    assert told(recorded("batchmean", slice(1, 4)), whole) == [
        ("kl_div", "reduction='batchmean'", "reduction='sum'")
    ]
    assert told(recorded("sum", [4, 0]), whole) == []
    assert told(recorded("batchmean", slice(0, 2), classes="mean"), whole) == [
        ("kl_div", "reduction='batchmean'", "reduction='sum'"),
        ("cross_entropy", "reduction='mean'", "reduction='sum'"),
    ]


def test_other_numbers_tell_nothing():
    assert told(recorded("batchmean", x=1.01 * X, classes="mean"), recorded("sum")) == []


@pytest.mark.parametrize(("on_rank", "alone", "num"), [(3, 6, 0), (3, 4, 1), (2, 6, 1), (6, 6, 0)])
def test_a_size_of_the_input_is_meant_to_be_another(on_rank, alone, num):
    """As of an index one beyond the last, where nothing is to be counted."""

    def loss(rows, index):
        with Computations(lambda: ((), 0)) as computations:
            logits, labels = X[:rows].clone().requires_grad_(), LABELS[:rows]
            F.cross_entropy(logits, labels, ignore_index=index).backward()
        return computations.computed()

    assert len(told(loss(3, on_rank), loss(6, alone))) == num


def test_in_words_with_the_ranks():
    single = SimpleNamespace(computed=recorded("sum"))
    ranks = {r: SimpleNamespace(computed=recorded(how, slice(r, r + 3)))
             for r, how in enumerate(("batchmean", "sum", "batchmean"))}  # fmt: skip
    (said,) = options_of_losses(SimpleNamespace(traces=SimpleNamespace(ranks=ranks, single=single)))
    assert said.startswith("kl_div at ")
    assert said.endswith(
        "has reduction='batchmean' on rank 0, 2, and in the single process reduction='sum' where "
        "that gets the same numbers as its first argument"
    )
    assert not [*options_of_losses(SimpleNamespace(traces=None))]
