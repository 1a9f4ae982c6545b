"""What a rank ends with, as a sum of what the ranks' own backwards gave.

Both the gradient that a rank ends with and the single process's are held against what each rank's
own backwards gave: got = sum of b[rank, pass] own[rank, pass], wanted = sum of a[rank, pass] own.
Where both hold, the difference of the two tables is the mistake; where one does, it is known on
which side of the reduction the mistake lies.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.fit import fit_deviation
from sumgrad.diagnose.row_fit import Unit, column
from sumgrad.judge.cells import Cell
from sumgrad.record.ranks import OWN, OWN_AT
from torch import Tensor

SAME_FACTOR = 1e-5  # of several parameters
ALIKE = 1e-6  # of the largest weight: weights that are the same
NEEDED = 4  # numbers for each weight that is fitted
ROUNDINGS, EPS = 64, torch.finfo(torch.float64).eps  # of the largest term, that a fit leaves


Source = tuple[int, ...]  # ranks whose own backwards gave the same


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixed:
    """Some parameters of one rank, as combinations of what the ranks' own backwards gave.

    got, wanted: (sources, passes). Of the two one may be None: no weights of the ranks' own
    gradients give what the rank holds, or what it must. lines: of a user's, that called each pass.
    only: no other weights do the same, but of a backward that gave nothing, which counts as the
    others of its source; where both are known there are none.
    """

    rank: int
    names: tuple[str, ...]
    sources: tuple[Source, ...]
    got: Tensor | None
    wanted: Tensor | None
    lines: tuple[str, ...] = ()
    only: bool = True

    def weighed(self) -> Weighed | None:
        """The same where both are known."""
        if self.got is None or self.wanted is None:
            return None
        return Weighed(self.rank, self.names, self.sources, self.got, self.wanted, self.lines)


@dataclass(frozen=True, slots=True)
class Weighed:
    """What a rank has and what it must have, (sources, passes) both: see Mixed."""

    rank: int
    names: tuple[str, ...]
    sources: tuple[Source, ...]
    got: Tensor
    wanted: Tensor
    lines: tuple[str, ...] = ()

    @property
    def mine(self) -> Tensor:
        """Which source is its own."""
        return torch.tensor([self.rank in source for source in self.sources])


def mixed(case: Case) -> list[Mixed]:
    """Of every failing rank, its wrong parameters by the weights that they were put together with;
    nothing where own gradients were not kept or do not tell."""
    if "by_rank" not in case.known:
        case.known["by_rank"] = list(_mixed(case))
    return list(case.known["by_rank"])


def _mixed(case: Case) -> Iterator[Mixed]:
    given = given_by_ranks(case)
    if case.has_plan or given is None or not case.exact:
        return
    alike: dict[tuple[int, tuple[Source, ...], int], list[Columns]] = defaultdict(list)
    for cell in case.failing_cells:
        columns = columns_of(cell, given)
        if columns is not None:
            alike[cell.rank, columns.sources, columns.passes].append(columns)
    for (rank, sources, passes), found in alike.items():
        groups: list[list[Columns]] = []
        for columns in sorted(found, key=lambda c: -c.own.shape[1]):
            kind = weights_of([columns]).kind
            for group in groups:
                if weights_of(group).kind == kind == weights_of([*group, columns]).kind:
                    group.append(columns)
                    break
            else:
                groups.append([columns])
        for group in groups:
            tables = _with_empty_passes(weights_of(group, zeros=True), group, passes)
            numbers = sum(columns.own.shape[1] for columns in group)
            few = numbers < NEEDED * len(sources) * passes
            if not any(tables.kind) or (all(tables.kind) and not tables.only) or few:
                continue
            yield Mixed(
                rank=rank,
                names=tuple(columns.cell.name for columns in group),
                sources=sources,
                got=None if tables.got is None else tables.got.reshape(-1, passes),
                wanted=None if tables.wanted is None else tables.wanted.reshape(-1, passes),
                lines=lines_of_backwards(case, rank, group[0].cell.name),
                only=tables.only,
            )


def _with_empty_passes(tables: Weights, group: Sequence[Columns], passes: int) -> Weights:
    """A backward that gave nothing, as of rows without a target, counts as the others of its
    source, where those count alike: any weight is its."""
    empty = torch.stack([(c.own == 0).all(1) for c in group]).all(0).reshape(-1, passes)
    return replace(tables, got=_filled(tables.got, empty), wanted=_filled(tables.wanted, empty))


def _filled(table: Tensor | None, empty: Tensor) -> Tensor | None:
    if table is None:
        return None
    out = table.reshape(empty.shape).clone()
    for row, none in zip(out, empty, strict=True):
        told = row[~none]
        if len(told) and near(told, told[:1].expand_as(told)):
            row[none] = told[0]
    return out.reshape(table.shape)


def with_few_numbers(case: Case, found: Sequence[Weighed]) -> list[Weighed]:
    """With parameters of too few numbers to tell weights, as a bias, which those of others fit."""
    given, out = given_by_ranks(case), list(found)
    told = {(m.rank, name) for m in found for name in m.names}
    for cell in case.failing_cells if given is not None else ():
        assert given is not None
        if (cell.rank, cell.name) in told:
            continue
        columns = columns_of(cell, given)
        for i, m in enumerate(out) if columns is not None else ():
            assert columns is not None
            if m.rank == cell.rank and _fits(m, columns):
                out[i] = replace(m, names=(*m.names, cell.name))
                break
    return out


def add_up_evenly(case: Case) -> bool:
    """Whether of every wrong gradient the sum of what all ranks' own backwards gave is the right
    one, up to one factor: then no row counts other than it should before they are reduced."""
    given = given_by_ranks(case)
    if given is None or not case.exact:
        return False
    factors = []
    for cell in case.failing_cells:
        columns = columns_of(cell, given, uneven=True)
        if columns is None:
            return False
        often = torch.tensor([len(source) for source in columns.sources]).double()
        total = often.repeat_interleave(columns.passes) @ columns.own
        squares = float(total @ total)
        factor = float(total @ columns.wanted) / squares if squares else 1.0
        left = (columns.wanted - factor * total).abs().max()
        if float(left) > cell.wanted.threshold:
            return False
        factors += [factor] if squares else []
    return bool(factors) and max(factors) - min(factors) <= SAME_FACTOR * abs(factors[0])


def has_few_numbers(cell: Cell, given: Given) -> bool:
    """Whether it has too few numbers to tell weights by themselves."""
    columns = columns_of(cell, given)
    return columns is not None and columns.own.shape[1] < NEEDED * len(columns.own)


def _fits(m: Weighed, columns: Columns) -> bool:
    """Whether a parameter is, and should be, what the ranks gave it with these weights."""
    if columns.passes != m.got.shape[1]:
        return False
    gave = columns.own.reshape(len(columns.sources), columns.passes, -1)
    at = [next((i for i, s in enumerate(columns.sources) if source[0] in s), None)
          for source in m.sources]  # fmt: skip
    for weights, value in ((m.got, columns.measured), (m.wanted, columns.wanted)):
        total = torch.zeros_like(value)
        for i, row in zip(at, weights, strict=True):
            total += row @ gave[i] if i is not None else 0.0
        roundings = ROUNDINGS * EPS * float(columns.own.abs().sum(0).max())
        bound = columns.cell.wanted.threshold + roundings * float(weights.abs().max())
        if not float((total - value).abs().max()) <= bound:
            return False
    return True


def lines_of_backwards(case: Case, rank: int, name: str) -> tuple[str, ...]:
    """A user's lines that called the backwards that gave a parameter something."""
    traces = case.traces
    return () if traces is None else traces.ranks[rank].own_lines.get(name, ())


