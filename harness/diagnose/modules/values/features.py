"""Of vectors that are wrong, the features: those of some heads, of one part of a fused output."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from sumgrad.diagnose.modules.values.matching import vectors
from sumgrad.diagnose.modules.values.seen import COARSE, TOLERANCES, Seen
from sumgrad.diagnose.modules.values.whole import by_module
from sumgrad.record.trace import Traces
from torch import Tensor

MOST_VECTORS = 64  # of each call, that are compared
MAX_ELEMENTS = 1 << 22  # vectors times vectors times features
FEWEST, RIGHT = 4, 0.25  # features; part of them that must be right for a vector to be told


def wrong_features(
    traces: Traces, seen: Sequence[Seen], dtype: str
) -> tuple[list[int], int] | None:
    """The features that are wrong in some vector, the same in each call, and of how many; None
    where a vector is none of the single process's in enough of its features, or where all of them
    are wrong."""
    if not seen:
        return None
    tolerance = TOLERANCES.get(dtype, COARSE)
    whole = by_module(traces.single, seen[0].call.module.__eq__)
    wrong: Tensor | None = None
    for s in seen:
        wanted = whole.get((s.call.module, s.call.part))
        if wanted is None or s.wrong is None:
            return None
        trace = traces.ranks[s.rank]
        got = vectors(trace.output_of(s.call))[s.wrong][:MOST_VECTORS]
        told = _wrong(got, wanted.outputs, tolerance)
        if told is None or (wrong is not None and not torch.equal(told, wrong)):
            return None
        wrong = told
    if wrong is None or bool(wrong.all()):
        return None
    return wrong.nonzero()[:, 0].tolist(), len(wrong)


def _wrong(got: Tensor, wanted: Tensor, tolerance: float) -> Tensor | None:
    """(C,) which features are wrong in some vector; each is held against the one that it is most
    of."""
    n, width = got.shape
    if width != wanted.shape[1] or width < FEWEST or n * wanted.numel() > MAX_ELEMENTS:
        return None
    bound = tolerance * float(wanted.abs().max())
    near = (got[:, None, :] - wanted).abs() <= bound  # (n, N, C)
    often = (near & (wanted != 0)).sum(2)
    most = often.amax(1)
    alone = (often == most[:, None]).sum(1) == 1
    if not bool(((most >= RIGHT * width) & alone).all()):
        return None
    out = ~near[torch.arange(n), often.argmax(1)]
    return out.any(0)
