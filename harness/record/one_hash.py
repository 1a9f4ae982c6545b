"""one_hash.json: what a failing step gave once all ranks had the same hashes of strings.

That run is in one_hash/, a run directory of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from sumgrad.base.files import read_json, write_json
from sumgrad.record.spec import DAMAGED

FOLDER = "one_hash"
FILE = f"{FOLDER}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class OneHash:
    """passes: whether it is right then. changed: parameters whose gradient on some rank is another
    then, by more than rounding, though it is the same each time otherwise."""

    passes: bool
    changed: tuple[str, ...]


def write_one_hash(directory: Path, *, passes: bool, changed: Sequence[str]) -> OneHash:
    found = OneHash(passes=passes, changed=tuple(changed))
    write_json(directory / FILE, asdict(found))
    return found


def read_one_hash(directory: Path) -> OneHash | None:
    """None where it was not tried, or the file is damaged."""
    try:
        said = read_json(directory / FILE)
        return OneHash(passes=said["passes"] is True, changed=tuple(map(str, said["changed"])))
    except DAMAGED:
        return None
