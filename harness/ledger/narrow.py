"""Where a step that was given float64 computes in fewer digits all the same.

A small error in the structure tier is either a wrong term of that size or the rounding of a cast.
Which of them is possible is seen, not guessed: every operation of one more run of the step is
looked at, and the lines that make float32 or less are kept.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sumgrad.ledger.process_group import tensors_in
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

MAX_PLACES = 3
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep


class NarrowWatch(TorchDispatchMode):
    """Notes the first lines that give floats of fewer digits than float64: `float32 at f.py:9`."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if len(self.places) < MAX_PLACES:
            for tensor in tensors_in(out):
                if tensor.is_floating_point() and tensor.dtype != torch.float64:
                    self._note(tensor.dtype)
        return out

    def _note(self, dtype: torch.dtype) -> None:
        frame = sys._getframe(2)
        while frame.f_back is not None:
            name = frame.f_code.co_filename
            if not name.startswith(_TORCH) and "contextlib" not in name:
                break
            frame = frame.f_back
        line = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        place = f"{str(dtype).removeprefix('torch.')} at {line}"
        if place not in self.places:
            self.places.append(place)


def is_compiled(model: nn.Module) -> bool:
    """Whether a part of a model is compiled: such regions are not looked into."""
    return any(
        type(module).__name__ == "OptimizedModule"
        or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )
