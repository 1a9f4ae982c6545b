"""Every gradient that ranks wrote, beside what it must be; and all of them compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch
from sumgrad.base.tensors import same_bits
from sumgrad.base.tolerances import KERNEL_CAP, noise_floor, threshold
from sumgrad.judge.comparison import Expected, TensorDiff, tensor_diff
from sumgrad.judge.knowledge import names_in, plan_of, terms_at, unit_of
from sumgrad.ledger.call_site import JOIN
from sumgrad.record.directory import Record
from sumgrad.record.ranks import At
from sumgrad.record.reference import Reference
from torch import Tensor

NEVER = (
    "an optimizer has it, no step that was looked at gives it a gradient, and no wrapper of "
    "torch's would reduce one: a larger --steps may show it, or --zero {} say that it never has any"
)
UNSEEN = "it had no .grad, and the optimizer's step changed it all the same"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One rank's gradient of one parameter at one step. index: of a shard, else None.

    got: None where the step left no gradient. wanted: sliced as the rank holds it.
    """

    rank: int
    pool: str
    name: str
    tier: str
    step: int
    index: Tensor | None
    got: Tensor | None
    wanted: Expected

    @property
    def measured(self) -> Tensor:
        """The gradient as a float64 tensor; no gradient is zero."""
        return torch.zeros_like(self.wanted.value) if self.got is None else self.got.double()


def expected(record: Record, reference: Reference, pool: str, name: str, tier: str) -> Expected:
    """What a parameter's whole gradient must be on a pool: all of it, or what ends there."""
    plan, terms = plan_of(record), terms_at(record, pool, name)
    names = tuple(reference.by_term) if terms is None else terms
    by_term = {term: reference.by_term[term][name] for term in names}
    scale = reference.scale[name]
    value, measured = reference.grads[name], reference.floor[name]
    same = reference.same_dtype.get(name)
    if plan is not None and not plan.role(pool).home:
        value = torch.stack(list(by_term.values())).sum(0)
        measured = sum(reference.floor_by_term[term][name] for term in names)
        same = None
    floor = noise_floor(measured, scale, record.spec.tiers[tier])
    return Expected(
        value=value,
        same_dtype=same,
        floor=floor,
        threshold=threshold(floor, scale, tier=tier),
        scale=scale,
        terms=by_term,
        resolution={term: reference.resolution[term][name] for term in names},
        every_term=tier == "structure" or "structure" not in record.spec.tiers,
        size=float(value.abs().max()) if value.numel() else 0.0,
        measured_in=_measured_in(record, tier),
    )


def _measured_in(record: Record, tier: str) -> str:
    """The dtype of the reference: a script's own, or float64 where a Program runs in it."""
    facts, tiers = record.spec.facts, record.spec.tiers
    if record.spec.script is not None:
        return tiers[tier]
    if facts is None or facts.float64 is None:
        return "float64"
    return max(tiers.values(), key=lambda dtype: torch.finfo(getattr(torch, dtype)).eps)


def shard(wanted: Expected, index: Tensor | None) -> Expected:
    """The part of an expectation that a rank holds."""
    if index is None:
        return wanted

    def part(full: Tensor) -> Tensor:
        return full.reshape(-1)[index]

    return replace(
        wanted,
        value=part(wanted.value),
        same_dtype=None if wanted.same_dtype is None else part(wanted.same_dtype),
        terms={term: part(value) for term, value in wanted.terms.items()},
    )


def cells(record: Record, tier: str, reference: Reference) -> Iterator[Cell]:
    """Everything that ranks wrote for one step of a tier."""
    at = (tier, reference.step)
    for pool in record.spec.topology.pools:
        held_here = {r: record.ranks[r] for r in pool.ranks if r in record.ranks}
        for name in names_in(record, pool.name):
            wanted = expected(record, reference, pool.name, name, tier)
            somewhere = {rank for rank in held_here if _stepped(record, rank, at, name)}
            for rank, held in held_here.items():
                if rank not in somewhere and somewhere:
                    continue  # the optimizer of another rank takes it, and that rank is compared
                if at in held.grads and (not record.spec.opaque or name in held.params):
                    index = held.index_of(tier, name)
                    yield Cell(
                        rank=rank,
                        pool=pool.name,
                        name=name,
                        tier=tier,
                        step=reference.step,
                        index=index,
                        got=held.grads[at].get(name),
                        wanted=shard(wanted, index),
                    )


