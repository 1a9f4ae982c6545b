"""Gradients beside their reference bit by bit, where more is asked for than a threshold."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sumgrad.base.tensors import same_bits
from sumgrad.judge.cells import cells
from sumgrad.record.directory import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Bits:
    """How many tensors have other bits than the single run's, and of how many elements."""

    tensors: int
    differing: int
    elements: int


def bits_of(record: Record) -> Bits | None:
    """Every gradient of every rank and step beside the single run's, bit by bit; None where
    nothing can be compared. A gradient that is not there is zero."""
    tensors = differing = elements = 0
    for tier, references in record.references.items():
        for reference in references:
            for cell in cells(record, tier, reference):
                tensors += 1
                got, wanted = cell.measured, cell.wanted.value
                if got.shape != wanted.shape:
                    differing, elements = differing + 1, elements + wanted.numel()
                elif not same_bits(got, wanted):
                    other = got.reshape(-1).view(torch.int64) != wanted.reshape(-1).view(
                        torch.int64
                    )
                    differing, elements = differing + 1, elements + int(other.sum())
    return Bits(tensors=tensors, differing=differing, elements=elements) if tensors else None
