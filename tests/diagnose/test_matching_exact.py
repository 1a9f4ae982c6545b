"""A rank's vectors among the single process's: what counts as padding, and what does not."""

from __future__ import annotations

import pytest
import torch
from sumgrad.diagnose.modules.matching import match

WANTED = torch.arange(1.0, 19.0, dtype=torch.float64).reshape(6, 3)
FILLER = torch.tensor([[0.5, 0.25, -3.0]], dtype=torch.float64)


@pytest.mark.parametrize(("got", "here"), [
    ([WANTED[1:3]], [True, True]),
    ([WANTED[1:3], 0 * FILLER], [True, True, True]),  # zeros
    ([WANTED[1:3], FILLER, FILLER], [True, True, True, True]),  # what a layer makes of zeros
    ([WANTED[1:3], FILLER, FILLER * (1 + 1e-15)], [True, True, True, True]),  # up to rounding
    ([WANTED[1:3], FILLER], [True, True, False]),  # one alone is wrong
    ([WANTED[1:3], FILLER, 2 * FILLER], [True, True, False, False]),  # and so are different ones
    ([FILLER, FILLER], [False, False]),  # nothing is there: a wrong output of equal rows
])  # fmt: skip
def test_what_counts_as_padding(got, here):
    found = match(torch.cat(got), WANTED, 1e-9)
    assert found is not None
    assert found.here.tolist() == here
    assert not (found.empty & found.found.any(1)).any()
