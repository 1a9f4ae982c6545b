"""Texts that others chose, made fit to be shown: no control characters, one line where it must be.

Names of tensors, messages of exceptions and what a rank printed reach every report. Terminals obey
escape sequences, XML has no place for most control characters, lone surrogates cannot be encoded.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

MAX_SHOWN = 60


def printable(text: str) -> str:
    r"""The text with what is not printable written out, as `\x1b`; line ends and tabs stay."""
    if text.isprintable():
        return text
    text = text.replace("\r\n", "\n")
    return "".join(c if _is_printable(c) else c.encode("unicode_escape").decode() for c in text)


def _is_printable(c: str) -> bool:
    return c.isprintable() or c in "\n\t" or unicodedata.category(c) == "Zs"


def printable_data(value: Any) -> Any:
    """The same plain data with every text printable, keys too."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {printable_data(key): printable_data(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [printable_data(entry) for entry in value]
    return value


def shown(value: object, limit: int = MAX_SHOWN) -> str:
    """A value in a message: on one line, bounded, whatever it is."""
    try:
        text = value if isinstance(value, str) else repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits has no decimal text
        text = f"a huge {type(value).__name__}"
    text = text if text.isprintable() else repr(text)[1:-1]
    return text if len(text) <= limit else text[: limit - 3] + "..."


def meant(word: str, known: Iterable[str]) -> str:
    """`; did you mean ...?` where a word is nearly one of these; else nothing."""
    near = get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""
