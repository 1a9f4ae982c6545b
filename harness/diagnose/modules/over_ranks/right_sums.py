"""What a collective's sum should be, where something is right before it and wrong after it.

The single process has it: as a module's output, or as its gradient, in the order of vectors in
which a rank has something that is right.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from sumgrad.diagnose.modules.over_ranks.collectives import MAX_SLICES, Collective, part_of_rank
from sumgrad.diagnose.modules.values.matching import vectors
from sumgrad.diagnose.modules.values.seen import Seen
from sumgrad.diagnose.modules.values.whole import Whole
from sumgrad.diagnose.modules.where.look import Look
from sumgrad.record.trace import INTO, Trace, Traces
from torch import Tensor

MAX_ORDERS = 32  # orders of vectors that are tried


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Truth:
    """What a collective's sum should be: `module`'s output, or its gradient, in one process.

    target: (n,) as the tensor that goes in, of these columns of the module's. beside: (n,) each,
    what may be in it besides the sum: a bias, what goes around it.
    """

    module: str
    target: Tensor
    columns: slice
    beside: tuple[Tensor, ...] = ()


def truths(
    op: Collective,
    look: Look,
    single: Trace,
    whole: Mapping[tuple[str, int], Whole],
    *,
    back: bool,
    factor: float,
) -> Iterator[Truth]:
    """What may be right there: every module's values, in the order of vectors of some tensor that
    is known to be right on this rank, or on all of its group one after the other."""
    numel = op.own.given.numel()
    for order in _orders(op, look, len(next(iter((single.batch or {}).values()), ()))):
        if not len(order) or numel % len(order):
            continue
        width = numel // len(order)
        for (module, _), held in whole.items():
            values = held.gradients if back else held.outputs
            if (
                width > values.shape[1]
                or values.shape[1] % width
                or int(order.max()) >= len(values)
            ):
                continue
            for start in range(0, values.shape[1], width)[:MAX_SLICES]:
                target = values[order, start : start + width] * factor
                if not bool(target.any()):
                    continue
                columns = slice(start, start + width)
                around = _around(module, whole, single, order, columns, back)
                beside = tuple(t.reshape(-1) * factor for t in around)
                yield Truth(
                    module=module, target=target.reshape(-1), columns=columns, beside=beside
                )


def _around(
    module: str,
    whole: Mapping[tuple[str, int], Whole],
    single: Trace,
    order: Tensor,
    columns: slice,
    back: bool,
) -> Iterator[Tensor]:
    """What is added to a sum: in the forward what goes into the module, as a residual, and its
    biases; in the backward, of what goes into it, the gradient of its output."""
    other = module.removeprefix(INTO) if back else f"{INTO}{module}"
    held = whole.get((other, 0))
    if other != module and held is not None and int(order.max()) < len(held.outputs):
        values = held.gradients if back else held.outputs
        if columns.stop <= values.shape[1]:
            yield values[order, columns]
    for name, param in () if back else single.params.items():
        inside = not module or name.startswith(f"{module}.")
        if inside and param.dim() == 1 and param.numel() >= columns.stop:
            yield param.double()[columns].expand(len(order), -1)


def _orders(op: Collective, look: Look, num_rows: int) -> list[Tensor]:
    """Which of the single process's vectors stand where: each order once."""
    seen = {
        rank: {
            (m, s.call.number, s.call.part): s
            for m in look.modules
            for s in look.seen[m]
            if s.rank == rank and s.forward == "right" and s.where is not None
        }
        for rank in op.ranks
    }
    found: list[Tensor | None] = []
    if op.family == "reduce_scatter":
        for key in seen[op.ranks[0]]:
            parts = [_order([own[key]], num_rows) for own in seen.values() if key in own]
            known = [part for part in parts if part is not None]
            if len(known) == len(seen):
                found.append(torch.cat(known))
    for key, s in seen[op.rank].items():
        own = _order([s], num_rows)
        if own is None:  # what one rank has not, as of a table that is cut, another has
            together = [o[key] for o in seen.values() if key in o and o[key].shape == s.shape]
            own = _order(together, num_rows)
        found.append(own)
    found += _stretches(op.own.given, look, num_rows)
    out: list[Tensor] = []
    for order in found:
        if order is not None and not any(torch.equal(order, known) for known in out):
            out.append(order)
    return out[:MAX_ORDERS]


def _stretches(given: Tensor, look: Look, num_rows: int) -> Iterator[Tensor]:
    """Rows one after the other, whole: what a rank reads where nobody tells its rows."""
    widths = {s.shape[1] for m in look.modules for s in look.seen[m] if len(s.shape) == 3}
    for each in sorted({1, *widths}):
        for num in range(1, num_rows + 1):
            if num * each > given.numel() or given.numel() % (num * each):
                continue
            if given.dim() > 1 and num * each != given.numel() // given.shape[-1]:
                continue
            for first in range(num_rows - num + 1):
                yield torch.arange(first * each, (first + num) * each)


def _order(seen: Sequence[Seen], num_rows: int) -> Tensor | None:
    """(n,) the single process's vector for each of a tensor that these ranks have: the one that it
    is, or that it must be as a stretch of its row. None where several may be."""
    held = [s.where for s in seen if s.where is not None]
    if any(len(w.picked) != len(w.found) or len(w.found) != len(held[0].found) for w in held):
        return None
    found = torch.ones_like(held[0].found)
    for w in held:
        found &= w.found | ~w.found.any(1, keepdim=True)
    if bool((found.sum(1) == 1).all()):
        return found.long().argmax(1)
    shape, theirs = seen[0].shape, found.shape[1] // num_rows if num_rows else 0
    num = shape[0] if len(shape) > 2 else 0
    if not num or not theirs or found.shape[1] % num_rows or len(found) % num:
        return None
    each = len(found) // num
    at, by_row = torch.arange(each), found.reshape(num, each, num_rows, theirs)
    orders = []
    for start in range(theirs - each + 1):
        fits = by_row[:, at, :, at + start].all(0)
        if bool((fits.sum(1) == 1).all()):
            rows = fits.long().argmax(1)
            orders.append((rows[:, None] * theirs + start + at).reshape(-1))
    return orders[0] if len(orders) == 1 else None


def off_by(traces: Traces, op: Collective, truth: Truth, *, back: bool) -> Tensor | None:
    """(m,) what the rank's first tensor after a collective, that should be the truth's target, is
    too much in each element of its result; None where it has none of that size."""
    trace, number = traces.ranks[op.rank], op.own.number
    for call, output, gradient in zip(trace.calls, trace.outputs, trace.gradients, strict=True):
        at, value = (call.operation_back, gradient) if back else (call.operation, output)
        if call.module == truth.module and at is not None and value is not None and at > number:
            held = vectors(value)
            if held.shape[1] < truth.columns.stop:
                return None
            mine, wanted = (held[:, truth.columns].reshape(-1), part_of_rank(op, truth.target))
            return mine - wanted if mine.shape == wanted.shape else None
    return None
