"""What a script's clip hides: a factor that all gradients shared before it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from sumgrad.base.outcome import some_of, spans
from sumgrad.base.tolerances import FLOOR_FACTOR
from sumgrad.judge.finding import Compared, Finding
from sumgrad.record.directory import Record
from sumgrad.record.reference import Reference

SAME = {"float64": 1e-9, "float32": 1e-4}  # factors that differ by less are one
COARSE = 3e-2
MOST_CUT_OFF = 0.5  # of a gradient's numbers: with more of them a factor may hide
ONE_SIZE = 1e-5  # a part of it: what a clip leaves is so far the same
ROUNDINGS = 4  # of a gradient, that dividing by a clip's factor may leave

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


def cut_off_before_the_optimizer(compared: Compared) -> Iterator[Finding]:
    """A clip by value leaves a sign of what it cuts off: of most of a gradient, no factor shows."""
    record = compared.record
    found: dict[str, float] = {}
    for held in record.ranks.values():
        for info in held.info.values():
            for name, share in info.get("saturated", {}).items():
                found[name] = max(found.get(name, 0.0), share)
    for hides in (True, False):
        names = [name for name, share in found.items() if (share > MOST_CUT_OFF) is hides]
        if names:
            most = max(found[name] for name in names)
            yield Finding(
                level="unknown" if hides else "warning",
                text=f"of the gradient of {some_of(names)} the script cuts off up to "
                f"{100 * most:.0f} % of the numbers by value, as clip_grad_value_ does, before "
                f"the optimizer takes it: of these only the sign was compared",
            )


def unseen_before_the_optimizer(compared: Compared) -> Iterator[Finding]:
    """Gradients that no backward leaves where they are looked at, as where a script takes them from
    torch.autograd.grad, and that are of one size in every step, as behind a clip by their norm."""
    record = compared.record
    for tier in record.spec.tiers:
        unseen = {name for held in record.ranks.values() for at, info in held.info.items()
                  if at[0] == tier for name in info.get("unseen", ())}  # fmt: skip
        steps = [
            {n: float(g.double().norm()) for n, g in reference.grads.items() if n in unseen}
            for reference in record.references.get(tier, ())
        ]
        steps = [{n: size for n, size in sizes.items() if size} for sizes in steps]
        every = [math.hypot(*sizes.values()) for sizes in steps]
        names = [n for n in (steps[0] if steps else ()) if _is_one_size([s.get(n) for s in steps])]
        if _is_one_size(every) or names:
            yield Finding(
                level="unknown",
                text=f"the gradient of {some_of(names or sorted(unseen))} is of one size in each "
                f"step, as behind a clip by its norm, and was not seen before it: a factor on it "
                f"would be gone (torch.nn.utils.clip_grad_norm_ is seen through)",
                tier=tier,
            )


def _is_one_size(sizes: Sequence[float | None]) -> bool:
    told = [size for size in sizes if size]
    return 1 < len(told) == len(sizes) and max(told) - min(told) <= ONE_SIZE * max(told)


def hidden_factors(compared: Compared, tier: str) -> Iterator[Hidden]:
    """Of every step and rank, the factor that is not 1, or why it cannot be told.

    Of steps whose gradients are right behind the clip: nothing hides what is wrong there, too.
    """
    record = compared.record
    wrong = {(d.step, d.rank) for d in compared.diffs if d.tier == tier and not d.is_within}
    script, dtype = record.spec.script, record.spec.tiers[tier]
    steps = script.rescaled if script else ()
    references = record.references.get(tier, ())
    constant = _constant(steps, SAME.get(dtype, COARSE))
    for step, (single, reference) in enumerate(zip(steps, references, strict=False)):
        near = max(SAME.get(dtype, COARSE), FLOOR_FACTOR * _noise(reference))
        live = {n: told for n, told in single.items() if told[0] not in (None, 0.0, 1.0)}
        for rank, held in record.ranks.items():
            info = held.info.get((tier, step))
            if info is None or (step, rank) in wrong:
                continue
            one = _of_rank(live, info.get("rescaled", {}), constant, near)
            if one is not None:
                yield Hidden(rank=rank, step=step, times=one[0], by_clip=one[1])


def before_the_clip(record: Record, tier: str, step: int) -> Record:
    """A script's record with the gradients of this step as torch's own clip found them, on ranks
    and in the single run; the same record where none changed them, or where it cannot be told."""
    script, references = record.spec.script, record.references.get(tier, [])
    if script is None or not step < min(len(script.rescaled), len(references)):
        return record
    single = _clips(script.rescaled[step])
    at = (tier, step)
    near = SAME.get(record.spec.tiers[tier], COARSE)
    own = {
        rank: by_its_clips(single, _known(held.info[at].get("rescaled", {})), near)
        for rank, held in record.ranks.items()
        if at in held.info
    }
    known = [f for factors in (single, *own.values()) for f in factors.values()]
    if all(f == 1.0 for f in known) or any(not f for f in known):
        return record
    eps = torch.finfo(getattr(torch, record.spec.tiers[tier])).eps
    references = list(references)
    references[step] = _unclipped(references[step], single, eps)
    ranks = {
        rank: replace(held, grads={**held.grads, at: {
            name: g / (own[rank].get(name) or 1.0) for name, g in held.grads[at].items()
        }}) if at in held.grads and rank in own else held
        for rank, held in record.ranks.items()
    }  # fmt: skip
    return replace(record, ranks=ranks, references={**record.references, tier: references})


def by_its_clips(
    single: Mapping[str, float | None], mine: Mapping[str, float | None], near: float
) -> dict[str, float | None]:
    """What a rank's clips multiplied each gradient by. A clip multiplies all alike: of what most of
    them were, where one was multiplied by something else after it, or is not known. What nothing
    multiplied, it was not given."""
    out = dict(mine)
    for factor in {f for f in single.values() if f}:
        names = [n for n, f in single.items() if f and abs(f - factor) <= near * abs(factor)]
        own = sorted(f for n in names if (f := mine.get(n)))
        if not own:
            continue
        most = own[len(own) // 2]
        alike = sum(abs(f - most) <= near * abs(most) for f in own)
        if 2 * alike > len(own) and (len(own) > 2 or alike == len(own)):
            for name in names:
                f = mine.get(name)
                if f is None or not (f == 1.0 or abs(f - most) <= near * abs(most)):
                    out[name] = most
    return out


def _clips(told: Mapping[str, Told]) -> dict[str, float | None]:
    return {name: factor for name, (factor, by_clip) in told.items() if by_clip}


def _known(told: Mapping[str, Told]) -> dict[str, float | None]:
    """The same, and of those that nothing rescaled."""
    return {name: f for name, (f, by_clip) in told.items() if by_clip or f == 1.0}


def _unclipped(reference: Reference, factors: Mapping[str, float | None], eps: float) -> Reference:
    def grads(held: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {n: g / (factors.get(n) or 1.0) for n, g in held.items()}

    def numbers(held: Mapping[str, float]) -> dict[str, float]:
        return {n: v / abs(factors.get(n) or 1.0) for n, v in held.items()}

    scale = numbers(reference.scale)
    floor = {n: v + ROUNDINGS * eps * scale.get(n, 0.0)
             for n, v in numbers(reference.floor).items()}  # fmt: skip
    return replace(
        reference,
        grads=grads(reference.grads),
        by_term={term: grads(held) for term, held in reference.by_term.items()},
        same_dtype=grads(reference.same_dtype),
        resolution={term: numbers(held) for term, held in reference.resolution.items()},
        scale=scale,
        floor=floor,
        floor_by_term={term: numbers(held) for term, held in reference.floor_by_term.items()},
    )


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
