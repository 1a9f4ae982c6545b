"""Matrices whose columns are not those of the features beside them."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from sumgrad.diagnose.modules.weights.weights_beside import misplaced_weights
from sumgrad.subjects.program.watched.computations import Computations
from sumgrad.subjects.program.watched.watch import ModuleWatch
from torch import nn
from torch.nn import functional as F

G = torch.Generator().manual_seed(5)
X = torch.randn(6, 7, generator=G, dtype=torch.float64)
W = torch.randn(5, 7, generator=G, dtype=torch.float64)


def recorded(function):
    with Computations(lambda: ((), 0)) as computations:
        function()
    return computations.computed()


@pytest.mark.parametrize(
    ("features", "columns", "found"),
    [
        ([0, 1, 4, 5], [0, 1, 4, 5], []),
        ([0, 1, 4, 5], [0, 1, 2, 3], [((0, 1, 4, 5), (0, 1, 2, 3))]),
        ([3, 2], [2, 3], [((3, 2), (2, 3))]),
    ],
)
def test_columns_are_those_of_the_features(features, columns, found):
    whole = recorded(lambda: F.linear(X, W))
    mine = recorded(lambda: F.linear(X[2:5][:, features], W[:, columns]))
    told = list(misplaced_weights(1, mine, whole))
    assert [(one.features, one.columns) for one in told] == found
    assert all((one.rank, one.width) == (1, 7) for one in told)


def test_a_rank_has_some_rows_of_the_matrix_and_other_numbers_tell_nothing():
    whole = recorded(lambda: F.linear(X, W))
    pairs = [(X[:, 2:5], W[1:3, 2:5]), (X[:, 2:5] + 1, W[:, :3]), (X[:, :3], W.sin()[:, 2:5])]
    pairs.append((X[:, :4].reshape(12, 2), W[:, :2]))  # of several features each
    for pair in pairs:
        assert not list(misplaced_weights(0, recorded(partial(F.linear, *pair)), whole))


def test_the_matrix_of_torchs_own_module_is_known():
    model = nn.Linear(7, 5).double()
    watching = ModuleWatch(model)
    computations = Computations(watching.now)
    watching.of_module = computations.of_module
    with watching, computations:
        model(X)
    mine = recorded(lambda: F.linear(X[:, [1, 2]], model.weight[:, [0, 1]]))
    (one,) = misplaced_weights(0, mine, computations.computed())
    assert (one.features, one.columns) == ((1, 2), (0, 1))