Given = Mapping[int, tuple[Mapping[str, Tensor], Mapping[str, Tensor]]]


def given_by_ranks(case: Case) -> Given | None:
    """By rank and parameter, what its own backwards gave, (passes, samples), and the elements that
    these are of; None where not every rank kept it."""
    traces, own, at = case.traces, (OWN, case.step), (OWN_AT, case.step)
    if traces is not None and any(trace.own for trace in traces.ranks.values()):
        return {rank: (trace.own, trace.own_at) for rank, trace in traces.ranks.items()}
    if any(own not in held.grads for held in case.record.ranks.values()):
        return None
    return {r: (held.grads[own], held.grads.get(at, {})) for r, held in case.record.ranks.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """A parameter of a rank: what each source gave of some of its elements, (sources * passes, n),
    and those elements of what the rank has and of what it must have, (n,). place: which elements
    of the flat part that the rank holds these are. runs: how many backwards each source ran, where
    some ran fewer than `passes`."""

    cell: Cell
    sources: tuple[Source, ...]
    passes: int
    own: Tensor
    measured: Tensor
    wanted: Tensor
    place: Tensor
    runs: tuple[int, ...] = ()

    @property
    def size(self) -> float:
        return self.cell.wanted.size or self.cell.wanted.scale or 1.0


def columns_of(cell: Cell, given: Given, *, uneven: bool = False) -> Columns | None:
    """None where ranks kept other elements of it, or, unless `uneven`, where some have more passes
    than others: then those that are not there are zeros."""
    numel = cell.measured.numel()
    index = torch.arange(numel) if cell.index is None else cell.index.reshape(-1)
    kept: dict[Source, Tensor] = {}
    common: Tensor | None = None
    for rank, (gradients, places) in given.items():
        own, at = gradients.get(cell.name), places.get(cell.name)
        if own is None or at is None or own.dim() != 2 or own.shape[1:] != at.shape:
            continue
        here = torch.isin(at, index)
        if not bool(here.any()):
            continue  # another part of it
        if common is not None and not torch.equal(at[here], common):
            return None
        common, mine = at[here], own[:, here].double()
        twin = next((s for s, g in kept.items() if g.shape == mine.shape and near(g, mine)), ())
        kept[(*twin, rank)] = kept.pop(twin, mine)
    lengths = {len(g) for g in kept.values()}
    if common is None or (len(lengths) != 1 and not uneven):
        return None
    runs = tuple(len(kept[source]) for source in sorted(kept))
    for source, own in kept.items():
        kept[source] = torch.cat([own, own.new_zeros(max(lengths) - len(own), own.shape[1])])
    columns = torch.cat([kept[source] for source in sorted(kept)])
    if not bool(torch.isfinite(columns).all()):
        return None
    order = index.argsort()
    place = order[torch.searchsorted(index[order], common)]
    return Columns(
        cell=cell,
        sources=tuple(sorted(kept)),
        passes=len(columns) // len(kept),
        own=columns,
        measured=cell.measured.reshape(-1)[place],
        wanted=cell.wanted.value.reshape(-1)[place],
        place=place,
        runs=runs,
    )


def are_of_rows(case: Case, found: Iterable[tuple[Columns, Tensor]]) -> bool:
    """Whether all of these, of which that can be told, are: see `_is_of_rows`."""
    told = {_is_of_rows(case, columns, gave) for columns, gave in found}
    return True in told and False not in told


def _is_of_rows(case: Case, columns: Columns, gave: Tensor) -> bool | None:
    """Whether what some backwards gave, (n,), is made up of what rows of the batch give in one
    process, as where rows are read once more. None where there are too few numbers to tell, or
    nothing is known of rows."""
    intervals, numel = case.reference.intervals, columns.cell.measured.numel()
    if len(intervals) < 2 or len(gave) < 2 * len(intervals) or int(columns.place.max()) >= numel:
        return None
    units = [Unit(term=None, rows=rows) for rows in intervals]
    parts = torch.stack([column(case, columns.cell, unit).reshape(-1) for unit in units])
    parts = parts[:, columns.place]
    if not bool(parts.any()):
        return None
    weights = torch.linalg.lstsq(parts.T, gave[:, None], driver="gelsd").solution[:, 0]
    return float((weights @ parts - gave).norm()) <= ALIKE * float(gave.norm())


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsGiven:
    """A parameter's gradient by rows, where what all ranks gave adds up to the right one.

    passes: (sources, P, R, n) what each gave, times the one factor that makes the sum right; rows:
    (sources, R, n) their sums; got: (R, n) what the rank has. wrong: numbers of its rows that are
    not the sum. tolerance: of an element.
    """

    passes: Tensor
    rows: Tensor
    got: Tensor
    wrong: tuple[int, ...]
    tolerance: float


def rows_given(columns: Columns) -> RowsGiven | None:
    """None where not every element was kept, or where they do not add up."""
    shape, numel = columns.cell.measured.shape, columns.cell.measured.numel()
    if len(shape) < 2 or len(columns.place) != numel or shape[0] < 2:
        return None
    order = columns.place.argsort()
    passes = columns.own[:, order].reshape(len(columns.sources), columns.passes, shape[0], -1)
    rows = passes.sum(1)
    got, wanted = (t[order].reshape(shape[0], -1) for t in (columns.measured, columns.wanted))
    often = torch.tensor([len(s) for s in columns.sources], dtype=torch.float64)
    whole = torch.einsum("r,rij->ij", often, rows)
    squares = float((whole * whole).sum())
    factor = float((whole * wanted).sum()) / squares if squares else 0.0
    tolerance = columns.cell.wanted.threshold
    if not factor or float((wanted - factor * whole).abs().max()) > tolerance:
        return None
    wrong = ((got - wanted).abs() > tolerance).any(1).nonzero()[:, 0].tolist()
    return RowsGiven(
        passes=passes * factor, rows=rows * factor, got=got, wrong=tuple(wrong), tolerance=tolerance
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """One table for some parameters, (sources * passes,). only: no other gives the same."""

    got: Tensor | None
    wanted: Tensor | None
    only: bool

    @property
    def kind(self) -> tuple[bool, bool]:
        return self.got is not None, self.wanted is not None


def weights_of(together: Sequence[Columns], *, zeros: bool = False) -> Weights:
    """The weights that give what the rank has, and what it must have. zeros: what a backward gave
    may be nothing, and counts 0 times."""
    matrix = torch.cat([c.own / c.size for c in together], dim=1)
    found = []
    for values in ([c.measured for c in together], [c.wanted for c in together]):
        target = torch.cat([_seen(v, c) / c.size for v, c in zip(values, together, strict=True)])
        unit = _power_of_two(float(target.abs().max()) / (float(matrix.abs().max()) or 1.0))
        fit = fit_deviation(list(matrix), target / unit)
        nothing = (zeros & (matrix == 0).all(1)).tolist()
        only = all(v is not None or zero for v, zero in zip(fit.values, nothing, strict=True))
        fitted = [0.0 if v is None else unit * (v - 1) for v in fit.values]
        weights = torch.tensor(fitted, dtype=torch.float64)
        weights = weights.where(weights.abs() > ALIKE * weights.abs().max(), 0.0)
        left = fit.residual * unit if not only else target - weights @ matrix
        start, fits = 0, True
        for c in together:
            here = left[start : start + c.own.shape[1]].abs() * c.size
            start += c.own.shape[1]
            roundings = ROUNDINGS * EPS * float((weights.abs() @ c.own.abs()).max())
            fits &= float(here.max()) <= c.cell.wanted.threshold + roundings
        found.append((weights if fits else None, only))
    (got, only), (wanted, _) = found
    return Weights(got=got, wanted=wanted, only=only)


def _seen(value: Tensor, columns: Columns) -> Tensor:
    """Of a value all of which is below the threshold, nothing."""
    below = float(value.abs().max()) <= columns.cell.wanted.threshold
    return torch.zeros_like(value) if below else value


def _power_of_two(value: float) -> float:
    """The next below; 1 for none. To divide by it costs no bits."""
    return 2.0 ** (math.frexp(value)[1] - 1) if value and math.isfinite(value) else 1.0


def near(a: Tensor, b: Tensor) -> bool:
    return float((a - b).abs().max()) <= ALIKE * max(float(a.abs().max()), float(b.abs().max()))
