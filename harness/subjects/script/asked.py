"""What is asked of every process of an observed script: one JSON file, named by the environment."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from sumgrad.base.files import read_json, write_json

VARIABLE = "SUMGRAD_WATCH"  # the file's path, in the environment of the script
FILE = "asked.json"
SAME = "script"  # in place of hashes by which a Program's ranks are known to have one model
START = "start"  # weights as they were before the first call of a model
KEPT = "weights_{}.safetensors"  # what the single run keeps for the others


def buffers_of(call: int) -> str:
    """Under what name the single run keeps the buffers that a step changed."""
    return f"buffers_{call}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """directory: of this side, where ranks write. steps: of every parameter that an optimizer has;
    calls: of any optimizer, as many as the single run observed, 0 for that run itself.

    lift: everything is float64. start: the directory of the single run whose weights are taken;
    None for that run itself. jitter: a seed; those weights are then moved by one rounding each, up
    or down; 0 for none. seconds: until the script must have come so far. look: the step whose
    modules are looked into, and written as `trace` says; -1 for none.
    """

    directory: str
    steps: int
    tier: str
    lift: bool
    start: str | None
    jitter: int
    seconds: float
    calls: int = 0
    look: int = -1
    trace: str = ""


def write_asked(asked: Asked) -> Path:
    """Write it where its processes find it; returns the file."""
    path = Path(asked.directory) / FILE
    write_json(path, asdict(asked))
    return path


def read_asked(path: Path) -> Asked:
    """Read it back. OSError, ValueError or TypeError where it is damaged."""
    return Asked(**read_json(path))
