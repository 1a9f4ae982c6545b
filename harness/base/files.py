"""Files that hold results are written under a temporary name and renamed: whole or not at all."""

from __future__ import annotations

import json
import math
import os
import stat
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parents[1]  # harness/, or sumgrad/ where it is installed


def is_librarys(path: str) -> bool:
    """Whether a file is one of an installed package."""
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(path).parts)


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file atomically within its directory. OSError leaves no partial file behind."""
    if path.exists() and not path.is_file():  # a pipe or a device is written to, never replaced
        path.write_bytes(data)
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, data: Any) -> None:
    """Write JSON atomically. Not-a-number and infinities are written as text, not as bad JSON."""
    write_bytes(path, json_text(data).encode())


def json_text(data: Any) -> str:
    """JSON as it is written to files and to standard output."""
    return json.dumps(finite(data), indent=1) + "\n"


def read_json(path: Path) -> Any:
    """Parse a JSON file. OSError if it cannot be read, ValueError if it is no file or no JSON."""
    if not is_regular(path):
        raise ValueError("is no regular file")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def is_regular(path: Path) -> bool:
    """Whether opening it ends: no pipe, device or directory. OSError if it is not there."""
    return stat.S_ISREG(path.stat().st_mode)


def finite(value: Any) -> Any:
    """The same data with non-finite floats as "nan", "inf" or "-inf"."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return value
