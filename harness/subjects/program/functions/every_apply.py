"""Every call of a torch.autograd.Function, also by an `apply` that a user keeps under another name.

`Function.apply` asks the class below it each time: there something else is put in its place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Function

FROM_A_USERS_LINE = 4  # frames from a function that stands around a call to the line that calls
Around = Callable[[Any, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


def around_every_apply(around: Around) -> Callable[[], None]:
    """From here on around(class, call, args, kwargs) gives what a call gives; what this gives ends
    it. Not inside of what is compiled, nor of torch.func's transforms."""
    below: Any = Function.__mro__[1]
    before = below.__dict__.get("apply")

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        call = super(below, cls).apply if before is None else before.__get__(None, cls)
        if torch.compiler.is_dynamo_compiling() or not issubclass(cls, Function):
            return call(*args, **kwargs)
        return around(cls, call, args, kwargs)

    def end() -> None:
        if before is None:
            del below.apply
        else:
            below.apply = before

    below.apply = classmethod(apply)
    return end
