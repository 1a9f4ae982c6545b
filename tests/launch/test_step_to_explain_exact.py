"""Which failing step is run again, with eyes on its modules."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sumgrad.launch.check import _step_to_explain


@pytest.mark.parametrize(
    ("max_abs", "index", "opaque", "wanted"),
    [
        (0.5, [0], True, ("structure", 1)),
        ("nan", [2, 0], True, ("structure", 1)),  # a gradient that is no number has a cause, too
        ("nan", [2, 0], False, None),
        ("nan", [], True, None),  # none is there, or it has another shape
    ],
)
def test_gradients_that_are_no_numbers_are_looked_into(max_abs, index, opaque, wanted):
    tensor = {"tier": "structure", "step": 1, "status": "fail", "max_abs": max_abs, "index": index}
    verdict = SimpleNamespace(data={"tensors": [tensor]})
    spec = SimpleNamespace(tiers={"structure": "float64"}, fault=None, steps=2, opaque=opaque)
    run = SimpleNamespace(spec=spec, keep_partials=False)
    record = SimpleNamespace(partials=lambda tier: {})
    assert _step_to_explain(verdict, run, record) == wanted
