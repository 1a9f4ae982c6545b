"""What a process prints, kept on disk within a bound: its beginning, its end, and how much between.

The process writes into a pipe. Whoever holds the other end drains it, so printing blocks nobody
and the disk cannot fill.
"""

from __future__ import annotations

import os
from pathlib import Path

HEAD_BYTES = TAIL_BYTES = 1 << 20
CHUNK = 1 << 16
CHUNKS_AT_ONCE = 16  # a process that prints for ever must not keep its reader


class RankLog:
    """The reading end of one process's output, and the file it goes to.

    writer: the other end, for the process; the owner closes its copy. The file is the first
    HEAD_BYTES and behind them a ring of the last TAIL_BYTES, put in order by `close`.
    """

    def __init__(
        self, path: Path, *, head_bytes: int = HEAD_BYTES, tail_bytes: int = TAIL_BYTES
    ) -> None:
        self._head, self._tail = head_bytes, tail_bytes
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)
        self.num_bytes = 0
        self.open = True

    def drain(self) -> None:
        """Take what has been printed; `open` is False once nobody can print any more."""
        for _ in range(CHUNKS_AT_ONCE):
            try:
                data = os.read(self.reader, CHUNK)
            except BlockingIOError:
                return
            if not data:
                self.open = False
                return
            self._write(data)

    def close(self) -> None:
        """Take the rest and put the file in order."""
        self.drain()
        left_out = self.num_bytes - self._head - self._tail
        if left_out > 0:
            start = (self.num_bytes - self._head) % self._tail
            ring = os.pread(self._file, self._tail, self._head)
            words = f"\n[sumgrad: {left_out} bytes of output left out here]\n".encode()
            self._put(words + ring[start:] + ring[:start], self._head)
        os.close(self.reader)
        os.close(self._file)
        self.open = False

    def _write(self, data: bytes) -> None:
        head = data[: max(self._head - self.num_bytes, 0)]
        self._put(head, self.num_bytes)
        self.num_bytes += len(head)
        rest = data[len(head) :]
        while rest:
            at = (self.num_bytes - self._head) % self._tail
            part = rest[: self._tail - at]
            self._put(part, self._head + at)
            self.num_bytes += len(part)
            rest = rest[len(part) :]

    def _put(self, data: bytes, offset: int) -> None:
        try:
            while data:
                written = os.pwrite(self._file, data, offset)
                data, offset = data[written:], offset + written
        except OSError:  # a full disk takes the log, not the run
            return
