"""What each rank of one machine is about to do, in memory that all of them see.

Every rank writes into its own part, and reads those of the others.
"""

from __future__ import annotations

import mmap
import os
import zlib
from pathlib import Path

MOST_KEYS = 1024  # of one rank: groups, and pairs of ranks
WORDS = 2 + 4 * MOST_KEYS  # the round, the last that ended, by key: itself, two whats, how often
OF_A_ROUND = 32  # bits below it


def number_of(*what: object) -> int:
    """The same on all ranks, and not zero."""
    return 1 + zlib.crc32(repr(what).encode())


class Board:
    """path: a file that all ranks open; there is none before."""

    def __init__(self, path: Path, rank: int, num_ranks: int) -> None:
        size = num_ranks * WORDS * 8
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(descriptor, size)  # with zeros, and what is there stays
            self._words = memoryview(mmap.mmap(descriptor, size)).cast("q")
        finally:
            os.close(descriptor)
        self._own, self._round = rank * WORDS, 0
        self._places: dict[tuple[int, int], int] = {}

    def begin(self) -> None:
        """The next round, in which nobody has come to anything."""
        self._round += 1
        self._words[self._own] = self._round

    def end(self) -> None:
        """This rank comes to nothing more in this round."""
        self._words[self._own + 1] = self._round

    def has_ended(self, rank: int) -> bool:
        return self._words[rank * WORDS + 1] >= self._round

    def put(self, key: int, times: int, what: int) -> bool:
        """That this rank has come to it so often in this round, and to do what there. False where
        there is no more room."""
        at = self._place(self._own, key, new=True)
        if at < 0:
            return False
        self._words[at + 1 + times % 2] = what  # who looks for the last one finds it there yet
        self._words[at + 3] = self._round << OF_A_ROUND | times
        return True

    def seen(self, rank: int, key: int) -> tuple[int, int]:
        """How often a rank has come to it in this round, and what it does there."""
        at = self._place(rank * WORDS, key)
        if at < 0:
            return 0, 0
        while True:
            count = self._words[at + 3]
            times = count & ((1 << OF_A_ROUND) - 1)
            what = self._words[at + 1 + times % 2]
            if self._words[at + 3] == count:  # it may have gone on in between
                break
        return (times, what) if count >> OF_A_ROUND == self._round else (0, 0)

    def told(self, rank: int, key: int, times: int) -> int:
        """What a rank does there at one of the last two times that it came to it."""
        return self._words[self._place(rank * WORDS, key) + 1 + times % 2]

    def _place(self, start: int, key: int, *, new: bool = False) -> int:
        known = self._places.get((start, key))
        if known is not None:
            return known
        for at in range(start + 2, start + WORDS, 4):
            if new and not self._words[at]:
                self._words[at] = key
            if self._words[at] == key:
                self._places[start, key] = at
                return at
            if not self._words[at]:
                break
        return -1
