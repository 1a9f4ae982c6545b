"""What optimizers make of right gradients: a script's weights after each step, beside its single
run's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from sumgrad.base.outcome import some_of, spans
from sumgrad.base.tolerances import FLOOR_FACTOR, zero_factor
from sumgrad.judge.finding import Compared, Finding, Level
from sumgrad.record.directory import Record
from sumgrad.record.ranks import AFTER
from sumgrad.record.reference import Reference

ONE_NUMBER = 1e-3  # by how much what goes so many times as far may differ from it
MOST_NOISE = 0.5  # of an update: a step of twice the size has to be seen


def the_same_weights_after(compared: Compared) -> Iterator[Finding]:
    """Weights that an optimizer leaves wrong though the gradients that it had were right."""
    record = compared.record
    if not all(d.is_within for d in compared.diffs):
        return  # a wrong gradient moves the weights, and a clip those of the others
    for wrong in wrong_updates(record):
        yield Finding(level="fail", text=f"after the optimizer, {wrong.text}")
        return
    levels: set[Level] = set()
    for one in untold_updates(record):
        level: Level = "warning" if one.is_rounding else "unknown"
        if level in levels:
            continue
        levels.add(level)
        why = "its update is not determined by such a gradient (too few rows for its rank, say)"
        if one.is_rounding:
            why = "that is what a weight of its dtype is rounded by"
        yield Finding(
            level=level,
            text=f"the optimizer's own step of {one.name} at step {one.step} was not compared: "
            f"runs of the script on one process, off by one rounding, put it {one.noise:.1e} "
            f"apart, and the step itself moves it by {one.moved:.1e}; {why}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Untold:
    """A weight whose step is lost in the noise of the single run. moved: how far the steps beside
    it move the weight. is_rounding: the noise is no more than roundings of the weight's dtype."""

    name: str
    step: int
    noise: float
    moved: float
    is_rounding: bool


def untold_updates(record: Record) -> Iterator[Untold]:
    """Of every optimizer step of the single run."""
    if record.spec.script is None:
        return
    for tier, references in record.references.items():
        dtype = record.spec.tiers[tier]
        by_name: dict[str, list[Reference]] = {}
        for reference in references:  # several optimizers take turns
            for name in reference.after:
                by_name.setdefault(name, []).append(reference)
        for name, own in by_name.items():
            for one, two in pairwise(own):
                moved = float((two.after[name] - one.after[name]).abs().max())
                for reference in (one, two):
                    if _is_noise(reference, name, dtype):
                        continue  # no step is made of it that anybody could tell
                    noise = FLOOR_FACTOR * reference.after_floor[name]
                    if moved and noise > MOST_NOISE * moved:
                        weight = reference.after[name]
                        rounded = 2 * _own_eps(weight) * float(weight.abs().max())
                        yield Untold(
                            name=name,
                            step=reference.step,
                            noise=noise,
                            moved=moved,
                            is_rounding=reference.after_floor[name] <= rounded,
                        )


def _is_noise(reference: Reference, name: str, dtype: str) -> bool:
    """Whether a gradient is there, and no more than noise in any element."""
    grad = reference.grads.get(name)
    if grad is None or not bool(grad.any()):
        return False
    return not bool(_told_by_the_gradient(reference, name, dtype).any())