def _stepped(record: Record, rank: int, at: At, name: str) -> bool:
    """Whether an optimizer of this rank has a parameter at a step; True where nobody knows."""
    told = record.ranks[rank].info.get(at, {}).get("stepped")
    return told is None or name in told


def compare(record: Record) -> list[TensorDiff]:
    """Every tensor of every rank that wrote a record, in every tier with a sound reference.

    Nothing where a rank had another model or another batch: there is nothing to compare with.
    """
    facts = record.spec.facts
    if facts is not None and any(
        h.built != facts.weights or h.batch != facts.batch for h in record.ranks.values()
    ):
        return []
    out: list[TensorDiff] = []
    for tier in record.spec.tiers:
        for reference in record.references.get(tier, ()):
            if reference.step and _unplaced(record):
                break  # a parameter without a place did not move with the others
            if not reference.problems:
                out += _compare_step(record, tier, reference)
    return out


def compare_again(record: Record, diffs: Sequence[TensorDiff]) -> list[TensorDiff]:
    """The repeated step, against the same reference. diffs: of the first run."""
    tier = next((held.again_tier for held in record.ranks.values() if held.again), "")
    references = record.references.get(tier, [])
    if not references or references[-1].problems or _unplaced(record):
        return []
    if not diffs:
        return []
    return [
        compare_cell(record, replace(cell, got=record.ranks[cell.rank].again.get(cell.name)))
        for cell in cells(record, tier, references[-1])
    ]


def near_misses(record: Record) -> list[int]:
    """Steps with errors above their thresholds that a floor from more runs may allow.

    None where any tensor is further off: more runs would not change the verdict.
    """
    diffs = compare(record)
    wrong = [d for d in (*diffs, *compare_again(record, diffs)) if d.status == "fail"]
    if any(not d.comparable or d.of_threshold > KERNEL_CAP for d in wrong):
        return []
    return sorted({d.step for d in wrong})


def _compare_step(record: Record, tier: str, reference: Reference) -> Iterator[TensorDiff]:
    """All cells of a step; equal bits of whole gradients are compared once for each pool."""
    known: dict[tuple[str, str], list[tuple[Tensor, TensorDiff]]] = {}
    for cell in cells(record, tier, reference):
        seen = known.setdefault((cell.pool, cell.name), [])
        if cell.got is None or cell.index is not None:
            yield compare_cell(record, cell)
            continue
        same = next((diff for other, diff in seen if same_bits(other, cell.got)), None)
        if same is None:
            same = compare_cell(record, cell)
            seen.append((cell.got, same))
        yield replace(same, rank=cell.rank)


def compare_cell(record: Record, cell: Cell) -> TensorDiff:
    """One cell's verdict."""
    got = cell.got
    if record.spec.opaque and got is None and _may_be_zero(cell.wanted):
        got = torch.zeros_like(cell.wanted.value)
    diff = tensor_diff(
        got,
        cell.wanted,
        name=cell.name,
        unit=unit_of(record, cell.name),
        pool=cell.pool,
        rank=cell.rank,
        tier=cell.tier,
        step=cell.step,
    )
    return _as_user_left_it(record, cell, diff) if record.spec.opaque else diff


def _may_be_zero(wanted: Expected) -> bool:
    """Whether no gradient is as good as this one: zero by mathematics is noise in a reference."""
    return not wanted.value.numel() or float(wanted.value.abs().max()) <= wanted.threshold


