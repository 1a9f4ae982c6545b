"""Values of tensors, each kept once while its tensor has it, and the gradients that reach them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sumgrad.base.tensors import to_local
from sumgrad.record.computed import same_value
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

MOST_ELEMENTS = 1 << 16  # of a tensor that is kept
MOST_KEPT = 1 << 23  # elements of all of them, and as many of their gradients


class KeptValues:
    """values: by number. with_graph: numbers of those that autograd knows a function of.

    gradients: by number, the sum of what reached it; arrivals: of a leaf, each. with_gradients:
    whether these are kept at all. in_a_function: whether the forward of a Function runs now.
    """

    def __init__(
        self, *, with_gradients: bool = True, in_a_function: Callable[[], bool] = lambda: False
    ) -> None:
        self.values: list[Tensor] = []
        self.gradients: dict[int, Tensor] = {}
        self.arrivals: dict[int, list[Tensor]] = {}
        self.with_graph: set[int] = set()
        self._with_gradients, self._in_a_function = with_gradients, in_a_function
        self._room, self._room_back = MOST_KEPT, MOST_KEPT
        self._known = WeakIdKeyDictionary()  # tensor -> number of its last value
        self._handles: list[Any] = []

    def close(self) -> None:
        """No gradient is waited for any more."""
        for handle in self._handles:
            handle.remove()

    def known(self, value: Tensor) -> int | None:
        """The number of the last value that this tensor was seen to have."""
        number: int | None = self._known.get(value)
        return number

    def number(self, value: Tensor) -> int | None:
        """That of what a tensor has now; None where it is not kept."""
        # On what becomes a Function's result a hook would keep a later one of the user's from its
        # node.
        may_be = value.grad_fn is not None or not self._in_a_function()
        with torch._C.DisableTorchFunction(), torch.no_grad():
            held = _held(value)
            if held is None:
                return None
            before = self._known.get(value)
            graph = (
                self._with_gradients
                and may_be
                and value.requires_grad
                and not isinstance(value, nn.Parameter)
            )
            same = before is not None and same_value(self.values[before], held)
            known = before in self.with_graph
            if same and (known or not graph):  # else a Function's result, or a leaf
                return int(before)
            self._room -= held.numel()
            if self._room < 0:
                return None
            number = len(self.values)
            self.values.append(held)
            self._known[value] = number
            if graph:
                self.with_graph.add(number)
                hook = self._gradient_hook(number, leaf=value.grad_fn is None)
                self._handles.append(value.register_hook(hook))
            return number

    def _gradient_hook(self, number: int, *, leaf: bool) -> Callable[[Tensor | None], None]:
        def hook(gradient: Tensor | None) -> None:
            if gradient is None:
                return  # a Function's own backward gave none
            with torch._C.DisableTorchFunction(), torch.no_grad():
                held = _held(gradient)
                if held is None:
                    return
                known = self.gradients.get(number)
                self._room_back -= held.numel() if known is None or leaf else 0
                if leaf and self._room_back >= 0:
                    self.arrivals.setdefault(number, []).append(held)
                if self._room_back >= 0:
                    self.gradients[number] = held if known is None else known + held

        return hook


def _held(value: Tensor) -> Tensor | None:
    try:
        if any(p.is_partial() for p in getattr(value, "placements", ())):
            return None
        local = to_local(value).detach()
        if local.is_complex():
            local = torch.view_as_real(local.resolve_conj())
        if local.is_sparse or local.numel() > MOST_ELEMENTS:
            return None
        return local.to(device="cpu", copy=True).contiguous()
    except (RuntimeError, NotImplementedError, AttributeError):
        return None  # a tensor of a class of its own
