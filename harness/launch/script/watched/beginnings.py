"""With which weights and buffers a script's models began, before these were made equal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sumgrad.base.tensors import bits
from sumgrad.launch.script.watched.weights import Begun
from sumgrad.record.ranks import BUFFER_NAMED
from sumgrad.subjects.script.models import Held
from torch import Tensor


class Beginnings:
    """Of one process. shapes: of whole parameters, by name."""

    def __init__(self) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._values: dict[str, str] = {}  # a digest of each
        self._told: set[str] = set()
        self._begun: list[Begun] = []

    def met(self, new: Iterable[Held], buffers: Mapping[str, Tensor]) -> None:
        """Parameters for the first time, as they are; buffers, of which that may be so."""
        for h in new:
            self.shapes[h.name] = h.shape
            self._values[h.name] = f"{h.part}:{bits([h.local()])}"
        for name, buffer in buffers.items():
            told = f"{tuple(buffer.shape)}:{bits([buffer.detach()])}"
            self._values.setdefault(f"{BUFFER_NAMED}{name}", told)

    def made_equal(self, begun: Begun) -> None:
        self._begun.append(begun)

    def said(self, *, first: bool) -> dict[str, Any]:
        """What a step says besides of models that were met in it, and the first one always."""
        if not (first or self._begun):
            return {}
        new, begun = self._values.keys() - self._told, self._begun
        self._told, self._begun = {*self._values}, []
        return {
            "started_with": {n: told for n, told in self._values.items() if n in new},
            "other_start": [name for one in begun for name in one.trained],
            "made_equal": [name for one in begun for name in one.made_equal],
            "left_unlike": [name for one in begun for name in one.left],
            "drawn_otherwise": any(one.drawn for one in begun),
        }
