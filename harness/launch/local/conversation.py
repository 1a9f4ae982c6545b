"""JSON lines over a socket that stay in step when either end is interrupted in the middle of one.

A line begins and ends with a line break, so what an interrupted sender left is a line of its own,
and a line that is not a JSON object is dropped.
"""

from __future__ import annotations

import json
import select
import socket
from collections.abc import Mapping
from typing import Any

CHUNK = 1 << 16


class Conversation:
    """One end. Raises EOFError once the other end is gone."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket, self._buffer = connection, b""

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send one message, waiting for room."""
        try:
            self._socket.sendall(_line(message))
        except OSError:
            raise EOFError from None

    def mention(self, message: Mapping[str, Any]) -> None:
        """Send one message if there is room; nobody depends on it."""
        try:
            self._socket.send(_line(message), socket.MSG_DONTWAIT)
        except OSError:
            return

    def receive(self, timeout_s: float | None) -> dict[str, Any] | None:
        """The next message, or None after a time without one; None waits for ever."""
        while True:
            line, end, rest = self._buffer.partition(b"\n")
            if end:
                self._buffer = rest
                if (message := _parse(line)) is not None:
                    return message
                continue
            ready, _, _ = select.select([self._socket], [], [], timeout_s)
            if not ready:
                return None
            try:
                data = self._socket.recv(CHUNK)
            except OSError:
                data = b""
            if not data:
                raise EOFError
            self._buffer += data


def _line(message: Mapping[str, Any]) -> bytes:
    return b"\n" + json.dumps(message).encode() + b"\n"


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None
