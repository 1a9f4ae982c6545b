"""A weight whose gradient is made of gradients and inputs of calls that do not belong together.

As where a schedule keeps both, to make a weight's gradient later by hand: no backward gives it, and
each alone is right. The gradient is taken apart into the products of any call's gradient with any
call's input.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from sumgrad.record.trace import INTO, Trace
from torch import Tensor

CLOSE = 1e-7  # of the length of a gradient, and of a share
FEWEST_MORE = 2  # numbers of a weight for each share that is solved for
MOST = 256  # shares
MOST_NUMBERS = 1 << 24  # of all products together


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    """On a rank the gradient of one call of a layer, and the call whose input it stands beside."""

    rank: int
    call: int
    beside: int


def paired_otherwise(traces: Mapping[int, Trace], name: str, measured: Tensor) -> list[Paired]:
    """Of a weight (out, in): all pairs that its gradient is made of, each counted as often; empty
    where it is not made of such pairs alone, or each call has its own."""
    module, _, own = name.rpartition(".")
    if own != "weight" or measured.dim() != 2:
        return []
    held = {rank: _of_calls(trace, module) for rank, trace in traces.items()}
    pairs = [
        Paired(rank=rank, call=i, beside=j)
        for rank, (inputs, gradients) in held.items()
        for i, g in gradients.items()
        for j, x in inputs.items()
        if len(g) == len(x) and (g.shape[1], x.shape[1]) == tuple(measured.shape)
    ]
    many = len(pairs) * measured.numel() > MOST_NUMBERS
    if not pairs or many or len(pairs) > min(MOST, measured.numel() // FEWEST_MORE):
        return []
    products = [(held[p.rank][1][p.call].T @ held[p.rank][0][p.beside]).reshape(-1) for p in pairs]
    shares = _shares(torch.stack(products, 1), measured.double().reshape(-1))
    if shares is None:
        return []
    counts = shares.abs() > CLOSE * float(shares.abs().max())
    told = [pair for pair, is_there in zip(pairs, counts.tolist(), strict=True) if is_there]
    once = len({(p.rank, p.call) for p in told}) == len(told)
    common = shares[counts]
    if not once or float((common - common[0]).abs().max()) > CLOSE * float(common[0].abs()):
        return []
    return told if any(p.call != p.beside for p in told) else []


def _of_calls(trace: Trace, module: str) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """By number of the call, (n, in) what went in, and (n, out) the gradient of what came out."""
    inputs, gradients = {}, {}
    for call, output, gradient in zip(trace.calls, trace.outputs, trace.gradients, strict=True):
        if call.recomputed or call.part or not output.dim():
            continue
        if call.module == f"{INTO}{module}":
            inputs[call.number] = output.double().reshape(-1, output.shape[-1])
        elif call.module == module and gradient is not None:
            gradients[call.number] = gradient.double().reshape(-1, gradient.shape[-1])
    return inputs, gradients


def _shares(products: Tensor, measured: Tensor) -> Tensor | None:
    """(k,) how often each of (n, k) products is in a gradient; None where they are not it."""
    size = float(measured.norm())
    if not size or not bool(torch.isfinite(products).all() & torch.isfinite(measured).all()):
        return None
    shares = torch.linalg.lstsq(products, measured[:, None], driver="gelsd").solution[:, 0]
    return shares if float((products @ shares - measured).norm()) < CLOSE * size else None
