"""A failing step run again with one thing in it done otherwise, and whether that makes it right.

trials/asked.json           the step, what is to be tried, by how much a gradient may be off
trials/wanted.safetensors   what every parameter's whole gradient must be
trials/found.json           what came of it, in order, as far as it got
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from sumgrad.base.files import read_json, write_json
from sumgrad.record.reference import Grads, read_tensors, write_tensors
from sumgrad.record.spec import DAMAGED

TRIALS = "trials"  # the folder of a run's
ASKED, WANTED, MADE, FOUND = "asked.json", "wanted.safetensors", "made.json", "found.json"
# Over the ranks of an axis: in the forward alone, in both, in the backward alone; the largest.
Way = Literal[
    "sum",
    "sum_both",
    "sum_back",
    "largest",
    "smallest",
    "once",
    "detach",
    "attach",
    "skip",
    "number",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What is done otherwise wherever a place in the code calls a torch function.

    site, function: as of a Computation; of a module's call the function alone. way: how; sums and
    the largest are over the ranks of an axis, of all ranks where it is empty. at: which of what it
    takes is so changed, counted as a Computation's; -1 for what it gives. by: with what a number is
    multiplied, or a tensor on each rank so that a sum over the axis counts it once.
    """

    site: str
    function: str
    way: Way
    axis: str = ""
    at: int = -1
    by: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """tier, step: that failed. bounds: by how much each parameter's gradient may be off, by
    STEP/NAME, of that step and those before it. before:
    rank -> the digest of the gradients that it had; a step that has others now tells nothing.
    seconds: for all changes together. lift: whether the step had casts that were lifted."""

    tier: str
    step: int
    changes: tuple[Change, ...]
    bounds: Mapping[str, float]
    before: Mapping[int, str]
    seconds: float
    lift: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """right: whether every gradient of every rank was."""

    change: Change
    right: bool


def write_asked(folder: Path, asked: Asked, wanted: Grads) -> None:
    """What the ranks are to try, and what must come out."""
    write_tensors(folder / WANTED, wanted)
    write_json(folder / ASKED, asdict(asked))


def read_asked(folder: Path) -> tuple[Asked, Grads]:
    said = read_json(folder / ASKED)
    asked = Asked(
        tier=said["tier"],
        step=int(said["step"]),
        changes=tuple(Change(**one) for one in said["changes"]),
        bounds=said["bounds"],
        before={int(rank): digest for rank, digest in said["before"].items()},
        seconds=float(said["seconds"]),
        lift=bool(said["lift"]),
    )
    return asked, dict(read_tensors(folder / WANTED))


def write_trials(folder: Path, found: Sequence[Trial]) -> None:
    """Write those that were made so far."""
    write_json(folder / MADE, [asdict(one) for one in found])


def finish_trials(folder: Path) -> None:
    """What was written so far is all."""
    with contextlib.suppress(FileNotFoundError):
        (folder / MADE).replace(folder / FOUND)


def read_trials(directory: Path) -> tuple[Trial, ...]:
    """Of a run; nothing where none were made, or they are damaged."""
    try:
        return tuple(map(_trial_from, read_json(directory / TRIALS / FOUND)))
    except DAMAGED:
        return ()


def _trial_from(said: Mapping[str, Any]) -> Trial:
    return Trial(change=Change(**said["change"]), right=bool(said["right"]))
