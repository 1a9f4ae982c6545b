"""What goes into a collective, and what goes on in place of its result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from sumgrad.diagnose.modules.over_ranks.collectives import (
    Collective,
    mixed_with,
    slices,
    times_of,
    untouched,
)
from sumgrad.record.trace import Traces
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What a rank put in is `factor` times what `module` gave it."""

    module: str
    factor: float


def sources(traces: Traces, op: Collective, rank: int, *, back: bool) -> list[Source]:
    """Of a module's last tensor before it, or of a slice of its features; the nearest first."""
    trace, one = traces.ranks[rank], op.by_rank[rank]
    given = one.given.double().reshape(-1)
    out: list[Source] = []
    for call, output, gradient in reversed(
        list(zip(trace.calls, trace.outputs, trace.gradients, strict=True))
    ):
        at, value = (call.operation_back, gradient) if back else (call.operation, output)
        if at is None or value is None or at > one.number or call.module in trace.left_out:
            continue
        for part in slices(value, given.numel()):
            factor = times_of(given, part)
            if factor is not None:
                out.append(Source(module=call.module, factor=factor))
    return out


@dataclass(frozen=True, slots=True, kw_only=True)
class GoesOn:
    """What stands where a collective's result belongs: in `where`, in words.

    own: elements that are what the rank had before; of `numel`. times: all of it is so many times
    the result.
    """

    where: str
    own: int
    numel: int
    times: float = 1.0


def goes_on(op: Collective, tensors: Sequence[tuple[str, Tensor]]) -> GoesOn | None:
    """Where the result of a gather should stand: the first of these tensors that has zeros, or
    nothing but the rank's own, in place of others' numbers. tensors: what came after it, with what
    it is in words.
    """
    one = op.own
    if one.got is None or op.family not in ("all_gather", "all_to_all"):
        return None
    got, own = one.got.double().reshape(-1), untouched(op)
    if own is None or torch.equal(got, own) or got.numel() < 2:
        return None
    numel = int((got != own).sum())
    for where, tensor in tensors:
        for part in slices(tensor, got.numel()):
            found = mixed_with(part, got, own)
            if found and _is_one_stretch(part != got, got == own):
                return GoesOn(where=where, own=found, numel=numel)
        if tensor.numel() != len(got):
            continue
        flat = tensor.double().reshape(-1)
        if _has_only(flat, own, got):
            return GoesOn(where=where, own=numel, numel=numel)
        lacks = _lacking(flat, got)
        if lacks is not None and _is_one_stretch(lacks, got == own):
            return GoesOn(where=where, own=int(lacks.sum()), numel=numel)
    return None


def _is_one_stretch(lacks: Tensor, own: Tensor) -> bool:
    """Whether elements follow one another, but for the rank's own, as what has not come yet does: a
    mask leaves out some of each row."""
    at = lacks.nonzero()[:, 0]
    return len(at) > 0 and bool((lacks | own)[at[0] : at[-1] + 1].all())


def _has_only(value: Tensor, own: Tensor, got: Tensor) -> bool:
    """Whether a tensor has the rank's own numbers and zeros, in whatever order."""
    live, mine = value[value != 0], own[own != 0]
    if not len(mine) or len(live) != len(mine) or len(mine) >= int(got.count_nonzero()):
        return False
    return torch.equal(live.sort().values, mine.sort().values)


def _lacking(value: Tensor, got: Tensor) -> Tensor | None:
    """(n,) which numbers of the result a tensor has not, in whatever order, zeros in their place;
    None where it has others, or all."""
    live = value[value != 0].sort().values
    if not len(live):
        return None
    at = torch.searchsorted(live, got).clamp(max=len(live) - 1)
    lacks = (live[at] != got) & (got != 0)
    has = int(got.count_nonzero()) - int(lacks.sum())
    return lacks if bool(lacks.any()) and has == len(live) else None


def goes_on_in_sum(op: Collective, off: Tensor | None) -> GoesOn | None:
    """What stands in place of a right result, by what a tensor that has it in it is off: the
    rank's own numbers, or so many times the result; None where it is off otherwise."""
    one, own = op.own, untouched(op)
    if off is None or one.got is None or own is None or one.got.numel() != len(off):
        return None
    got = one.got.double().reshape(-1)
    lacks, size = own - got, float(got.abs().max()) * 1e-9
    is_right, is_own = off.abs() <= size, (off - lacks).abs() <= size
    found = int((is_own & ~is_right).sum()) if bool((is_right | is_own).all()) else 0
    if found:
        return GoesOn(where="", own=found, numel=int((lacks.abs() > size).sum()))
    more = times_of(off, got)
    return None if more is None else GoesOn(where="", own=0, numel=len(off), times=1 + more)
