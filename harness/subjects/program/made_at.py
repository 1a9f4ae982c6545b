"""Which of a user's lines made a tensor, or wrote into its memory last."""

from __future__ import annotations

from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

Line = tuple[str, str]  # `PATH:12`, and what stands there
NONE: Line = ("", "")


class MadeAt:
    """Of tensors that are alive. A view is made by its line, and written where its base is."""

    def __init__(self) -> None:
        self._made = WeakIdKeyDictionary()  # tensor -> when, and the line
        self._written: dict[int, tuple[int, Line]] = {}  # memory -> the same
        self._time = count()

    def made(self, out: Tensor, given: Any, line: Line) -> None:
        """A line gives a tensor, of these arguments."""
        if out in self._made:
            return
        memory = _memory(out)
        if memory not in {_memory(t) for t in pytree.tree_leaves(given) if isinstance(t, Tensor)}:
            self._written.pop(memory, None)  # what was there is gone
        self._made[out] = next(self._time), line

    def written(self, tensor: Tensor, line: Line) -> None:
        if memory := _memory(tensor):
            self._written[memory] = next(self._time), line

    def of(self, tensor: Tensor) -> Line:
        """The later of the two; empty where no line is known to have made it."""
        made: tuple[int, Line] | None = self._made.get(tensor)
        if made is None:
            return NONE
        return max(made, self._written.get(_memory(tensor), made))[1]

    def before(self, tensor: Tensor) -> Line:
        """Of a tensor that a line made of memory, the line that had written into it before."""
        made: tuple[int, Line] | None = self._made.get(tensor)
        written = self._written.get(_memory(tensor))
        return NONE if made is None or written is None or written > made else written[1]


def _memory(tensor: Tensor) -> int:
    with torch._C.DisableTorchFunction():
        try:
            return tensor.untyped_storage().data_ptr()
        except (RuntimeError, NotImplementedError):
            return 0  # a tensor of a class of its own
