"""A Program's gradients against its reference: every rank, every parameter or shard it holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations

import torch
from sumgrad.compare import Expected, TensorDiff, same_bits, tensor_diff
from sumgrad.evidence import bits
from sumgrad.ledger_checks import fed, joint_operations
from sumgrad.program_record import ProgramRankRecord, ProgramRecord
from sumgrad.program_reference import ProgramReference
from sumgrad.tolerances import noise_floor, threshold
from sumgrad.unseen_checks import unread
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One rank's gradient of one parameter at one step. index: of a shard, else None.

    got: None where the step left no gradient. wanted: sliced as the rank holds it.
    """

    rank: int
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


def expected(record: ProgramRecord, reference: ProgramReference, name: str, tier: str) -> Expected:
    """The whole parameter's expectation in a tier."""
    step, dtype = reference.step, record.spec.tiers[tier]
    scale = float(step.scale[name].max()) if step.scale[name].numel() else 0.0
    floor = noise_floor(step.floor[name], scale, dtype)
    value = step.grads[name]
    return Expected(
        value=value,
        same_dtype=step.same_dtype[name],
        floor=floor,
        threshold=threshold(floor, scale, tier=tier),
        scale=scale,
        terms={term: grads[name] for term, grads in step.by_term.items()},
        resolution={term: step.resolution[term][name] for term in step.by_term},
        every_term=tier == "structure" or "structure" not in record.spec.tiers,
        size=float(value.abs().max()) if value.numel() else 0.0,
    )


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


def cells(record: ProgramRecord, tier: str, reference: ProgramReference) -> Iterator[Cell]:
    """Everything that ranks wrote for one step of a tier."""
    step = reference.step.step
    for name in record.spec.facts.params:
        wanted = expected(record, reference, name, tier)
        for rank, held in record.ranks.items():
            if name in held.params and (tier, step) in held.grads:
                index = held.index.get(name)
                yield Cell(
                    rank=rank,
                    name=name,
                    tier=tier,
                    step=step,
                    index=index,
                    got=held.grads[tier, step].get(name),
                    wanted=shard(wanted, index),
                )


def compare_cell(record: ProgramRecord, cell: Cell) -> TensorDiff:
    """One cell's verdict. A parameter that no term reaches must have no gradient, or zeros."""
    got = cell.got
    zero = cell.wanted.value.count_nonzero() == 0
    if got is None and (zero or not cell.wanted.value.numel()):
        got = torch.zeros_like(cell.wanted.value)
    diff = tensor_diff(
        got,
        cell.wanted,
        name=cell.name,
        unit=cell.name,
        pool=record.spec.topology.pool_of(cell.rank).name,
        rank=cell.rank,
        tier=cell.tier,
        step=cell.step,
    )
    if cell.wanted.scale == 0 and diff.comparable and diff.max_abs == 0:
        if _checked_elsewhere(record, cell):
            return replace(diff, status="pass", reason=None)
        return replace(diff, status="unknown", reason="its gradient is zero at these weights, so "
                       "nothing was checked; --steps 2 moves the weights")  # fmt: skip
    if cell.got is None and (cell.rank, cell.name) in (lost := unread(record)):
        why = f"{lost[cell.rank, cell.name]}, which was not compared"
        return replace(diff, status="unknown", reason=why)
    if cell.got is not None and cell.got.shape != cell.wanted.value.shape:
        return replace(diff, status="unknown")
    if cell.got is None and diff.status == "fail":
        return replace(diff, reason="the step left no gradient (None); the reference is not zero")
    return diff


def _checked_elsewhere(record: ProgramRecord, cell: Cell) -> bool:
    """Whether a parameter without a gradient here is never used, or has one at another step."""
    references = record.references[cell.tier]
    used = any(cell.name in reference.reached for reference in references)
    return not used or any(bool(r.step.scale[cell.name].any()) for r in references)


