"""What a run directory holds, by size and SHA-256: a stored run is judged only as it was written.

A flipped bit of a gradient is a gradient like another, and a rank's file of yesterday fits today's
run: neither can be seen in the numbers. So the list is written before the run is judged, and files
that differ from it are not read when it is judged again. It guards against damage and mix-ups, not
against an author who rewrites the list too.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sumgrad.base.files import is_regular, read_json, write_json

MANIFEST = "manifest.json"
SCHEMA = 1
# Everything that judging reads; logs, stacks, process ids and what judging wrote are no evidence.
_EVIDENCE = re.compile(
    r"run\.json|outcomes\.json|(second_looks|one_hash)\.json|(reference|partials)_\w+\.(json|safetensors)"
    r"|ranks/rank_\d+\.(json|safetensors|ledger\.jsonl)|ranks/grads_\w+\.safetensors"
    r"|trials/found\.jsonl|trace/asked\.json|trace/(ranks/rank_\d+|single)_trace\.(json|safetensors)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """How a run directory differs from its manifest. files: name -> what is wrong with it.

    unlisted: why there is no list to compare with; then nothing is known of any file.
    """

    files: Mapping[str, str]
    unlisted: str | None = None

    @property
    def reasons(self) -> tuple[str, ...]:
        """One line each, for the verdict."""
        lines = tuple(f"{name}: {why}" for name, why in self.files.items())
        return lines if self.unlisted is None else (self.unlisted, *lines)


NO_CHANGES = Changes(files={})


def write_manifest(directory: Path) -> None:
    """List what the run has written so far."""
    listed = {name: _fingerprint(directory / name) for name in evidence(directory)}
    write_json(directory / MANIFEST, {"schema": SCHEMA, "files": listed})


def evidence(directory: Path) -> list[str]:
    """The files that judging reads, relative to the run directory, in order."""
    try:
        found = [
            *directory.iterdir(),
            *(directory / "ranks").glob("*"),
            *(directory / "trace").glob("*"),
            *(directory / "trace" / "ranks").glob("*"),
            *(directory / "trials").glob("*"),
        ]
    except OSError:
        return []
    names = (path.relative_to(directory).as_posix() for path in found)
    return sorted(name for name in names if _EVIDENCE.fullmatch(name))


def find_changes(directory: Path) -> Changes:
    """What is not as the run wrote it. Reads no more of a file than was written to it."""
    try:
        data = read_json(directory / MANIFEST)
        if data["schema"] != SCHEMA:
            raise ValueError(f"schema {data['schema']!r}, this version reads {SCHEMA}")
        listed = {str(name): _listed(*entry) for name, entry in data["files"].items()}
    except FileNotFoundError:
        why = "is missing, so whether the files are what the run wrote is not known"
        return Changes(files={}, unlisted=f"{MANIFEST}: {why}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return Changes(files={}, unlisted=f"{MANIFEST}: damaged: {error}")
    found = {name: _change(directory / name, was) for name, was in listed.items()}
    changed = {name: why for name, why in found.items() if why is not None}
    for name in evidence(directory):
        if name not in listed:
            changed[name] = "is not of this run"
    return Changes(files=changed)


def _listed(size: Any, digest: Any) -> tuple[int, str]:
    return int(size), str(digest)


def _change(path: Path, was: tuple[int, str]) -> str | None:
    try:
        if not path.exists():
            return "is missing"
        if not is_regular(path) or path.stat().st_size != was[0] or _fingerprint(path) != was:
            return "is not what the run wrote"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return None


def _fingerprint(path: Path) -> tuple[int, str]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return path.stat().st_size, digest