def _as_user_left_it(record: Record, cell: Cell, diff: TensorDiff) -> TensorDiff:
    """A user's own step may leave a parameter that no term reaches without a gradient."""
    if cell.got is None and cell.name in _changed_without(record, cell.rank):
        return replace(diff, status="unknown", reason=f"{UNSEEN}, which was not compared")
    if cell.wanted.scale == 0 and diff.comparable and diff.max_abs == 0:
        script = record.spec.script
        if script is not None and any(fnmatchcase(cell.name, p) for p in script.zero):
            return replace(diff, status="pass", reason=None)
        if _checked_elsewhere(record, cell):
            if cell.name not in _reduced_by_nothing_known(record, cell):
                return replace(diff, status="pass", reason=None)
            return replace(diff, status="unknown", reason=NEVER.format(cell.name))
        more = "--steps 2 moves the weights"
        if len(record.references[cell.tier]) > 1:
            more = ("nor at those of another step: what is zero by mathematics (a last bias under "
                    "differences of scores) takes requires_grad=False in build()")  # fmt: skip
        if script is not None:
            more = f"a larger --steps may show it, or --zero {cell.name} say that it has to be"
        return replace(diff, status="unknown", reason="its gradient is zero at these weights, so "
                       f"nothing was checked; {more}")  # fmt: skip
    if cell.got is None and (cell.rank, cell.name) in (lost := unread(record)):
        why = f"{lost[cell.rank, cell.name]}, which was not compared"
        return replace(diff, status="unknown", reason=why)
    if cell.got is not None and cell.got.shape != cell.wanted.value.shape:
        return replace(diff, status="unknown")
    at = (cell.tier, cell.step)
    if (
        cell.got is None
        and diff.status == "fail"
        and not _stepped(record, cell.rank, at, cell.name)
    ):
        if record.ranks[cell.rank].unknown:
            why = "that rank's optimizer has parameters that are not known, and not this one"
            return replace(diff, status="unknown", reason=why)
        return replace(diff, reason="no rank's optimizer has it, and the single run's does")
    if cell.got is None and diff.status == "fail":
        return replace(diff, reason="the step left no gradient (None); the reference is not zero")
    return diff


def _checked_elsewhere(record: Record, cell: Cell) -> bool:
    """Whether a parameter without a gradient here is never used, or has one at another step."""
    references = record.references[cell.tier]
    used = any(cell.name in reference.reached for reference in references)
    return not used or any(r.scale[cell.name] > 0 for r in references)


def _reduced_by_nothing_known(record: Record, cell: Cell) -> set[str]:
    """Parameters that have no gradient at any step, though they are trained, and that a script's
    rank reduces by itself, if it does."""
    if any(r.scale[cell.name] > 0 for r in record.references[cell.tier]):
        return set()
    infos = record.ranks[cell.rank].info.items()
    return {n for (tier, _), i in infos if tier == cell.tier for n in i.get("unreduced", ())}


def unread(record: Record) -> dict[tuple[int, str], str]:
    """(rank, parameter) -> why a missing `.grad` does not mean that there is no gradient."""
    out: dict[tuple[int, str], str] = {}
    for rank, held in record.ranks.items():
        for at in held.info:
            if not held.grads.get(at) and any(e.get("by") == JOIN for e in held.events.get(at, ())):
                why = "it had no rows left, and Join sends it the weights of another rank"
                out |= dict.fromkeys(((rank, name) for name in held.params), why)
        for info in held.info.values():
            for name, attribute in info.get("elsewhere", {}).items():
                out[rank, name] = f"the step left no .grad, but a gradient in {attribute}"
            for name, shape in info.get("reshaped", {}).items():
                out[rank, name] = f"it has another shape {tuple(shape)} after the step"
    return out


def _changed_without(record: Record, rank: int) -> set[str]:
    """Parameters that an optimizer's step changed though they had no `.grad`."""
    infos = record.ranks[rank].info.values()
    return {name for info in infos for name in info.get("changed_without", ())}


def _unplaced(record: Record) -> bool:
    held = record.ranks.values()
    return any(h.unknown or any(i.get("reshaped") for i in h.info.values()) for h in held)


def steps_of(record: Record) -> Iterator[At]:
    """The tiers and steps that were run, in order."""
    for tier in record.spec.tiers:
        for step in range(record.spec.steps):
            yield tier, step
