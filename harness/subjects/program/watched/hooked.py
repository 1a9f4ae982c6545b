"""What a module's call is given and gives before hooks that others registered see it."""

from __future__ import annotations

import functools
import inspect
import linecache
from collections.abc import Callable, Iterator
from typing import Any

from sumgrad.base.tensors import to_local
from sumgrad.record.hooked import Hooked
from sumgrad.record.line import NO_LINE, Line
from sumgrad.record.trace import INTO
from sumgrad.subjects.program.placed.seen_modules import is_trial
from sumgrad.subjects.program.watched.arguments import tensors_in
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

MAX_BYTES = 1 << 26  # of what is kept, on each rank


class AroundHooks:
    """number_of: of the call that comes next, by the name that its tensors have in the trace."""

    def __init__(self, number_of: Callable[[str], int]) -> None:
        self.lines: dict[str, tuple[Line, ...]] = {}
        self.kept: list[Hooked] = []
        self._number_of = number_of
        self._room = MAX_BYTES

    def watch(self, name: str, module: nn.Module) -> Iterator[RemovableHandle]:
        """To be called before any other hook of ours is registered."""

        # Plain functions, which a copy of the module shares: what it does is not kept.
        def enter(of: nn.Module, args: Any, kwargs: Any) -> None:
            if of is module:
                self._keep(f"{INTO}{name}", (args, kwargs))

        def leave(of: nn.Module, args: Any, output: Any) -> None:
            if of is module:
                self._keep(name, output)

        before, after = module._forward_pre_hooks, module._forward_hooks
        if before:
            self.lines[f"{INTO}{name}"] = tuple(map(line_of_function, before.values()))
            yield module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
        if after:
            self.lines[name] = tuple(map(line_of_function, after.values()))
            yield module.register_forward_hook(leave, prepend=True)

    def _keep(self, name: str, value: Any) -> None:
        if is_trial():
            return
        number, parts = self._number_of(name), []
        for tensor in tensors_in(value):
            if tensor.is_floating_point():
                parts.append(to_local(tensor).detach())
        for part, local in enumerate(parts):
            self._room -= local.numel() * local.element_size()
            if self._room >= 0 and local.numel():
                copy: Tensor = _as_vectors(local.to(device="cpu", copy=True).contiguous())
                self.kept.append(Hooked(module=name, number=number, part=part, value=copy))


def line_of_function(function: Any) -> Line:
    """Where a function starts and what stands there; nothing of one that is not Python's."""
    while isinstance(function, functools.partial) or inspect.ismethod(function):
        function = function.func if isinstance(function, functools.partial) else function.__func__
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return NO_LINE
    place = f"{code.co_filename}:{code.co_firstlineno}"
    return place, linecache.getline(code.co_filename, code.co_firstlineno).strip()


def _as_vectors(tensor: Tensor) -> Tensor:
    """As the trace has it: one number for each row is a vector for each row."""
    return tensor.unsqueeze(1) if tensor.dim() == 1 else tensor