def compare_program(record: ProgramRecord) -> list[TensorDiff]:
    """Every tensor of every rank that wrote a record, in every tier with a sound reference.

    None where a rank had another model or another batch: there is nothing to compare with.
    """
    facts = record.spec.facts
    if any(h.built != facts.weights or h.batch != facts.batch for h in record.ranks.values()):
        return []
    out = []
    for tier, references in record.references.items():
        for reference in references:
            if reference.step.step and _unplaced(record):
                break  # a parameter without a place did not move with the others
            if not reference.problems:
                out += [compare_cell(record, cell) for cell in cells(record, tier, reference)]
    return out


def _unplaced(record: ProgramRecord) -> bool:
    return any(
        held.unknown or any(info.get("reshaped") for info in held.info.values())
        for held in record.ranks.values()
    )


def compare_again(record: ProgramRecord) -> list[TensorDiff]:
    """The repeated step of the first tier, against the same reference."""
    tier = next(iter(record.spec.tiers), "")
    references = record.references.get(tier, [])
    if not references or references[-1].problems or _unplaced(record):
        return []
    if not any(held.again for held in record.ranks.values()) or not compare_program(record):
        return []  # a matrix does not repeat its steps
    return [
        compare_cell(record, replace(cell, got=record.ranks[cell.rank].again.get(cell.name)))
        for cell in cells(record, tier, references[-1])
    ]


def uncovered(record: ProgramRecord) -> Iterator[str]:
    """Parameters, or parts of one, that no rank holds: their gradients were not compared."""
    for name, shape in record.spec.facts.params.items():
        numel = torch.Size(shape).numel()
        seen = torch.zeros(numel, dtype=torch.bool)
        for held in record.ranks.values():
            if name in held.params:
                index = held.index.get(name)
                if index is None:
                    seen[:] = True
                    break
                seen[index.reshape(-1)] = True
        lost = numel - int(seen.sum())
        if lost:
            part = "" if lost == numel else f"{lost} of {numel} elements of "
            yield f"no rank holds {part}{name}, so its gradient was not compared"


def differing_replicas(record: ProgramRecord) -> Iterator[str]:
    """Ranks that hold other bits of a gradient which one and the same collective gave to both.

    Replicas whose gradients were summed by different operations may differ by roundings.
    """
    for tier, references in record.references.items():
        for reference in references:
            step = reference.step.step
            found = _other_bits(record, tier, step)
            if not found:
                continue
            shared = _shared_results(record, tier, step)
            for name, (rank, other) in found:
                if (name, rank, other) in shared:
                    yield (
                        f"replicas, {tier}, step {step}: rank {rank} and rank {other} hold other "
                        f"bits of {name}'s gradient, which one collective gave to both"
                    )
                    break


def _other_bits(record: ProgramRecord, tier: str, step: int) -> list[tuple[str, tuple[int, int]]]:
    """Parameters, each with two ranks that hold the same elements of it and other bits."""
    out, first = [], dict[tuple[str, str], ProgramRankRecord]()
    for held in record.ranks.values():
        grads = held.grads.get((tier, step), {})
        for name in held.params:
            index = held.index.get(name)
            key = (name, "" if index is None else bits([index]))
            other = first.setdefault(key, held)
            mine, theirs = grads.get(name), other.grads.get((tier, step), {}).get(name)
            if mine is not None and theirs is not None and not same_bits(mine, theirs):
                out.append((name, (other.rank, held.rank)))
    return out


def _shared_results(record: ProgramRecord, tier: str, step: int) -> set[tuple[str, int, int]]:
    """(parameter, rank, rank) where one all-reduce gave both ranks their final gradient."""
    feeds = fed(record, tier, step)
    out = set()
    for joint in joint_operations(record, tier, step):
        if joint.family != "allreduce":
            continue
        given = {r: set(feeds.get((r, e["n"]), ())) for r, e in joint.events.items()}
        for a, b in combinations(sorted(given), 2):
            out |= {(name, a, b) for name in given[a] & given[b]}
    return out
