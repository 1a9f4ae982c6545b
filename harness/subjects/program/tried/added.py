"""What a line puts somewhere, added to what is there instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Of functions that put something in place of what is there, those that add it.
ADDING: dict[str, Callable[..., Any]] = {
    "scatter": Tensor.scatter_add,
    "scatter_": Tensor.scatter_add_,
    "index_copy": Tensor.index_add,
    "index_copy_": Tensor.index_add_,
    "copy_": Tensor.add_,
}


def added(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The call with that; as it is where it puts nothing."""
    name = str(getattr(func, "__name__", ""))
    if name == "__setitem__":
        target, index, value = args
        return func(target, index, target[index] + value)
    if name in ("index_put", "index_put_"):
        return func(*args[:3], **{**kwargs, "accumulate": True})
    if name in ADDING:
        with torch._C.DisableTorchFunction():
            return ADDING[name](*args, **kwargs)
    return func(*args, **kwargs)
