"""What a script's clip hides: a factor that all gradients shared before it."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from sumgrad.base.outcome import spans
from sumgrad.base.tolerances import FLOOR_FACTOR
from sumgrad.judge.finding import Compared, Finding
from sumgrad.record.reference import Reference

SAME = {"float64": 1e-9, "float32": 1e-4}  # factors that differ by less are one
COARSE = 3e-2

Told = tuple[float | None, bool]  # a factor, and whether a clip of torch's made it


@dataclass(frozen=True, slots=True, kw_only=True)
class Hidden:
    """A factor that a rank's gradients had before they were rescaled. times: None where it could
    not be told. by_clip: torch's own clip found them so; else a script may mean it."""

    rank: int
    step: int
    times: float | None
    by_clip: bool


def nothing_hidden_before_the_optimizer(compared: Compared) -> Iterator[Finding]:
    """Gradients are right before a clip too, wherever the script has one."""
    for tier in compared.record.spec.tiers:
        found = list(hidden_factors(compared, tier))
        firm = [one for one in found if one.by_clip and one.times is not None]
        for one in (firm or found)[:1]:
            where = f"at step {one.step}, on rank {spans(_ranks_like(one, found))}"
            if one.times is None:
                text = (
                    f"the script rescales its gradients between backward and optimizer, each step "
                    f"by another factor, and what they were before could not be told {where}: a "
                    f"factor on all of them would be gone behind it (torch.nn.utils."
                    f"clip_grad_norm_ is seen through)"
                )
            elif one.by_clip:
                text = (
                    f"before the script clips them, gradients are {one.times:.9g} times what they "
                    f"should be {where}; the clip hides it"
                )
            else:
                text = (
                    f"gradients are {one.times:.9g} times those of the single run {where}, before "
                    f"the script rescales them: a division that is meant, or a factor that is gone "
                    f"behind a clip of its own"
                )
            yield Finding(level="fail" if firm else "unknown", text=text, tier=tier)


def hidden_factors(compared: Compared, tier: str) -> Iterator[Hidden]:
    """Of every step and rank, the factor that is not 1, or why it cannot be told."""
    record = compared.record
    script, dtype = record.spec.script, record.spec.tiers[tier]
    steps = script.rescaled if script else ()
    references = record.references.get(tier, ())
    constant = _constant(steps, SAME.get(dtype, COARSE))
    for step, (single, reference) in enumerate(zip(steps, references, strict=False)):
        near = max(SAME.get(dtype, COARSE), FLOOR_FACTOR * _noise(reference))
        live = {n: told for n, told in single.items() if told[0] not in (None, 0.0, 1.0)}
        for rank, held in record.ranks.items():
            info = held.info.get((tier, step))
            if info is None:
                continue
            one = _of_rank(live, info.get("rescaled", {}), constant, near)
            if one is not None:
                yield Hidden(rank=rank, step=step, times=one[0], by_clip=one[1])


def _of_rank(
    single: Mapping[str, Told], mine: Mapping[str, Told], constant: set[str], near: float
) -> Told | None:
    lost: Told | None = None
    for name, (wanted, clip) in single.items():
        if mine and name not in mine:
            continue  # a shard without elements
        got, own_clip = mine.get(name, (1.0, clip))
        by_clip = clip and own_clip
        if wanted is None or (not by_clip and name in constant):
            continue
        if not got:
            lost = lost or (None, by_clip)
        elif abs(wanted / got - 1) > near:
            return wanted / got, by_clip
    return lost


def _constant(steps: tuple[dict[str, Told], ...], near: float) -> set[str]:
    """Parameters that every step multiplies by one number: that hides nothing."""
    if len(steps) < 2:
        return set()
    found = set()
    for name in {name for step in steps for name in step}:
        factors = [step.get(name, (1.0, False))[0] for step in steps]
        known = [f for f in factors if f is not None]
        if len(known) == len(factors) and max(known) - min(known) <= near * max(map(abs, known)):
            found.add(name)
    return found


def _noise(reference: Reference) -> float:
    parts = [reference.floor[n] / size for n, size in reference.scale.items() if size > 0]
    return statistics.median(parts) if parts else 0.0


def _ranks_like(one: Hidden, found: list[Hidden]) -> list[int]:
    return sorted({o.rank for o in found if (o.step, o.by_clip) == (one.step, one.by_clip)})
