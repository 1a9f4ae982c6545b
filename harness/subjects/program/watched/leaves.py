"""Leaves whose gradient a step reads and goes on with: a buffer that is used again keeps it.

Autograd adds to what is there: what was read after one micro-batch and was not taken away is in
what is read after the next.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from sumgrad.record.computed import Uncleared
from sumgrad.record.line import Line
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary


class Leaves:
    """Those that are no parameters, from the first reading of their gradients on."""

    def __init__(self) -> None:
        self.uncleared: dict[Uncleared, None] = {}
        self._read = WeakIdKeyDictionary()  # leaf -> the line that read its gradient last
        self._handles: list[Any] = []

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def read(self, leaf: Any, line: Line, made: Line) -> None:
        """A line takes a tensor's gradient."""
        with torch._C.DisableTorchFunction():
            if not isinstance(leaf, Tensor) or isinstance(leaf, nn.Parameter):
                return
            if not leaf.is_leaf or not leaf.requires_grad or leaf.grad is None:
                return
            if leaf not in self._read:
                self._handles.append(leaf.register_hook(self._hook(leaf, made)))
            self._read[leaf] = line

    def _hook(self, leaf: Tensor, made: Line) -> Callable[[Tensor], None]:
        of = weakref.ref(leaf)

        def hook(_: Tensor) -> None:
            held = of()
            with torch._C.DisableTorchFunction(), torch.no_grad():
                if held is not None and held.grad is not None and bool(held.grad.any()):
                    self.uncleared[Uncleared(made=made, read=self._read[held])] = None

        return hook
