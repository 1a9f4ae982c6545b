"""What a user's lines compute outside of torch's own modules: arguments by value, line by line.

A step and the single process's loss are often written in the same words. Where both call the same
function with the same tensor beside another one, that other one is where they part.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from sumgrad.base.tensors import to_local
from sumgrad.record.computed import Computation, Computed
from sumgrad.subjects.users_line import is_users
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

MOST_ELEMENTS = 1 << 16  # of a tensor that is kept
MOST_KEPT = 1 << 22  # elements of all of them
MOST_CALLS = 20_000
# On the way from a user's line to here: some of torch's own files, and the lift's function mode.
WAYS = ("functional.py", "_tensor.py", "overrides.py", "_jit_internal.py", "program/lift.py")
ALIASES = {
    "true_divide": "div", "truediv": "div", "itruediv": "div", "divide": "div", "rtruediv": "rdiv",
    "multiply": "mul", "rmul": "mul", "imul": "mul", "radd": "add", "iadd": "add",
    "subtract": "sub", "isub": "sub", "mm": "matmul", "bmm": "matmul",
}  # fmt: skip
ARITHMETIC = {
    "add", "sub", "rsub", "mul", "div", "rdiv", "pow", "where", "masked_fill", "clamp", "maximum",
    "minimum", "lerp", "addcmul", "addcdiv", "gt", "lt", "ge", "le",
}  # fmt: skip
LOSSES = {
    "cross_entropy", "nll_loss", "kl_div", "binary_cross_entropy", "mse_loss", "l1_loss",
    "binary_cross_entropy_with_logits", "smooth_l1_loss", "huber_loss", "gaussian_nll_loss",
    "poisson_nll_loss", "ctc_loss",
}  # fmt: skip
OTHERS = {
    "matmul", "linear", "gather", "take_along_dim", "layer_norm", "rms_norm", "cosine_similarity",
    "scaled_dot_product_attention",
}  # fmt: skip
WATCHED = ARITHMETIC | LOSSES | OTHERS


class Computations(TorchFunctionMode):
    """Between `with` and its end, what a user's lines compute in the forward.

    now: the modules whose forward runs, and how many calls of modules there were.
    """

    def __init__(self, now: Callable[[], tuple[Sequence[str], int]]) -> None:
        super().__init__()
        self._now = now
        self._found: list[Computation] = []
        self._values: list[Tensor] = []
        self._room = MOST_KEPT
        self._known = WeakIdKeyDictionary()  # tensor -> number of its last value
        self._made_at = WeakIdKeyDictionary()

    def computed(self) -> Computed:
        return Computed(computations=tuple(self._found), values=tuple(self._values))

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_dynamo_compiling() or torch._C._current_graph_task_id() != -1:
            return func(*args, **kwargs)
        name = _name_of(func)
        frame = _users_frame() if len(self._found) < MOST_CALLS else None
        if frame is None:
            return func(*args, **kwargs)
        if name in WATCHED:
            self._see(name, frame, args, kwargs)
        out = func(*args, **kwargs)
        if isinstance(out, Tensor) and name not in ("get", "set"):
            self._made_at.setdefault(out, _words(frame))
        return out

    def _see(self, name: str, frame: FrameType, args: tuple[Any, ...], kwargs: Any) -> None:
        given = [*((None, a) for a in args), *sorted(kwargs.items())]
        takes = [self._argument(key, value) for key, value in given]
        if None in takes or not any(isinstance(t, int) for t in takes):
            return
        (line, code), (inside, calls) = _words(frame), self._now()
        tensors = [value if isinstance(value, Tensor) else None for _, value in given]
        made = (None if t is None else self._made_at.get(t) for t in tensors)
        self._found.append(
            Computation(
                function=name,
                line=line,
                code=code,
                takes=tuple(t for t in takes if t is not None),
                made_at=tuple(m or ("", "") for m in made),
                inside=tuple(inside),
                calls=calls,
            )
        )

    def _argument(self, key: str | None, value: Any) -> int | str | None:
        """The number of a tensor's value, the words of what is none; None where it is too large."""
        if not isinstance(value, Tensor):
            return f"{key}={value!r}" if key else repr(value)
        with torch._C.DisableTorchFunction(), torch.no_grad():
            try:
                if any(p.is_partial() for p in getattr(value, "placements", ())):
                    return None
                local = to_local(value).detach()
                if local.is_complex() or local.is_sparse or local.numel() > MOST_ELEMENTS:
                    return None
                held = local.to(device="cpu", copy=True).contiguous()
            except (RuntimeError, NotImplementedError, AttributeError):
                return None  # a tensor of a class of its own
            before = self._known.get(value)
            if before is not None and _same(self._values[before], held):
                return int(before)
            self._room -= held.numel()
            if self._room < 0:
                return None
            self._values.append(held)
            self._known[value] = len(self._values) - 1
            return len(self._values) - 1


def _same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def _name_of(func: Any) -> str:
    name = str(getattr(func, "__name__", "")).strip("_")
    return ALIASES.get(name, name)


def _users_frame() -> FrameType | None:
    """That of the user's line that calls; None where torch itself does, as in its modules."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if is_users(name):
            return None if name.startswith("<") else frame
        if not name.endswith(WAYS):
            return None
        frame = frame.f_back
    return None


def _words(frame: FrameType) -> tuple[str, str]:
    code = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    return f"{frame.f_code.co_filename}:{frame.f_lineno}", code
