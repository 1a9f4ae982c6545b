"""Elements inside a parameter that have a factor of their own, while the rest of it is right."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from sumgrad.base.outcome import spans
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.case import Case, explains, fails
from sumgrad.diagnose.explainers.of_factors.factors import explained
from sumgrad.diagnose.explanation import Explanation, Left
from sumgrad.diagnose.fit import as_fraction
from sumgrad.judge.cells import Cell
from torch import Tensor

MIN_WRONG = 3  # elements below which a factor fits by chance


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The wrong elements of a parameter on a rank, and their factor. places: in words."""

    name: str
    rank: int
    factor: float
    places: str


def blocks_of_elements(case: Case, left: Left) -> Iterator[Explanation]:
    """Every wrong parameter is wrong in some of its elements, which have one factor each."""
    if case.has_plan:
        return
    found = [_block(case, cell) for cell in case.failing_cells]
    blocks = [block for block in found if block is not None]
    rest = [(c, c.measured - c.wanted.value - _of_block(c, b))
            for c, b in zip(case.failing_cells, found, strict=True) if b is not None]  # fmt: skip
    if not blocks or len(blocks) < len(found) or not explains(rest):
        return
    shown = list(dict.fromkeys(f"{b.name} {b.places}: {_times(b.factor)}" for b in blocks))
    ranks = tuple(sorted({b.rank for b in blocks}))
    names = list(dict.fromkeys(b.name for b in blocks))
    yield explained(
        case,
        Diagnosis(
            cause=f"part of a parameter has a factor of its own, the rest of it is right: "
            f"{'; '.join(shown[:4])}{' ...' if len(shown) > 4 else ''}",
            kind="block_factor",
            ranks=ranks,
            because=(
                f"with these factors {', '.join(names[:3])} is what was measured, within the "
                f"threshold, on rank {spans(ranks)}",
            ),
        ),
    )


def _block(case: Case, cell: Cell) -> Block | None:
    error = (cell.measured - cell.wanted.value).reshape(-1)
    wrong = error.abs() > cell.wanted.threshold
    telling = cell.wanted.value.reshape(-1).abs() > 1e3 * cell.wanted.threshold
    num = int((wrong & telling).sum())
    if num < MIN_WRONG or not bool((~wrong & telling).any()):
        return None
    wanted, got = cell.wanted.value.reshape(-1)[wrong], cell.measured.reshape(-1)[wrong]
    factor = float((wanted * got).sum() / (wanted * wanted).sum().clamp(min=1e-300))
    if fails(cell, got - factor * wanted, factor=max(1.0, abs(factor))):
        return None
    index = torch.arange(len(wrong)) if cell.index is None else cell.index.reshape(-1)
    shape = tuple(case.reference.grads[cell.name].shape)
    return Block(
        name=cell.name,
        rank=cell.rank,
        factor=factor,
        places=places_of_elements(index[wrong], shape),
    )


def _of_block(cell: Cell, block: Block) -> Tensor:
    """What a block's factor adds to the right gradient."""
    wrong = (cell.measured - cell.wanted.value).abs() > cell.wanted.threshold
    return torch.where(wrong, (block.factor - 1) * cell.wanted.value, 0.0)


def places_of_elements(elements: Tensor, shape: tuple[int, ...]) -> str:
    """Along the first dimension where whole rows are wrong, along the second, or one by one."""
    if len(shape) < 2:
        return f"elements {spans([int(i) for i in elements])} of {shape[0] if shape else 1}"
    per_row = torch.Size(shape[1:]).numel()
    rows = sorted({int(i) // per_row for i in elements})
    columns = sorted({int(i) % per_row for i in elements})
    if len(rows) <= len(columns) or len(shape) > 2:
        return f"rows {spans(rows)} of {shape[0]}"
    return f"columns {spans(columns)} of {shape[1]}"


def _times(factor: float) -> str:
    if abs(factor) < 1e-9:
        return "they are zero"
    fraction = as_fraction(factor, 1e-9)
    return f"{fraction if fraction is not None else format(factor, '.6g')} times what it should be"
