"""A gradient that is a part on each rank but for what comes by another way, as by a residual.

Of a block whose sum over ranks is missing in the backward, a residual brings the whole gradient and
the block a part of the rest. Such a gradient is right as a sum of the ranks', with what all of them
have counted once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from sumgrad.diagnose.modules.values.matching import compare_gradient, vectors
from sumgrad.diagnose.modules.values.parts import Groups
from sumgrad.diagnose.modules.values.seen import Seen, one_factor
from sumgrad.diagnose.modules.values.whole import Whole
from sumgrad.record.trace import Call, Trace, Traces
from torch import Tensor

SUMMED = "a sum: "  # before the words of a collective
CLOSE = 1e-9  # of the largest number: what ranks have alike
FEWEST = 4  # numbers that differ


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingSum:
    """Over an axis, of what reaches an output on ranks that hold the same; kept: the module whose
    output has, or what goes into it, the gradient that is whole on each of them; or SUMMED and the
    collective that gives it. of: likewise, what the gradient is of that is right as a sum."""

    axis: str
    ranks: tuple[int, ...]
    kept: str
    of: str


def missing_sum(
    traces: Traces,
    found: Sequence[Seen],
    whole: Mapping[tuple[str, int], Whole],
    groups: Groups,
    tolerance: float,
) -> MissingSum | None:
    """Of gradients of one module that are wrong on each rank; the first that is right so."""
    for axis, sets in groups:
        for ranks in (own for own in sets if len(own) > 1):
            for s in (s for s in found if s.rank == ranks[0]):
                wanted = whole.get((s.call.module, s.call.part))
                terms = _of_the_same_vectors(traces, found, s, ranks)
                if wanted is None or not terms:
                    continue
                is_right = partial(_is_right, s=s, wanted=wanted, tolerance=tolerance)
                kept = whole_but_for(traces, ranks, terms, is_right)
                if kept is not None:
                    return MissingSum(axis=axis, ranks=tuple(ranks), kept=kept, of=s.call.module)
    return None


def _of_the_same_vectors(
    traces: Traces, found: Sequence[Seen], s: Seen, ranks: Sequence[int]
) -> list[Tensor]:
    """What reached the same output as in `s` on each of the ranks; nothing if not all have it."""
    out = []
    for rank in ranks:
        key = rank, s.call.number, s.call.part
        of_key = (one for one in found if (one.rank, one.call.number, one.call.part) == key)
        own = next(of_key, None)
        gradient = None if own is None else traces.ranks[own.rank].gradient_of(own.call)
        if own is None or own.where is None or s.where is None or gradient is None:
            return []
        if not torch.equal(own.where.found, s.where.found):
            return []
        out.append(gradient)
    return out


def _is_right(total: Tensor, s: Seen, wanted: Whole, tolerance: float) -> bool:
    """Up to one factor of all vectors."""
    assert s.where is not None
    found = compare_gradient(vectors(total), wanted.gradients, s.where, tolerance, wanted.by_term)
    return bool(found.right.all()) and one_factor(found)


def whole_but_for(
    traces: Traces,
    ranks: Sequence[int],
    terms: Sequence[Tensor],
    is_right: Callable[[Tensor], bool],
) -> str | None:
    """The module whose gradient all ranks have alike, or SUMMED and a sum that gives it, and with
    which counted once the sum of these terms, one of each rank, is right; None where none is."""
    if len({t.shape for t in terms}) > 1 or float((terms[0] - terms[-1]).abs().max()) == 0:
        return None
    total, numel = torch.stack(list(terms)).double().sum(0), terms[0].numel()
    for name, kept in _alike(traces, ranks, numel):
        if is_right(total - (len(ranks) - 1) * kept.double().reshape(total.shape)):
            return name
    return None


def _alike(traces: Traces, ranks: Sequence[int], numel: int) -> Iterator[tuple[str, Tensor]]:
    """Gradients of the first rank's calls, of so many numbers, that the other ranks have, too; and
    what sums gave them."""
    first = traces.ranks[ranks[0]]
    for call, gradient in zip(first.calls, first.gradients, strict=True):
        if gradient is None or gradient.numel() != numel or len(gradient.unique()) < FEWEST:
            continue
        bound = CLOSE * float(gradient.abs().max())
        theirs = [_of_the_same(traces.ranks[rank], call) for rank in ranks[1:]]
        if all(t is not None and t.shape == gradient.shape
               and float((t - gradient).abs().max()) <= bound for t in theirs):  # fmt: skip
            yield call.module, gradient
    for one in first.exchanges:
        words = next(iter(first.operations[one.number : one.number + 1]), "")
        if one.got is None or one.got.numel() != numel or not words.startswith("allreduce(SUM)"):
            continue
        others = [[e.got for e in traces.ranks[rank].exchanges] for rank in ranks[1:]]
        if len(one.got.unique()) >= FEWEST and all(
            any(got is not None and torch.equal(got, one.got) for got in held) for held in others
        ):
            yield f"{SUMMED}{words}", one.got


def _of_the_same(trace: Trace, call: Call) -> Tensor | None:
    key = (call.module, call.number, call.part, call.recomputed)
    for other, gradient in zip(trace.calls, trace.gradients, strict=True):
        if (other.module, other.number, other.part, other.recomputed) == key:
            return gradient
    return None
