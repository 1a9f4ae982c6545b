"""What is set on a module beside its parameters, in words: numbers, names and choices."""

from __future__ import annotations

import torch
from torch import nn

MOST_ENTRIES = 8  # of a tuple, a list or a dict
MOST_SETTINGS = 64  # of one module
MOST_CHARACTERS = 60
TOLD_ELSEWHERE = {"training"}


def settings_of(module: nn.Module) -> dict[str, str]:
    """Attribute -> its value in words, of those that are plain values and not private."""
    out: dict[str, str] = {}
    for name, value in vars(module).items():
        if name.startswith("_") or name in TOLD_ELSEWHERE or len(out) >= MOST_SETTINGS:
            continue
        if _is_plain(value) and len(shown := repr(value)) <= MOST_CHARACTERS:
            out[name] = shown
    return out


def settings_in(config: object) -> dict[str, str]:
    """The same of an object that a module is configured by, those that are one plain value."""
    own = getattr(config, "__dict__", {})
    return {
        f"config.{name}": repr(value)
        for name, value in own.items()
        if not name.startswith("_") and isinstance(value, bool | int | float | str)
        and len(repr(value)) <= MOST_CHARACTERS
    }  # fmt: skip


def _is_plain(value: object, deep: bool = True) -> bool:
    if value is None or isinstance(value, bool | int | float | str | torch.dtype):
        return True
    if not deep or not isinstance(value, tuple | list | dict) or len(value) > MOST_ENTRIES:
        return False
    inside = [*value.keys(), *value.values()] if isinstance(value, dict) else value
    return bool(inside) and all(_is_plain(one, deep=False) for one in inside)
