"""With what a run was made: numbers, and a digest of this package, so that two are told apart."""

from __future__ import annotations

import functools
import hashlib
import importlib
import platform
from collections.abc import Mapping
from pathlib import Path

from sumgrad import __version__


def versions() -> dict[str, str]:
    """What a stored run was made with, and what of this torch no ledger would show."""
    import torch
    from sumgrad.ledger.delegation import unrecorded_operations

    unrecorded = ", ".join(sorted(unrecorded_operations()))
    more = {"not recorded": unrecorded} if unrecorded else {}
    return more | {
        "sumgrad": __version__,
        "source": source_digest(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "system": platform.system(),
    }


@functools.cache
def source_digest() -> str:
    """Of every Python file of this package by name: two states of one version are told apart."""
    digest = hashlib.sha256()
    for package in ("sumgrad", "sumgrad.kernels"):
        (folder,) = map(Path, importlib.import_module(package).__path__)
        for path in sorted(folder.rglob("*.py")):
            name = path.relative_to(folder).as_posix()
            if not name.startswith("kernels/"):  # an installed package has them twice
                digest.update(f"{package}/{name}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def made_with(told: Mapping[str, str]) -> str:
    """The versions of a run in one line; those of now besides, where they are others."""
    then, now = _line(told), _line(versions())
    return then if then == now else f"{then}; judged with {now}"


def _line(told: Mapping[str, str]) -> str:
    source = f" (source {told['source']})" if "source" in told else ""
    return (
        f"sumgrad {told.get('sumgrad', '?')}{source}, torch {told.get('torch', '?')}, "
        f"Python {told.get('python', '?')}"
    )
