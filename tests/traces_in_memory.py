"""Traces of a step without a step: calls of modules, what they gave and what reached it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from sumgrad.record.trace import Call, Trace

MODULES = ("first", "second", "third")


def trace(held: Sequence[tuple[str, torch.Tensor, torch.Tensor | None]], **more) -> Trace:
    """Calls in this order; a module's second entry is its second call."""
    calls, seen = [], dict[str, int]()
    for name, _, gradient in held:
        number = seen[name] = seen.get(name, -1) + 1
        calls.append(
            Call(
                module=name,
                number=number,
                part=0,
                operation=0,
                operation_back=None if gradient is None else 0,
                recomputed=more.get("recomputed", False),
            )
        )
    return Trace(
        calls=tuple(calls),
        outputs=tuple(o for _, o, _ in held),
        gradients=tuple(g for _, _, g in held),
        sources={name: "Linear" for name in MODULES},
        data=more.get("data", ()),
        entered=("first",) * len(more.get("data", ())),
        batch=more.get("batch"),
    )
