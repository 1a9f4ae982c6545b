"""How the ranks' own gradients were put together: whose micro-batches each rank ends up with.

The traces say which rows every call of a rank took, and with which factor; the parts of the
reference say what gradient those rows make. So what a rank holds at the end can be read as a sum
over ranks and micro-batches, each counted so often.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from sumgrad.base.outcome import some_of, spans
from sumgrad.base.verdict import Diagnosis, Standing
from sumgrad.diagnose.case import Case, explains, fails
from sumgrad.diagnose.explainers.by_modules.looked import fraction_of, looked_by_rows, parts_of_rows
from sumgrad.diagnose.explainers.by_rank import multiplied_between
from sumgrad.diagnose.explainers.divergent import which_step
from sumgrad.diagnose.explainers.factors import explained
from sumgrad.diagnose.explanation import Explanation, Left
from sumgrad.diagnose.modules.loss_weights import row_weights, shares_at_the_loss
from sumgrad.judge.cells import Cell
from torch import Tensor

CLOSE = 1e-5
MAX_PARTS = 64
MOST = 6  # ranks or parts that are written out


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part:
    """One micro-batch. ranks: those that took the same rows in it, as tensor parallel ranks do.

    weights: (rows,) with which factor each row entered.
    """

    ranks: tuple[int, ...]
    number: int
    weights: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """How often each part is counted in what a rank holds of some parameters."""

    rank: int
    names: tuple[str, ...]
    often: tuple[float, ...]


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
    if len(measured) <= len(parts):
        return None
    solved = torch.linalg.lstsq(wide, measured[:, None], driver="gelsd").solution[:, 0]
    rank = int(torch.linalg.matrix_rank(wide, rtol=1e-9))
    if rank < len(parts) or not bool(torch.isfinite(solved).all()):
        return None
    often = tuple(float(v) for v in solved)
    return often if _leaves_nothing(cells, columns, often) else None


# ---- in words --------------------------------------------------------------------------------


def _in_words(case: Case, parts: Sequence[Part], found: Sequence[Counted]) -> Diagnosis | None:
    names = list(dict.fromkeys(name for counted in found for name in counted.names))
    ranks = tuple(counted.rank for counted in found)
    alike: dict[str, list[int]] = {}
    for counted in found:
        alike.setdefault(_shown(parts, counted), []).append(counted.rank)
    because = [
        f"rank {spans(holders)} holds of {shown}" for shown, holders in list(alike.items())[:MOST]
    ]
    because.append("so put together, what the ranks' modules gave is what each holds, within the "
                   "threshold")  # fmt: skip
    own = _own_only(case, parts, found, names)
    readings = (
        _late(parts, found, names),
        _by_group(parts, found, names),
        own,
        _by_number(parts, found, names),
        _some_ranks(parts, found, names),
    )
    for kind, cause in readings:
        if cause:
            if (kind, cause) == own:
                because.append(which_step(case, names, mixed=False)[2])
            return Diagnosis(cause=cause, kind=kind, ranks=ranks, because=tuple(because))
    return None


def _names(case: Case) -> list[str]:
    return list(dict.fromkeys(cell.name for cell in case.failing_cells))


def _own_only(
    case: Case, parts: Sequence[Part], found: Sequence[Counted], names: Sequence[str]
) -> tuple[str, str | None]:
    """Every rank holds what it made itself, and nothing of others, where there are others."""
    for counted in found:
        if all(counted.rank in part.ranks for part in parts):
            return "", None
        for part, often in zip(parts, counted.often, strict=True):
            if (counted.rank in part.ranks) == (abs(often) < CLOSE):
                return "", None
    kind, cause, _ = which_step(case, names, mixed=False)
    return kind, cause.format(what=some_of(list(names)))


def _late(
    parts: Sequence[Part], found: Sequence[Counted], names: Sequence[str]
) -> tuple[str, str | None]:
    """Of others some micro-batches are there and the rest not: those were added after it."""
    late: set[int] = set()
    early: set[int] = set()
    for counted in found:
        for part, often in zip(parts, counted.often, strict=True):
            if counted.rank in part.ranks:
                if abs(often) < CLOSE:
                    return "", None
                continue
            (late if abs(often) < CLOSE else early).add(part.number)
    if late & early:
        return _late_of_each(parts, found, names)
    if not late or not early:
        return "", None
    how = "after" if min(late) > min(early) else "outside"
    return "late_gradient", (
        f"{some_of(list(names))} is reduced too early: micro-batch {spans(sorted(late))} is added "
        f"{how} its reduction and stays on its own rank, micro-batch {spans(sorted(early))} is "
        f"reduced"
    )


def _late_of_each(
    parts: Sequence[Part], found: Sequence[Counted], names: Sequence[str]
) -> tuple[str, str | None]:
    """The same where ranks have unequally many: of each rank its last ones."""
    late: dict[int, set[int]] = {}
    early: dict[int, set[int]] = {}
    for counted in found:
        for part, often in zip(parts, counted.often, strict=True):
            if counted.rank not in part.ranks:
                held = late if abs(often) < CLOSE else early
                for rank in part.ranks:
                    held.setdefault(rank, set()).add(part.number)
    if late.keys() != early.keys() or any(min(late[r]) <= max(early[r]) for r in late):
        return "", None
    shown = "; ".join(f"{spans(sorted(late[rank]))} of rank {rank}" for rank in sorted(late))
    return "late_gradient", (
        f"{some_of(list(names))} is reduced too early: micro-batch {shown} is added after its "
        f"reduction and stays on its own rank, those before are reduced"
    )


def _by_group(
    parts: Sequence[Part], found: Sequence[Counted], names: Sequence[str]
) -> tuple[str, str | None]:
    """Every micro-batch is there once, from the ranks of a group that is not the same for all."""
    groups: dict[int, set[tuple[int, ...]]] = {}
    common = _common_weight(parts)
    for counted in found:
        there: dict[int, list[int]] = {}
        for part, often in zip(parts, counted.often, strict=True):
            if min(abs(often * common), abs(often * common - 1)) > CLOSE:
                return "", None
            there.setdefault(part.number, []).extend(part.ranks if abs(often) > CLOSE else ())
        for number, ranks in there.items():
            groups.setdefault(number, set()).add(tuple(sorted(ranks)))
    numbers: dict[str, list[int]] = {}
    for number, sets in groups.items():
        shown = " and over ".join(f"rank {spans(list(ranks))}" for ranks in sorted(sets) if ranks)
        numbers.setdefault(shown, []).append(number)
    if len(numbers) < 2 or "" in numbers:
        return "", None
    told = [f"micro-batch {spans(sorted(n))} over {where}" for where, n in numbers.items()]
    text = f"{some_of(list(names))} is not reduced over the same ranks each time"
    return "late_gradient", f"{text}: {'; '.join(told)}"


def _by_number(
    parts: Sequence[Part], found: Sequence[Counted], names: Sequence[str]
) -> tuple[str, str | None]:
    """Every rank holds every rank's micro-batches, each number so often."""
    often: dict[int, float] = {}
    common = _common_weight(parts)
    for counted in found:
        for part, value in zip(parts, (v * common for v in counted.often), strict=True):
            known = often.setdefault(part.number, value)
            if abs(known - value) > CLOSE * max(1.0, abs(known)):
                return "", None
    values = [often[number] for number in sorted(often)]
    if len(values) < 2 or max(values) - min(values) < CLOSE:
        return "", None
    shown = ", ".join(f"{n}: {_number(often[n])}" for n in sorted(often))
    lost = [n for n, value in often.items() if abs(value) < CLOSE]
    kept = {round(v, 5) for n, v in often.items() if n not in lost}
    if lost and len(kept) == 1:
        what = some_of(list(names))
        return "lost_rows", f"micro-batch {spans(sorted(lost))} is not in the gradient of {what}"
    ratios = {round(b / a, 5) for a, b in pairwise(values) if a}
    if len(values) > 2 and len(ratios) == 1 and not lost:
        text = "each call rescales what was there before"
        return "rescaled", f"micro-batches are counted {shown} in {some_of(list(names))}: {text}"
    if len({round(v, 5) for v in values}) > 1 and values == sorted(values, reverse=True):
        text = "what was there before is counted again with a later one"
        return (
            "counted_again",
            f"micro-batches are counted {shown} in {some_of(list(names))}: {text}",
        )
    return "row_factors", (
        f"micro-batches are counted {shown} in {some_of(list(names))}, as if what was added up "
        f"was multiplied by {multiplied_between(values, 'micro-batch')}: look for a clip, a "
        f"division or a reduction of .grad there"
    )


