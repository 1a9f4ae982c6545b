"""Real text as rows: short documents of unequal length from a bundled public-domain text.

The text is the beginning of Lewis Carroll, Alice's Adventures in Wonderland (1865). A document is a
passage that starts at a word, drawn by hash; passages may overlap. They are ordered by length, as
length bucketing orders them, so every rank of every shipped pool gets another number of valid
positions (tests/workloads/test_three_pool.py).
"""

from __future__ import annotations

from importlib.resources import files

import numpy as np
from sumgrad.workloads.three_pool.draws import hashed

PADDING = 0


def read_text() -> bytes:
    """The bundled text, one blank between words."""
    raw = files("sumgrad.workloads.three_pool").joinpath("alice.txt").read_text(encoding="ascii")
    return b" ".join(raw.encode().split())


def row_lengths(num_rows: int, length: int) -> np.ndarray:
    """int64 (num_rows,): valid positions, from 2 up to `length`, unequal and ascending."""
    place = (np.arange(num_rows) + 0.5) / num_rows
    return np.minimum(2 + np.floor((length - 1) * place), length).astype(np.int64)


def tokens(num_rows: int, length: int, *, vocabulary: int, seed: int) -> np.ndarray:
    """int64 (num_rows, length): byte mod vocabulary, padded with 0 past each row's length."""
    text = np.frombuffer(read_text(), dtype=np.uint8).astype(np.int64)
    starts = np.flatnonzero(text[:-length] == ord(" ")) + 1
    picks = hashed(seed, "documents", np.arange(num_rows), ())
    first = starts[(picks % np.uint64(len(starts))).astype(np.int64)]
    rows = text[np.minimum(first[:, None] + np.arange(length), len(text) - 1)] % vocabulary
    return np.where(np.arange(length) < row_lengths(num_rows, length)[:, None], rows, PADDING)
