"""What a factor that every rank's loss has says of the one that was measured."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.explainers.by_modules.beside import _after_the_modules

CASE = SimpleNamespace(failing_cells=[SimpleNamespace(rank=0)], cells=[SimpleNamespace(rank=0)])


@pytest.mark.parametrize(
    ("of_loss", "words"),
    [
        (
            1.0,
            ", up to the factor 1 that every rank's loss has, and what follows multiplies by 1/3",
        ),
        (
            2.0,
            ", up to the factor 2 that every rank's loss has, and what follows multiplies by 1/6",
        ),
        (0.0, ", up to the factor 0 that every rank's loss has"),  # and by what is not known
    ],
)
def test_what_is_left_of_the_factor_comes_behind_the_loss(of_loss, words):
    factor = Diagnosis(cause="c", kind="factor", factor="1/3")
    assert _after_the_modules(CASE, factor, of_loss) == words
