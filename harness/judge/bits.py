"""Gradients beside their reference bit by bit, where more is asked for than a threshold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from sumgrad.base.tensors import same_bits
from sumgrad.judge.cells import cells
from sumgrad.record.directory import Record
from sumgrad.record.ranks import AFTER
from sumgrad.record.reference import Reference
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Bits:
    """How many tensors have other bits than the single run's, and of how many elements."""

    tensors: int
    differing: int
    elements: int


def bits_of(record: Record) -> Bits | None:
    """Every gradient of every rank and step beside the single run's, bit by bit, and of a script
    every weight after the step; None where nothing can be compared. A gradient that is not there
    is zero."""
    tensors = differing = elements = 0
    for tier, references in record.references.items():
        for reference in references:
            for cell in cells(record, tier, reference):
                tensors += 1
                got, wanted = cell.measured, cell.wanted.value
                other = _differing(got, wanted)
                differing, elements = differing + bool(other), elements + other
            for got, wanted in _weights_after(record, tier, reference):
                tensors += 1
                other = _differing(got, wanted)
                differing, elements = differing + bool(other), elements + other
    return Bits(tensors=tensors, differing=differing, elements=elements) if tensors else None


def _differing(got: Tensor, wanted: Tensor) -> int:
    """Elements with other bits; all of them where shapes differ."""
    if got.shape != wanted.shape:
        return max(wanted.numel(), 1)
    if same_bits(got, wanted):
        return 0
    words = torch.int64
    return int((got.reshape(-1).view(words) != wanted.reshape(-1).view(words)).sum())


def _weights_after(
    record: Record, tier: str, reference: Reference
) -> Iterator[tuple[Tensor, Tensor]]:
    """A script's weights after a step, on each rank and in the single run, float64."""
    for held in record.ranks.values():
        for name, got in held.grads.get((AFTER, reference.step), {}).items():
            if name in reference.after:
                whole, index = reference.after[name], held.index_of(tier, name)
                yield got.double(), whole if index is None else whole.reshape(-1)[index]
