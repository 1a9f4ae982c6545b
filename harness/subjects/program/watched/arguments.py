"""What a module's call is handed: by name, in a word, as numbers, and the tensors in it."""

from __future__ import annotations

import functools
import inspect
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from sumgrad.record.trace import A_GROUP
from torch import Tensor, nn
from torch.utils import _pytree as pytree

COMMUNICATORS = ("ProcessGroup", "DeviceMesh")
MOST_LISTED = 4096  # entries of a list that is kept


def named_arguments(module: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    """A call's arguments by the names that its forward gives them; empty where that is not told."""
    signature = _signature(type(module).forward)
    try:
        bound = signature.bind_partial(module, *args, **kwargs) if signature else None
    except TypeError:
        bound = None
    if bound is None:
        return {}
    given = dict(list(bound.arguments.items())[1:])
    for name, parameter in bound.signature.parameters.items():
        if parameter.kind == parameter.VAR_KEYWORD:
            given |= given.pop(name, {})
    return given


def with_defaults(module: nn.Module, named: Mapping[str, Any]) -> dict[str, Any]:
    """The same, with those that are not handed, where its forward says what they are then."""
    signature = _signature(type(module).forward)
    parameters = signature.parameters if signature else {}
    free = {n: p.default for n, p in parameters.items() if p.default is not p.empty}
    return free | {**named}


@functools.cache
def _signature(forward: Callable[..., Any]) -> inspect.Signature | None:
    """Once for each class: every call of a module asks for it."""
    try:
        return inspect.signature(inspect.unwrap(forward))
    except (TypeError, ValueError):
        return None


def as_numbers(value: Any) -> Tensor | None:
    """(n,) a list of names or numbers, as one of each row: of a name its checksum."""
    if not isinstance(value, list | tuple) or not 0 < len(value) <= MOST_LISTED:
        return None
    if not all(isinstance(v, str) or (isinstance(v, int | float) and abs(v) < 1e15) for v in value):
        return None
    return torch.tensor(
        [zlib.crc32(v.encode()) if isinstance(v, str) else v for v in value], dtype=torch.float64
    )


def in_a_word(value: Any) -> str:
    """What an argument is, in a word or two, and of numbers the number."""
    if isinstance(value, Tensor):
        return f"a tensor of {str(value.dtype).removeprefix('torch.')}"
    if value is None or isinstance(value, bool | int | float | str):
        return "nothing" if value is None else repr(value)[:40]
    if any(cls.__name__ in COMMUNICATORS for cls in type(value).__mro__):
        return A_GROUP
    return f"a {type(value).__name__}"


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of a module's output or arguments, in order."""
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif not isinstance(leaf, str | bytes | int | float | type(None)):
            held = getattr(leaf, "__dict__", {})
            yield from (v for v in held.values() if isinstance(v, Tensor))
