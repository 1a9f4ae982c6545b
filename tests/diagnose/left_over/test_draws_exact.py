"""Where a step that is another each time draws random numbers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sumgrad.diagnose.explainers.last import _draws


def case(*of_ranks, tier="structure"):
    ranks = {rank: SimpleNamespace(info={(tier, 0): {"drawn": drawn}})
             for rank, drawn in enumerate(of_ranks)}  # fmt: skip
    return SimpleNamespace(tier="structure", record=SimpleNamespace(ranks=ranks))


@pytest.mark.parametrize(
    ("of_ranks", "said"),
    [
        (({"f.py:3": 2}, {"f.py:3": 1}), "f.py:3 on rank 0-1"),
        (({}, {"f.py:3": 1, "f.py:1": 1}), "f.py:1 on rank 1, f.py:3 on rank 1"),
        (({}, {}), None),
        ((True, False), None),  # as runs of before kept it
    ],
)
def test_lines_that_draw_by_rank(of_ranks, said):
    found = _draws(case(*of_ranks))
    assert found == ([f"random numbers are drawn in it at {said}"] if said else [])
    assert _draws(case(*of_ranks, tier="precision")) == []
