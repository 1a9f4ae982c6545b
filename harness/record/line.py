"""A line of code, as records have it."""

from __future__ import annotations

from collections.abc import Sequence

Line = tuple[str, str]  # `PATH:12`, and what stands there
NO_LINE: Line = ("", "")


def line_of(held: Sequence[str]) -> Line:
    """One as JSON gives it back."""
    line, code = held
    return line, code
