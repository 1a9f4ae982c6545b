"""A factor of some parameters whose reduction averages in the tier of fewer digits alone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sumgrad.diagnose.explainers.of_ledgers import reduced_otherwise
from sumgrad.diagnose.explainers.of_ledgers.reduced_otherwise import by_a_reduction

TIERS = {"structure": "float64", "precision": "float32"}


def joint(op, *names, ranks=(0, 1, 2)):
    return SimpleNamespace(first={"reduce": op}, ranks=ranks, site="f.py:74", names=names)


@pytest.mark.parametrize(
    ("theirs", "value", "is_told"),
    [
        (joint("AVG", "w", "b"), 1 / 3, True),
        (joint("SUM", "w", "b"), 1 / 3, False),
        (joint("AVG", "v"), 1 / 3, False),  # of another parameter
        (joint("AVG", "w"), 1 / 2, False),  # no average of three makes that
    ],
)
def test_an_average_of_the_other_tier_explains_the_factor(monkeypatch, theirs, value, is_told):
    own = joint("SUM", "w", "b")
    of_tiers = {None: [own], "precision": [theirs]}
    for name, stub in (
        ("reductions_of", lambda case, tier=None: of_tiers[tier]),
        ("carried_by", lambda case, joint, tier=None: list(joint.names)),
        ("describe", lambda record, joint: f"the reduce-scatter at {joint.site}"),
        ("prescaled", lambda joint, sizes: None),
        ("identical", lambda joint: False),
        ("sizes_of", lambda record: {"dp": 3}),
        ("group_name", lambda topology, ranks: "dp"),
    ):
        monkeypatch.setattr(reduced_otherwise, name, stub)
    spec = SimpleNamespace(tiers=TIERS, topology=None)
    case = SimpleNamespace(tier="structure", step=0, record=SimpleNamespace(spec=spec))
    found = by_a_reduction(case, ["w"], value, "1/3", "w is the reference's times 1/3")
    assert (found is not None) == is_told
    if found is not None:
        assert found.cause == "the reduce-scatter at f.py:74 averages (AVG) where the law sums"
        assert (found.standing, found.symbol) == ("proved", "1/dp")
        assert "the ledger of the precision tier shows AVG at f.py:74" in found.because
