"""References of gradients that the step multiplies by one factor: clipped to a norm, or scaled."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from sumgrad.base.tolerances import FLOOR_FACTOR
from sumgrad.record.reference import Reference
from sumgrad.record.spec import After
from sumgrad.subjects.noise_floor import Grads
from sumgrad.subjects.program.reference.terms import Sizes
from torch import Tensor


def after_step(
    found: Mapping[str, Reference], after: After, tiers: Mapping[str, torch.dtype]
) -> dict[str, Reference]:
    """References of gradients that the step multiplies by one factor, which has its own noise."""
    whole = next(iter(found.values())).norm
    factor = after.factor(whole)
    times: dict[int, Tensor] = {}

    def multiplied(grads: Mapping[str, Tensor]) -> Grads:
        for grad in grads.values():
            if id(grad) not in times:
                times[id(grad)] = grad * factor
        return {name: times[id(grad)] for name, grad in grads.items()}

    shared = multiplied(next(iter(found.values())).grads)
    out = {}
    for tier, r in found.items():
        off = 0.0 if math.frexp(factor)[0] == 0.5 else 2 * torch.finfo(tiers[tier]).eps
        near = whole + FLOOR_FACTOR * r.norm_floor + after.eps > after.value
        if after.kind == "clip" and near and whole > 0:  # of a norm that has noise itself
            off += r.norm_floor / whole
        largest = {n: float(g.abs().max()) if g.numel() else 0.0 for n, g in shared.items()}
        out[tier] = replace(
            r,
            grads=shared,
            by_term={term: multiplied(grads) for term, grads in r.by_term.items()},
            same_dtype=multiplied(r.same_dtype),
            resolution={t: _times(own, factor) for t, own in r.resolution.items()},
            scale=_times(r.scale, factor),
            floor={n: factor * noise + off * largest[n] for n, noise in r.floor.items()},
            floor_by_term={t: _times(own, factor) for t, own in r.floor_by_term.items()},
            factor=factor,
        )
    return out


def _times(sizes: Sizes, factor: float) -> Sizes:
    return {name: factor * size for name, size in sizes.items()}
