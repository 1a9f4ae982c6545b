"""The vectors beside those whose gradient is wrong, in words."""

from __future__ import annotations

import math
from collections.abc import Iterator

from sumgrad.base.outcome import spans
from sumgrad.diagnose.explainers.by_modules.between import told_of
from sumgrad.diagnose.explainers.by_modules.looked import fraction_of
from sumgrad.diagnose.modules.values.matching import SAME_FACTOR
from sumgrad.diagnose.modules.values.seen import Seen, constant
from sumgrad.diagnose.modules.where.first_wrong import FirstWrong
from sumgrad.diagnose.modules.where.look import Look

MOST_FACTORS = 4  # different ones that are written out


def the_others(found: FirstWrong, ddp: int = 0) -> Iterator[str]:
    """What all vectors that are not wrong have in common, where they are not simply right. ddp: by
    what DDP divides later."""
    if found.emptied:
        yield "the others there are right"
        return
    there = told_of(found.seen)
    if with_factors(there):
        yield _own_factors(there)
        return
    factor = constant(there.factors)
    if factor is not None and abs(factor - 1) > SAME_FACTOR:
        later = f", and DDP divides by {ddp} later" if ddp > 1 else ""
        yield f"the others there have the factor {fraction_of(factor)}{later}"


def zero_on_others(look: Look, found: FirstWrong) -> Iterator[str]:
    """Other ranks where all of it is zero, and in the single process it is not."""
    by_rank: dict[int, list[Seen]] = {}
    for s in look.seen[found.wrong]:
        if not s.call.recomputed:
            by_rank.setdefault(s.rank, []).append(s)
    zero = [
        rank
        for rank, own in by_rank.items()
        if rank not in found.ranks and all(s.backward == "right" and _is_zero(s) for s in own)
    ]
    if zero:
        yield f"on rank {spans(sorted(zero))} it is zero, and in the single process it is not"


def _is_zero(seen: Seen) -> bool:
    return constant(seen.factors) == 0


def with_factors(seen: Seen) -> bool:
    """Whether the vectors that are right are so only up to factors that differ."""
    told = seen.factors is not None and not bool(seen.factors.isnan().all())
    return told and constant(seen.factors) is None


def _own_factors(seen: Seen) -> str:
    """The factors of vectors that are right but for them, on one rank in one call."""
    by_factor: dict[str, list[int]] = {}
    if seen.where is not None and seen.factors is not None:
        for at, factor in zip(seen.where.picked.tolist(), seen.factors.tolist(), strict=True):
            if not math.isnan(factor):
                by_factor.setdefault(fraction_of(factor), []).append(at)
    where = f"on rank {seen.rank} in call {seen.call.number}"
    if not 0 < len(by_factor) <= MOST_FACTORS:
        return f"the others there are right but for factors of their own, {where}"
    shown = ", ".join(f"{f} at {spans(at)}" for f, at in by_factor.items())
    return f"the others there are right but for factors, {where}: {shown}"
