"""Groups of parameters that were each clipped by their own norm."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sumgrad.diagnose.explainers.of_ledgers.clipped_groups import clipped_by_groups


def cell(name, values, rank=0, index=None):
    return SimpleNamespace(name=name, rank=rank, index=index, measured=torch.tensor(values))


@pytest.mark.parametrize(
    ("cells", "groups", "said"),
    [
        ([cell("a", [3.0]), cell("b", [4.0]), cell("c", [5.0])], [["a", "b"], ["c"]], True),
        ([cell("a", [3.0]), cell("b", [4.0]), cell("c", [4.9])], [["a", "b"], ["c"]], False),
        ([cell("a", [5.0]), cell("a", [5.0], 1), cell("c", [5.0])], [["a"], ["c"]], True),
        ([cell("a", [3.0], 0, torch.tensor([0])), cell("a", [4.0], 1, torch.tensor([1])),
          cell("c", [5.0])], [["a"], ["c"]], True),
        ([cell("a", [5.0])], [["a"]], False),  # one factor of all is none of a group's
        ([cell("a", [0.0]), cell("b", [0.0])], [["a"], ["b"]], False),
    ],
)  # fmt: skip
def test_every_element_counts_once(cells, groups, said):
    told = clipped_by_groups(SimpleNamespace(cells=cells), groups)
    assert told.startswith("each of these 2 groups has the norm 5 as it is measured") == said
    assert bool(told) == said
