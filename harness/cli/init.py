"""`sumgrad init`: a step, its topology and a test, to be changed into the user's own."""

from __future__ import annotations

import importlib.resources
import keyword
import re
from pathlib import Path

from sumgrad.base.errors import UserError
from sumgrad.base.files import write_bytes

NAME, CLASS = "my_step", "MyStep"  # as they stand in start/
FILES = ("my_step.py", "my_step.yaml", "test_my_step.py")


def write_start(folder: Path, name: str) -> list[Path]:
    """Write the files, none of which may be there. Raises UserError."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise UserError(
            f"--name {name}: expected the name of a Python file: small letters, digits and _, "
            f"and no keyword of Python"
        )
    paths = [folder / file.replace(NAME, name) for file in FILES]
    there = [path for path in paths if path.exists()]
    if there:
        raise UserError(f"{there[0]} is there already; choose another --name or DIR")
    folder.mkdir(parents=True, exist_ok=True)
    camel = "".join(part.capitalize() for part in name.split("_"))
    start = importlib.resources.files("sumgrad.cli").joinpath("start")
    for file, path in zip(FILES, paths, strict=True):
        text = start.joinpath(file).read_text(encoding="utf-8")
        write_bytes(path, text.replace(NAME, name).replace(CLASS, camel).encode())
    return paths
