"""What autograd keeps for the backward and a user's own hooks give back as something else.

An offload or a compression of activations packs what is kept and unpacks it in the backward. Both
are held against each other while a step is looked into.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

import torch
from sumgrad.base.tensors import to_local
from sumgrad.record.computed import Unlike
from sumgrad.subjects.users_line import is_users
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

MOST_ELEMENTS = 1 << 16  # of a tensor that is compared
MOST_KEPT = 1 << 22  # elements of all of them


class Kept:
    """Between `with` and its end: each pair of a user's hooks for saved tensors."""

    def __init__(self) -> None:
        self.unlike: dict[Unlike, None] = {}
        self._room = MOST_KEPT
        self._enter: Any = None

    def __enter__(self) -> Kept:
        self._enter = enter = saved_tensors_hooks.__enter__
        watched = self

        def enter_watched(hooks: Any) -> None:
            pack, unpack = hooks.pack_hook, hooks.unpack_hook
            if _written(pack) is None:  # torch's own, as a checkpoint's
                return enter(hooks)
            hooks.pack_hook, hooks.unpack_hook = watched._both(pack, unpack)
            try:
                return enter(hooks)
            finally:
                hooks.pack_hook, hooks.unpack_hook = pack, unpack

        saved_tensors_hooks.__enter__ = enter_watched  # type: ignore[method-assign]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        saved_tensors_hooks.__enter__ = self._enter  # type: ignore[method-assign]

    def _both(
        self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]
    ) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
        names = _written(pack) or "", _written(unpack) or ""

        def pack_watched(tensor: Tensor) -> Any:
            line = _line()
            copy = self._copy(tensor)
            return pack(tensor), copy, line

        def unpack_watched(packed: Any) -> Tensor:
            held, copy, line = packed
            out = unpack(held)
            if copy is not None and _differs(copy, out):
                self.unlike[Unlike(line=line, pack=names[0], unpack=names[1])] = None
            return out

        return pack_watched, unpack_watched

    def _copy(self, tensor: Tensor) -> Tensor | None:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            local = to_local(tensor).detach()
            if local.is_sparse or local.numel() > MOST_ELEMENTS:
                return None
            self._room -= local.numel()
            return local.clone() if self._room >= 0 else None


def _differs(copy: Tensor, out: Tensor) -> bool:
    with torch._C.DisableTorchFunction(), torch.no_grad():
        local = to_local(out).detach()
        if local.shape != copy.shape:
            return True
        return not torch.equal(local.to(copy), copy) and bool(copy.isfinite().all())


def _written(hook: Any) -> str | None:
    """`PATH:12` where a user's hook stands."""
    function = hook if inspect.isroutine(hook) else type(hook).__call__
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    if code is None or not is_users(code.co_filename):
        return None
    return f"{code.co_filename}:{code.co_firstlineno}"


def _line() -> str:
    """That of a user's that calls what keeps a tensor."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if is_users(frame.f_code.co_filename) and not frame.f_code.co_filename.startswith("<"):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
