"""What every module gave in the single process, as vectors, and the rows that they are of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from sumgrad.diagnose.modules.values.matching import Match, vectors
from sumgrad.record.trace import Trace
from torch import Tensor

MAX_VECTORS = 512  # of which the directions are counted


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Whole:
    """All vectors of one part of a module's output in the single process, and their gradients.

    by_term: (T, N, C) gradients of each term. rows: (N,) of the batch, where the output has them
    first. each: vectors of one call. flat: rows and positions may be one dimension. directions: of
    all gradients: among as few as it has factors, each vector fits by chance.
    """

    outputs: Tensor
    gradients: Tensor
    by_term: Tensor | None = None
    rows: Tensor | None = None
    each: int = 0
    inner: int = 0
    flat: bool = False
    directions: int = 0


def by_module(trace: Trace, wanted: Callable[[str], bool]) -> dict[tuple[str, int], Whole]:
    """wanted: whether a module is looked at."""
    num_rows = len(next(iter((trace.batch or {}).values()), ()))
    shapes: dict[tuple[str, int], list[tuple[int, ...]]] = {}
    held: dict[tuple[str, int], list[tuple[Tensor, Tensor]]] = {}
    for call, output, gradient in zip(trace.calls, trace.outputs, trace.gradients, strict=True):
        if call.recomputed or call.module in trace.left_out or not wanted(call.module):
            continue
        reached = torch.zeros_like(output) if gradient is None else gradient
        held.setdefault((call.module, call.part), []).append((vectors(output), vectors(reached)))
        shapes.setdefault((call.module, call.part), []).append(tuple(output.shape))
    terms: dict[tuple[str, int], list[Tensor]] = {}
    for i, (call, output) in enumerate(zip(trace.calls, trace.outputs, strict=True)):
        if (call.module, call.part) in held and not call.recomputed and trace.by_term:
            own = [torch.zeros_like(output) if g[i] is None else g[i]
                   for g in trace.by_term.values()]  # fmt: skip
            found = torch.stack([vectors(g) for g in own if g is not None])
            terms.setdefault((call.module, call.part), []).append(found)
    out = {}
    for key, pairs in held.items():
        if len({o.shape[1] for o, _ in pairs}) == 1:
            outputs = torch.cat([o for o, _ in pairs])
            first = {shape[0] if shape else 0 for shape in shapes[key]}
            known = first == {num_rows} and len(outputs) % num_rows == 0
            each = len(pairs[0][0]) // num_rows if known else 0
            rows = torch.arange(num_rows).repeat_interleave(each).repeat(len(pairs))
            gradients = torch.cat([g for _, g in pairs])
            out[key] = Whole(
                outputs=outputs,
                gradients=gradients,
                by_term=torch.cat(terms[key], dim=1) if key in terms else None,
                rows=rows if known and len(rows) == len(outputs) else None,
                each=len(pairs[0][0]),
                inner=_inner(shapes[key]),
                flat=_is_flat(len(pairs[0][0]), trace.batch or {}),
                directions=_directions(gradients),
            )
    return out


def _inner(shapes: Sequence[tuple[int, ...]]) -> int:
    found = {shape[-2] if len(shape) > 2 else 0 for shape in shapes}
    return found.pop() if len(found) == 1 else 0


def _directions(gradients: Tensor) -> int:
    """The rank of (N, C) vectors, each of length one."""
    live = gradients[gradients.norm(dim=1) > 0][:MAX_VECTORS, :]
    unit = live / live.norm(dim=1, keepdim=True)
    return int(torch.linalg.matrix_rank(unit, rtol=1e-6)) if unit.numel() else 0


def _is_flat(num: int, batch: Mapping[str, Tensor]) -> bool:
    """Whether that many vectors are those of all rows and positions in one dimension."""
    lengths = {t.shape[1] - cut for t in batch.values() if t.dim() > 1 for cut in (0, 1)}
    return num not in lengths and any(num == len(t) * n for t in batch.values() for n in lengths)


def rows_of(where: Match, rows: Tensor, num: int) -> Tensor:
    """(n,) the row of the batch that each vector is of, -1 where it may be of several.

    num: rows that the rank has, first in its output, or 0. A row is told by all its vectors.
    """
    out = torch.full((len(where.picked),), -1)
    whole = _whole_rows(where, rows, num)
    for i, may_be in enumerate(where.found):
        found = rows[may_be].unique() if whole is None else whole[i]
        if len(found) == 1:
            out[i] = found[0]
    return out


def vectors_a_row(rows: Tensor) -> int:
    """How many vectors each row has, where they stand row by row; else 0."""
    each = int((rows == 0).sum())
    num = len(rows) // each if each else 0
    return each if torch.equal(rows, torch.arange(num).repeat_interleave(each)) else 0


def _whole_rows(where: Match, rows: Tensor, num: int) -> list[Tensor] | None:
    """Of each vector, the rows that all vectors of its row may be of, in their order."""
    each, theirs = len(where.found) // max(1, num), vectors_a_row(rows)
    wanted = len(rows) // theirs if theirs else 0
    if num < 1 or len(where.picked) != num * each or not 0 < each <= theirs:
        return None
    found = where.found.reshape(num, each, wanted, theirs)
    place = torch.arange(each)
    fits = torch.zeros(num, wanted, dtype=torch.bool)
    for start in range(theirs - each + 1):  # a stretch of each row's positions
        fits |= found[:, place, :, place + start].all(0)
    if not bool(fits.any(1).all()):
        return None
    return [fits[i // each].nonzero()[:, 0] for i in range(num * each)]
