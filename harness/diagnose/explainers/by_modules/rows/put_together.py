"""How the ranks' own gradients were put together: whose micro-batches each rank ends up with.

The traces say which rows every call of a rank took, and with which factor; the parts of the
reference say what gradient those rows make. So what a rank holds at the end can be read as a sum
over ranks and micro-batches, each counted so often.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from sumgrad.base.outcome import spans
from sumgrad.base.verdict import Diagnosis, Standing
from sumgrad.diagnose.case import Case, explains, fails
from sumgrad.diagnose.explainers.by_modules.looked import looked_by_rows, parts_of_rows
from sumgrad.diagnose.explainers.by_modules.rows.readings import (
    MOST,
    Counted,
    Part,
    by_group,
    by_number,
    given_nothing,
    late,
    lost_everywhere,
    own_only,
    shown,
    some_ranks,
)
from sumgrad.diagnose.explainers.of_factors.factors import explained
from sumgrad.diagnose.explainers.of_ledgers.divergent import which_step
from sumgrad.diagnose.explanation import Explanation, Left
from sumgrad.diagnose.modules.where.loss_weights import row_weights, shares_at_the_loss
from sumgrad.diagnose.reductions import carried_by, reductions_of
from sumgrad.judge.cells import Cell
from sumgrad.judge.joint import describe
from torch import Tensor

MAX_PARTS = 64


def put_together(case: Case, left: Left) -> Iterator[Explanation]:
    """Whose micro-batches each rank holds, where it is not everybody's once."""
    parts = _parts(case)
    if parts is None or case.has_plan:
        return
    found = [counted for counted in _counted(case, parts) if counted is not None]
    found = _with_those_that_fit(case, parts, found)
    ranks = {cell.rank for cell in case.failing_cells}
    if not found or {counted.rank for counted in found} != ranks:
        return
    told = {name for counted in found for name in counted.names}
    others = [name for name in _names(case) if name not in told]
    diagnosis = _in_words(case, parts, found)
    if diagnosis is not None:
        standing: Standing = "likely" if others else "proved"
        yield explained(case, replace(diagnosis, standing=standing), others)


def _parts(case: Case) -> list[Part] | None:
    """Every micro-batch of every rank; None where rows are not known one by one."""
    look, facts = looked_by_rows(case), case.record.spec.facts
    shares = None if look is None else shares_at_the_loss(look)
    whole = all(b - a == 1 for a, b in case.reference.intervals)
    if shares is None or len({s.part for s in shares[1]}) > 1:
        return None
    if facts is None or not case.reference.intervals or not whole:
        return None
    out: list[Part] = []
    for share in shares[1]:
        weights = row_weights([share], facts.num_rows)
        if weights is None:
            return None
        for i, part in enumerate(out):
            if part.number == share.number and torch.equal(part.weights, weights):
                out[i] = Part(ranks=(*part.ranks, share.rank), number=part.number, weights=weights)
                break
        else:
            out.append(Part(ranks=(share.rank,), number=share.number, weights=weights))
    return out if 1 < len(out) <= MAX_PARTS else None


def _counted(case: Case, parts: Sequence[Part]) -> Iterator[Counted | None]:
    """Of every rank, all its wrong parameters together, or those together that are alike."""
    for rank in sorted({cell.rank for cell in case.failing_cells}):
        mine = [c for c in case.failing_cells if c.rank == rank and c.measured.numel()]
        often = _fit(case, mine, parts)
        if often is not None:
            yield Counted(rank=rank, names=tuple(c.name for c in mine), often=often)
            continue
        alone = {cell.name: _fit(case, [cell], parts) for cell in mine}
        groups: dict[tuple[float, ...], list[str]] = {}
        for name, values in alone.items():
            if values is not None:
                groups.setdefault(tuple(round(v, 5) for v in values), []).append(name)
        names = max(groups.values(), key=len, default=None)
        values = None if names is None else alone[names[0]]
        yield (
            None
            if names is None or values is None
            else Counted(rank=rank, names=tuple(names), often=values)
        )


