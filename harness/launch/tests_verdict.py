"""A verdict that knows whether a test has asked it for anything."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from sumgrad.base.verdict import Verdict

_asked: set[int] = set()  # ids of those that were


class TestsVerdict(Verdict):
    """As a test is given it."""

    __slots__ = ()
    __test__ = False  # pytest is not to collect it

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_"):
            _asked.add(id(self))
        return super().__getattribute__(name)


def told_apart(verdict: Verdict) -> Verdict:
    given = TestsVerdict(**{field.name: getattr(verdict, field.name) for field in fields(verdict)})
    _asked.discard(id(given))
    return given


def never_asked(verdict: Verdict) -> bool:
    """Whether nobody has looked at it."""
    return id(verdict) not in _asked