def _some_ranks(
    parts: Sequence[Part], found: Sequence[Counted], names: Sequence[str]
) -> tuple[str, str | None]:
    """Each rank holds the parts of some ranks and none of others."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for counted in found:
        there: dict[tuple[int, ...], set[bool]] = {}
        for part, often in zip(parts, counted.often, strict=True):
            there.setdefault(part.ranks, set()).add(abs(often) >= CLOSE)
        if any(len(states) > 1 for states in there.values()):
            return "", None
        inside = sorted(r for ranks, states in there.items() if True in states for r in ranks)
        groups.setdefault(tuple(inside), []).append(counted.rank)
    everybody = {r for part in parts for r in part.ranks}
    if any(set(inside) == everybody or not inside for inside in groups):
        return "", None
    most = max(abs(n) for counted in found for n in counted.often) * _common_weight(parts)
    repeated = f", {_number(most)} times" if abs(most - 1) > CLOSE else ""
    if len(groups) == 1:
        lost = sorted(everybody - set(next(iter(groups))))
        text = f"what rank {spans(lost)} made is not in {some_of(list(names))}, on any rank"
        return "lost_contribution", text + (
            f"; the rest is, {_number(most)} times" * bool(repeated)
        )
    shown = "; ".join(
        f"rank {spans(ranks)} holds what rank {spans(list(inside))} made{repeated}"
        for inside, ranks in list(groups.items())[:4]
    )
    return "too_few_ranks", f"{some_of(list(names))} is reduced over too few ranks: {shown}"


def _shown(parts: Sequence[Part], counted: Counted) -> str:
    """`rank 0, rank 1-2 micro-batch 0: 1/3 times; rank 1-2 micro-batch 1: 1 times`."""
    every: dict[tuple[int, ...], set[int]] = {}
    by_value: dict[str, dict[tuple[int, ...], set[int]]] = {}
    common = _common_weight(parts)
    for part, often in zip(parts, counted.often, strict=True):
        every.setdefault(part.ranks, set()).add(part.number)
        held = by_value.setdefault(_number(often * common), {})
        held.setdefault(part.ranks, set()).add(part.number)
    told = []
    for value, held in by_value.items():
        whose: dict[str, list[int]] = {}
        for ranks, numbers in held.items():
            whole = numbers == every[ranks]
            which = "" if whole else f" micro-batch {spans(sorted(numbers))}"
            whose.setdefault(which, []).extend(ranks)
        labels = [f"rank {spans(sorted(ranks))}{which}" for which, ranks in whose.items()]
        more = " ..." if len(labels) > MOST else ""
        told.append(f"{', '.join(labels[:MOST])}{more}: {value} times")
    return "; ".join(told)


def _common_weight(parts: Sequence[Part]) -> float:
    """The factor of every row of every part, if it is one."""
    weights = torch.cat([part.weights[part.weights != 0] for part in parts])
    one = bool(len(weights)) and bool((weights - weights[0]).abs().max() < CLOSE)
    return float(weights[0]) if one else 1.0


def _number(value: float) -> str:
    return "0" if abs(value) < CLOSE else fraction_of(value)
