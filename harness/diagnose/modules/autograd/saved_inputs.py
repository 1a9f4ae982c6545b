"""A linear layer whose backward multiplies its gradient with another input than its forward had.

What autograd gave the weight in one backward is gᵀx. The gradients g that reached the layer and all
that went through modules are known, so another x is found by its product: a buffer that the next
micro-batch was received into, a slot of an offload, a tensor that was changed in place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from sumgrad.record.trace import INTO, Call, Trace
from torch import Tensor

CLOSE = 1e-7  # of the length of a gradient
MOST = 64  # tensors that are tried for one


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedOtherwise:
    """Of one rank and parameter: the gradient of which call, and what it is multiplied with."""

    rank: int
    name: str
    call: Call
    saved: Call


def saved_otherwise(rank: int, trace: Trace, name: str) -> list[SavedOtherwise]:
    """Of a weight (out, in) and each backward of it; empty unless each backward is one product, and
    some of another input than its own."""
    module, _, own = name.rpartition(".")
    if own != "weight" or name not in trace.own:
        return []
    found = []
    for gave in trace.own[name].double():
        pair = next(_products(trace, module, gave, trace.own_at[name]), None)
        if pair is None:
            return []
        found.append(pair)
    return [
        SavedOtherwise(rank=rank, name=name, call=call, saved=saved)
        for call, saved in found
        if saved.module.removeprefix(INTO) != module or saved.number != call.number
    ]


def _products(trace: Trace, module: str, gave: Tensor, at: Tensor) -> Iterator[tuple[Call, Call]]:
    """Calls of a layer, and what went in with which its gradient makes what a backward gave: its
    own first."""
    for i, call in enumerate(trace.calls):
        gradient = trace.gradients[i]
        if call.module != module or call.part or gradient is None or gradient.dim() < 2:
            continue
        g = gradient.double().reshape(-1, gradient.shape[-1])
        tried = sorted(_inputs(trace, len(g), module), key=lambda j: _rank_of(trace.calls[j], call))
        for j in tried[:MOST]:
            x = trace.outputs[j].double()
            product = (g.T @ x.reshape(len(g), -1)).reshape(-1)
            if int(at.max()) < product.numel() and _same(product[at], gave):
                yield call, trace.calls[j]


def _inputs(trace: Trace, num: int, module: str) -> list[int]:
    """What has as many vectors, and as many features as what goes into a layer."""
    into = [o.shape[-1] for c, o in zip(trace.calls, trace.outputs, strict=True)
            if c.module == f"{INTO}{module}" and o.dim()]  # fmt: skip
    return [
        j for j, held in enumerate(trace.outputs)
        if held.dim() > 1 and held.shape[-1] in into[:1] and held.numel() == num * held.shape[-1]
    ]  # fmt: skip


def _rank_of(into: Call, call: Call) -> int:
    """Its own input first, then that of its other calls."""
    mine = into.module == f"{INTO}{call.module}"
    return 0 if mine and into.number == call.number else 1 if mine else 2


def _same(a: Tensor, b: Tensor) -> bool:
    size = float(b.norm())
    return size > 0 and bool(torch.isfinite(a).all()) and float((a - b).norm()) < CLOSE * size
