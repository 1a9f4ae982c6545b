"""Tensors that the single run keeps for all others: files in its directory, by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from sumgrad.record.reference import Grads, read_tensors, write_tensors
from sumgrad.subjects.script.asked import KEPT, Asked
from torch import Tensor


class Kept:
    """directory: of this process's own run, where it writes if that is the single run."""

    def __init__(self, asked: Asked, directory: Path) -> None:
        self._start, self._directory = asked.start, directory

    def keep(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Write some, unless another process that holds them has."""
        path = self._directory / KEPT.format(name)
        if not path.exists() and tensors:
            write_tensors(path, {n: t.detach().clone() for n, t in tensors.items()})

    def stored(self, what: str) -> Grads:
        """What the single run kept under a name, `*` for any; nothing where it kept nothing."""
        assert self._start is not None
        out: Grads = {}
        for path in sorted(Path(self._start).glob(KEPT.format(what))):
            out |= dict(read_tensors(path))
        return out
