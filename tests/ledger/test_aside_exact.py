"""A user's code run once more beside the step: no operation of it is carried out."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sumgrad.ledger.aside import without_operations
from sumgrad.ledger.process_group import Ledger


def test_an_operation_beside_the_step_is_refused_and_what_was_there_comes_back():
    ledger, before = Ledger(None), lambda call: None
    ledger.interpose = before
    assert not ledger.in_step
    with without_operations(ledger):
        assert ledger.in_step  # an operation outside of a step is never asked of `interpose`
        assert ledger.interpose is not before
        with pytest.raises(RuntimeError, match="allreduce outside of the step"):
            ledger.interpose(SimpleNamespace(op="allreduce"))
    assert ledger.interpose is before
    assert not ledger.in_step
