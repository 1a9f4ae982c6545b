"""What goes wrong while a script is watched: written down, and the script goes on."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
MOST = 20


class Troubles:
    """Of one process, each text once."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def add(self, text: str) -> None:
        if text not in self.texts and len(self.texts) < MOST:
            self.texts.append(text)

    def guarded(self, work: Callable[[], T]) -> T | None:
        """Do something of ours inside the script: what is raised is written down."""
        try:
            return work()
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(last.filename).name}:{last.lineno}"
            self.add(f"sumgrad's watch: {type(error).__name__}: {error} ({place})")
            return None