def _with_those_that_fit(
    case: Case, parts: Sequence[Part], found: Sequence[Counted]
) -> list[Counted]:
    """With ranks that have too few numbers to tell, where what another rank counts fits them."""
    out = list(found)
    for rank in sorted({c.rank for c in case.failing_cells} - {one.rank for one in found}):
        mine = [c for c in case.failing_cells if c.rank == rank and c.measured.numel()]
        for other in found:
            if mine and _leaves_nothing(mine, _columns(case, mine, parts), other.often):
                names = tuple(c.name for c in mine)
                out.append(Counted(rank=rank, names=names, often=other.often))
                break
    return sorted(out, key=lambda counted: counted.rank)


def _columns(case: Case, cells: Sequence[Cell], parts: Sequence[Part]) -> list[Tensor]:
    """(parts, n) each: what every part gives to each cell, by the cell's size."""
    weights = torch.stack([part.weights for part in parts])
    return [(weights @ parts_of_rows(case, cell)) / _size(cell) for cell in cells]


def _size(cell: Cell) -> float:
    return cell.wanted.size or cell.wanted.scale or 1.0


def _leaves_nothing(
    cells: Sequence[Cell], columns: Sequence[Tensor], often: Sequence[float]
) -> bool:
    """Whether parts that count so often are what each cell holds, under its threshold."""
    weights = torch.tensor(often, dtype=torch.float64)
    most = 2 * max(1.0, float(weights.abs().max()))
    left: list[tuple[Cell, Tensor]] = []
    for cell, column in zip(cells, columns, strict=True):
        residual = cell.measured - (weights @ column * _size(cell)).reshape(cell.measured.shape)
        if fails(cell, residual, factor=most):
            return False
        left.append((cell, residual))
    return explains(left)


def _fit(case: Case, cells: Sequence[Cell], parts: Sequence[Part]) -> tuple[float, ...] | None:
    """How often each part is counted, if that leaves residuals under every threshold."""
    columns = _columns(case, cells, parts)
    wide = torch.cat(columns, dim=1).T
    measured = torch.cat([cell.measured.reshape(-1) / _size(cell) for cell in cells])
    if len(measured) <= len(parts) or not bool(torch.isfinite(measured).all()):
        return None
    solved = torch.linalg.lstsq(wide, measured[:, None], driver="gelsd").solution[:, 0]
    rank = int(torch.linalg.matrix_rank(wide, rtol=1e-9))
    if rank < len(parts) or not bool(torch.isfinite(solved).all()):
        return None
    often = tuple(float(v) for v in solved)
    return often if _leaves_nothing(cells, columns, often) else None


def _in_words(case: Case, parts: Sequence[Part], found: Sequence[Counted]) -> Diagnosis | None:
    names = list(dict.fromkeys(name for counted in found for name in counted.names))
    ranks = tuple(counted.rank for counted in found)
    alike: dict[str, list[int]] = {}
    for counted in found:
        alike.setdefault(shown(parts, counted), []).append(counted.rank)
    because = [
        f"rank {spans(holders)} holds of {what}" for what, holders in list(alike.items())[:MOST]
    ]
    because.append("so put together, what the ranks' modules gave is what each holds, within the "
                   "threshold")  # fmt: skip
    own = own_only(case, parts, found, names)
    readings = (
        given_nothing(case, parts, found, names),
        late(parts, found, names),
        lost_everywhere(parts, found, names),
        by_group(parts, found, names),
        own,
        by_number(parts, found, names),
        some_ranks(parts, found, names),
    )
    for kind, cause in readings:
        if cause:
            if (kind, cause) == own:
                because.append(which_step(case, names, mixed=False)[2])
            because += _where_it_is_reduced(case, names) if kind == "late_gradient" else []
            return Diagnosis(cause=cause, kind=kind, ranks=ranks, because=tuple(because))
    return None


def _where_it_is_reduced(case: Case, names: Sequence[str]) -> list[str]:
    """The one place where reductions take these gradients, or give them."""
    wanted = {*names}
    found = {
        describe(case.record, joint)
        for joint in reductions_of(case)
        if len(joint.ranks) > 1 and wanted & {*carried_by(case, joint)}
    }
    return [f"that reduction is {found.pop()}"] if len(found) == 1 else []


def _names(case: Case) -> list[str]:
    return list(dict.fromkeys(cell.name for cell in case.failing_cells))