def _own_eps(weight: torch.Tensor) -> float:
    """Of the dtype of fewest digits that has all these numbers."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        if torch.equal(weight.to(dtype).double(), weight.double()):
            return torch.finfo(dtype).eps
    return torch.finfo(torch.float64).eps


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongUpdate:
    """Weights that are wrong after a step, on these ranks. times: how far all of them go, of what
    they go in the single run; None where that is not one number."""

    ranks: tuple[int, ...]
    text: str
    times: float | None


def wrong_updates(record: Record) -> Iterator[WrongUpdate]:
    """Weights after a step that are not the single run's, from equal weights before it."""
    if record.spec.script is None:
        return
    whole = min((len(held.info) for held in record.ranks.values()), default=0)
    unplaced = any(held.unknown for held in record.ranks.values())
    for tier, references in record.references.items():
        for reference in references[:whole]:  # of later ones not every gradient was there
            if reference.problems or (reference.step and unplaced):
                break  # a parameter without a place did not move with the others
            off: dict[int, list[tuple[str, float, float]]] = {}
            for rank, held in record.ranks.items():
                for name in held.grads.get((AFTER, reference.step), {}):
                    found = update_error(record, tier, reference, rank, name)
                    if found is not None and not found[0] <= found[1]:
                        off.setdefault(rank, []).append((name, *found))
            if off:
                names = list(dict.fromkeys(n for wrong in off.values() for n, *_ in wrong))
                _, far, bound = max(
                    (one for wrong in off.values() for one in wrong), key=lambda one: one[1]
                )
                yield WrongUpdate(
                    ranks=tuple(off),
                    text=f"{some_of(names)} on rank {spans(list(off))} is off by {far:.1e} at step "
                    f"{reference.step} (noise allows {bound:.1e})",
                    times=_times_as_far(record, tier, references, reference, off),
                )


def _times_as_far(
    record: Record,
    tier: str,
    references: Sequence[Reference],
    reference: Reference,
    off: Mapping[int, Sequence[tuple[str, float, float]]],
) -> float | None:
    """What a step goes on ranks, of what it goes in the single run, if that is one number for all
    weights that are wrong there."""
    before = next((r.after for r in references if r.step == reference.step - 1), {})
    found: list[float] = []
    for rank, wrong in off.items():
        held = record.ranks[rank]
        for name, *_ in wrong:
            if name not in before or held.index_of(tier, name) is not None:
                return None
            own = (held.grads[AFTER, reference.step][name].double() - before[name]).reshape(-1)
            right = (reference.after[name] - before[name]).double().reshape(-1)
            size = float(right @ right)
            times = float(own @ right) / size if size else 0.0
            if not float((own - times * right).norm()) <= ONE_NUMBER * float(own.norm()):
                return None
            found.append(times)
    alike = bool(found) and max(found) - min(found) <= ONE_NUMBER * abs(max(found))
    return found[0] if alike else None


def update_error(
    record: Record, tier: str, reference: Reference, rank: int, name: str
) -> tuple[float, float] | None:
    """How far a weight after a step is from the single run's, and how far it may be; None where
    there is nothing to compare."""
    held = record.ranks[rank]
    got = held.grads.get((AFTER, reference.step), {}).get(name)
    if got is None or not got.numel():
        return None
    if name not in reference.after or name not in reference.grads:
        return None
    eps = torch.finfo(getattr(torch, record.spec.tiers[tier])).eps
    whole, index = reference.after[name], held.index_of(tier, name)

    def part(full: torch.Tensor) -> torch.Tensor:
        return full if index is None else full.reshape(-1)[index]

    told, nothing = (
        part(_told_by_the_gradient(reference, name, record.spec.tiers[tier])),
        part(reference.grads[name] == 0),
    )
    own = held.grads.get((tier, reference.step), {}).get(name)
    if own is None or own.shape == nothing.shape:
        told = told | (nothing if own is None else nothing & (own == 0))
    size = 2 * eps * float(whole.abs().max())
    bound = FLOOR_FACTOR * max(reference.after_floor[name], size)
    return _distance(got, part(whole), told), bound


def _told_by_the_gradient(reference: Reference, name: str, dtype: str) -> torch.Tensor:
    """Elements whose gradient is more than noise: an optimizer that divides by its size makes a
    whole step of noise, in either direction. (Where there is none at all, a step is made of what
    was before, and of decay: that is told too.)"""
    return reference.grads[name].abs() > zero_factor(dtype) * reference.floor[name]


def _distance(got: torch.Tensor, wanted: torch.Tensor, told: torch.Tensor) -> float:
    """The largest difference where it is told; NaN where they cannot be compared."""
    if got.shape != wanted.shape:
        return float("nan")
    off = (got.double() - wanted).abs()[told]
    return float(off.max()) if off.numel() else 0.0
