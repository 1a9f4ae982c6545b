"""The shipped topologies, by name or by path."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from sumgrad.base.errors import UserError
from sumgrad.base.files import PACKAGE


def topologies_directory() -> Path:
    """The shipped topologies: beside the package when installed, beside harness/ in a checkout."""
    inside = PACKAGE / "topologies"
    return inside if inside.is_dir() else PACKAGE.parent / "topologies"


def shipped_topologies() -> list[Path]:
    """Every shipped topology file, by name."""
    return sorted(topologies_directory().glob("*.yaml"))


def find_topology(path: Path) -> Path:
    """A topology file: this path, or the shipped file of this name. UserError if there is neither.

    A file here wins, with or without its `.yaml`.
    """
    local = (path, path.with_name(f"{path.name}.yaml"))
    found = next((p for p in local if p.exists() and not p.is_dir()), None)
    if found or path.name != str(path):
        return found or path  # a path with folders names no shipped file
    shipped = {known.stem: known for known in shipped_topologies()}
    name = path.name.removesuffix(".yaml").removesuffix(".yml")
    if name in shipped:
        return shipped[name]
    if path.is_dir():
        return path
    near = get_close_matches(name, shipped, n=3, cutoff=0.5)
    like = f", such as {' or '.join(near)}" if near else ""
    raise UserError(
        f"{path}: no such file, and no shipped topology of that name{like} "
        f"(`sumgrad list` shows all)"
    )
