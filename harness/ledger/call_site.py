"""Which line of a user's asked for an operation, by the frames that lead to it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import FrameType

import torch

_PACKAGE = Path(os.path.abspath(__file__)).parents[1]  # as the names of its files begin
_TRANSPORT = tuple(
    str(_PACKAGE / name)
    for name in (
        "ledger/process_group.py",
        "ledger/late.py",
        "ledger/backends.py",
        "ledger/delegation.py",
        "subjects/program/lift.py",
        "subjects/program/functions/",
        "subjects/program/watched/",
        "subjects/script/doubled.py",
        "subjects/own_gradients.py",
        "subjects/planned/exchange.py",
        "faults/misbehaviour.py",
        "launch/script/watched/",
        "convention.py",
    )
)
# Parts of the names of files that nobody wrote as a step: wrappers, and what a compiler wrote.
_WRAPPERS = ("contextlib", "typing_extensions", "<eval_with_key>", " in wrapped", "torchinductor_")
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep

# Parts of torch that issue operations which, by design, nobody need wait for: Join's notice to
# ranks that have joined; functional collectives, whose results wait for themselves when read.
JOIN, DDP = "distributed/algorithms/join.py", "nn/parallel/distributed.py"
OWN_WAITING = (JOIN, DDP, "distributed/_functional_collectives.py")


def own_issuer() -> str | None:
    """The part of torch with waiting of its own through which an operation was asked for, if any.

    Of the caller's caller, as `call_site`.
    """
    frame = sys._getframe(2)
    while frame.f_back is not None:
        name = frame.f_code.co_filename
        if (
            not name.startswith(_TORCH)
            and not name.startswith(_TRANSPORT)
            and "contextlib" not in name
        ):
            return None
        if name.startswith(_TORCH) and name.removeprefix(_TORCH) in OWN_WAITING:
            return name.removeprefix(_TORCH)
        frame = frame.f_back
    return None


def call_site() -> str:
    """`FILE:12` of the innermost line that is neither torch's nor ours, but a user's: of the
    caller's caller."""
    frame = _users_frame(sys._getframe(2))
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def users_call() -> tuple[int, int]:
    """Which call of a user's runs: the same one again gives the same as long as it runs."""
    frame = _users_frame(sys._getframe(1))
    return id(frame), frame.f_lasti


def _users_frame(frame: FrameType) -> FrameType:
    while frame.f_back is not None:
        name = frame.f_code.co_filename
        below = name.startswith((_TORCH, *_TRANSPORT))
        if not below and not any(part in name for part in _WRAPPERS):
            break
        frame = frame.f_back
    return frame
