"""A user's code run once more, beside the step: it may not communicate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from sumgrad.ledger.process_group import Call, Ledger


@contextmanager
def without_operations(ledger: Ledger) -> Iterator[None]:
    """An operation that is asked for is not carried out, and raises RuntimeError: other ranks would
    not take part in it."""
    before, ledger.interpose = ledger.interpose, _refuse
    try:
        with ledger.label("aside"):
            yield
    finally:
        ledger.interpose = before


def _refuse(call: Call) -> NoReturn:
    raise RuntimeError(f"{call.op} outside of the step")
