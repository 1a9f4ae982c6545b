"""Which of a user's lines made a tensor, or wrote into its memory last."""

from __future__ import annotations

from itertools import count

import torch
from sumgrad.record.line import NO_LINE, Line
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakIdKeyDictionary


class MadeAt:
    """Of tensors that are alive. A view is made by its line, and written where its base is."""

    def __init__(self) -> None:
        self._made = WeakIdKeyDictionary()  # tensor -> when, and the line
        self._written: dict[int, tuple[int, Line, StorageWeakRef]] = {}  # address -> the same
        self._time = count()

    def made(self, out: Tensor, line: Line) -> None:
        """A line gives a tensor; not one that is there already, as what is changed in place."""
        if out not in self._made:
            self._made[out] = next(self._time), line

    def written(self, tensor: Tensor, line: Line) -> None:
        """A line changes a tensor in place."""
        if (memory := _memory(tensor)) is not None:
            self._written[memory.data_ptr()] = next(self._time), line, StorageWeakRef(memory)

    def of(self, tensor: Tensor) -> Line:
        """The later of the two; empty where no line is known to have made it."""
        made: tuple[int, Line] | None = self._made.get(tensor)
        return NO_LINE if made is None else max(made, self._last(tensor) or made)[1]

    def before(self, tensor: Tensor) -> Line:
        """Of a tensor that a line made of memory, the line that had written into it before."""
        made: tuple[int, Line] | None = self._made.get(tensor)
        written = self._last(tensor)
        return NO_LINE if made is None or written is None or written > made else written[1]

    def _last(self, tensor: Tensor) -> tuple[int, Line] | None:
        """When its memory was written into, and by which line; not what another had there, whose
        address was given out again."""
        memory = _memory(tensor)
        held = None if memory is None else self._written.get(memory.data_ptr())
        return None if held is None or held[2].expired() else held[:2]


def _memory(tensor: Tensor) -> torch.UntypedStorage | None:
    with torch._C.DisableTorchFunction():
        try:
            memory = tensor.untyped_storage()
            return memory if memory.data_ptr() else None
        except (RuntimeError, NotImplementedError):
            return None  # a tensor of a class of its own
