"""A port for ranks to meet at that nobody else is given in the meantime."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """A free TCP port. While the block runs no socket that asks for any port is given it; one that
    asks for it by number with SO_REUSEADDR, as torch's stores do, can listen there.

    Between the choice and rank 0's listening lies an import of torch, in which a port that is only
    known to have been free is often given to a connection of somebody else.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", 0))
        yield int(held.getsockname()[1])
