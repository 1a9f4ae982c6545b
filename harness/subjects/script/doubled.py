"""A whole script in float64, and without dropout: what makes two runs of it comparable.

A script builds its model itself, so float64 is there from the first line: the default dtype, and a
Lift around everything. Dropout draws other numbers on many ranks than on one: it is switched off in
every run, and counted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from sumgrad.subjects.program.lift import Lift
from sumgrad.subjects.script.draws import Draws
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

_DROPOUTS = {
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout,
    torch.dropout, torch.alpha_dropout, torch.feature_dropout, torch.feature_alpha_dropout,
}  # fmt: skip
_RECURRENT = {torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu}  # with a rate of their own
_AT = 4  # where scaled_dot_product_attention takes dropout_p
_RATE = 5  # and where they take it, before `train`
_DROPPED: Any = F.scaled_dot_product_attention
# Functions of torch below which Python runs, a user's or torch's own, and a function mode is off:
# by their names, as what is watched stands there wrapped.
_CALL_PYTHON = {
    ("torch._tensor", "backward"), ("torch.autograd", "backward"), ("torch.autograd", "grad"),
    ("torch.nn.functional", "multi_head_attention_forward"),
}  # fmt: skip
_BELOW: Any = {
    F: ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout",
        "feature_alpha_dropout", "scaled_dot_product_attention"),
    torch: ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout"),
    torch._VF: ("lstm", "gru", "rnn_tanh", "rnn_relu"),
}  # fmt: skip


class NoDropout(TorchFunctionMode):
    """Every dropout gives its input. count: how often one would have dropped something.

    draws: what is drawn at random all the same.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.draws = Draws()
        self._is_below = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            rate = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
            on = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
            if rate and on:
                self.count += 1
                return args[0] if args else kwargs["input"]
        elif func is _DROPPED and (kwargs.get("dropout_p") or (len(args) > _AT and args[_AT])):
            self.count += 1
            args = (*args[:_AT], 0.0, *args[_AT + 1 :]) if len(args) > _AT else args
            kwargs = {k: v for k, v in kwargs.items() if k != "dropout_p"}
        elif func in _RECURRENT and len(args) > _RATE + 1:
            at = _RATE if isinstance(args[3], bool) else _RATE + 1  # of packed sequences
            if args[at] and args[at + 1]:
                self.count += 1
                args = (*args[:at], 0.0, *args[at + 1 :])
        called = getattr(func, "__module__", ""), getattr(func, "__name__", "")
        with self._below() if called in _CALL_PYTHON else nullcontext():
            result = func(*args, **kwargs)
        self.draws.seen(func, result)
        return result

    @contextmanager
    def _below(self) -> Iterator[None]:
        """Where the mode is off, by what stands under the names by which dropout is called: what a
        checkpoint computes again in the backward drops as little as its forward did."""
        if self._is_below:
            yield
            return
        held = [(place, n, getattr(place, n)) for place, names in _BELOW.items() for n in names]
        self._is_below = True
        try:
            for place, name, func in held:
                setattr(place, name, self._instead_of(func))
            yield
        finally:
            for place, name, func in held:
                setattr(place, name, func)
            self._is_below = False

    def _instead_of(self, func: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(func)
        def instead(*args: Any, **kwargs: Any) -> Any:
            return self.__torch_function__(func, (), args, kwargs)

        return instead


def in_float64() -> Lift:
    """From here on this process computes in float64, whatever default or cast is asked for."""
    own = torch.set_default_dtype
    own(torch.float64)

    @functools.wraps(own)
    def set_default_dtype(dtype: Any) -> None:
        """Ignored: the script is run in float64."""

    torch.set_default_dtype = set_default_dtype
    lift = Lift()
    lift.__enter__()
    return lift


def double_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Data that a script read in fewer digits, in float64: arguments anew, kwargs in place."""

    def wider(leaf: Any) -> Any:
        narrow = isinstance(leaf, Tensor) and leaf.is_floating_point() and not leaf.requires_grad
        return leaf.double() if narrow and leaf.dtype != torch.float64 else leaf

    for key, value in kwargs.items():
        kwargs[key] = pytree.tree_map(wider, value)
    return tuple(pytree.tree_map(wider, value) for value in args)


def casts(lift: Lift | None) -> Mapping[str, int]:
    """Lines whose casts were lifted, and how often."""
    return {} if lift is None else dict(lift.lifted)
