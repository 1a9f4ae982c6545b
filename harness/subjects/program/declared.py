"""What a Program says of its step, by attributes that no simple step needs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from sumgrad.base.errors import Broken
from sumgrad.record.spec import CLIP_EPS, After


def after_of(program: Any) -> After | None:
    """What it does to reduced gradients: `after = "clip"` with `max_norm`, or "scale" with `scale`.

    Broken if it says something else.
    """
    kind = getattr(program, "after", None)
    if kind is None or callable(kind):
        return None
    named = {"clip": "max_norm", "scale": "scale"}
    if not isinstance(kind, str) or kind not in named:
        raise Broken(f"after: got {kind!r}, expected 'clip' or 'scale'")
    said, eps = getattr(program, named[kind], None), getattr(program, "clip_eps", CLIP_EPS)
    value, least = _number(said), _number(eps)
    if value is None or value <= 0:
        raise Broken(f"after = {kind!r} needs `{named[kind]}`, a number above 0; got {said!r}")
    if least is None or least < 0:
        raise Broken(f"clip_eps: got {eps!r}, expected a number, at least 0")
    return After(kind="clip" if kind == "clip" else "scale", value=value, eps=least)


def compared_buffers(program: Any) -> tuple[str, ...]:
    """`compare_buffers = ["*.running_mean"]`, names or patterns, or True. Broken if malformed."""
    said = getattr(program, "compare_buffers", None)
    if said is None or isinstance(said, bool):
        return ("*",) if said else ()
    patterns = tuple(said) if isinstance(said, Iterable) else (said,)
    if isinstance(said, str) or not all(isinstance(pattern, str) for pattern in patterns):
        raise Broken(f"compare_buffers: got {said!r}, expected True or a list of names or patterns")
    return patterns


def microbatches_of(program: Any) -> int | None:
    """`num_microbatches`, where it says so. Broken if that is no number of them."""
    said = getattr(program, "num_microbatches", None)
    if said is None or callable(said):
        return None
    number = _number(said)
    if number is None or number < 1 or number != int(number):
        raise Broken(f"num_microbatches: got {said!r}, expected an integer >= 1")
    return int(number)


def _number(said: Any) -> float | None:
    """A finite number, whoever's type it has; None for anything else."""
    try:
        number = float(said) if not isinstance(said, bool | str) else math.nan
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
    return number if math.isfinite(number) else None
