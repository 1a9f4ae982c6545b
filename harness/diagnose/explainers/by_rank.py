"""How the ranks' own gradients were put together, where a script's ranks wrote them down.

Both the gradient that a rank ends with and the single run's are held against what each rank's own
backwards gave: got = sum of b[rank, pass] own[rank, pass], wanted = sum of a[rank, pass] own. Where
both hold, the difference of the two tables is the mistake, and it is proved.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from sumgrad.base.outcome import some_of, spans
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.factors import explained
from sumgrad.diagnose.explanation import Explanation, Left
from sumgrad.diagnose.fit import as_fraction, fit_deviation
from sumgrad.judge.cells import Cell
from sumgrad.record.ranks import OWN, OWN_AT
from torch import Tensor

ALIKE = 1e-6  # of the largest weight: weights that are the same
NEEDED = 4  # numbers for each weight that is fitted
ROUNDINGS, EPS = 64, torch.finfo(torch.float64).eps  # of the largest term, that a fit leaves
SHOWN = 4  # ranks whose weights are written out


Source = tuple[int, ...]  # ranks whose own backwards gave the same


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixed:
    """Some parameters of one rank, as combinations of what the ranks' own backwards gave.

    got, wanted: (sources, passes). wanted is None where no weights of the ranks' own gradients give
    the single run's.
    """

    rank: int
    names: tuple[str, ...]
    sources: tuple[Source, ...]
    got: Tensor
    wanted: Tensor | None

    @property
    def mine(self) -> Tensor:
        """Which source is its own."""
        return torch.tensor([self.rank in source for source in self.sources])


def put_together_by_rank(case: Case, left: Left) -> Iterator[Explanation]:
    """What the ranks' own gradients were weighed by, beside what they had to be weighed by."""
    found = mixed(case)
    said = _in_words(found) if all(m.wanted is not None for m in found) else None
    told = {(m.rank, n) for m in found for n in m.names}
    wrong = {(c.rank, c.name) for c in case.failing_cells}
    if said is None or 2 * len(told) < len(wrong):
        return
    kind, cause = said
    names = list(dict.fromkeys(n for m in found for n in m.names))
    others = list(dict.fromkeys(n for r, n in wrong if (r, n) not in told))
    every = set(names) == set(case.record.spec.params)
    yield explained(
        case,
        Diagnosis(
            cause=f"{'every gradient' if every else some_of(names)}: {cause}",
            kind=kind,
            standing="likely" if others else "proved",
            ranks=tuple(sorted({m.rank for m in found})),
            because=(
                "what every rank's own backward gave was kept before its reduction; with these "
                "weights it gives the measured gradient, and with those the single run's, both "
                "under the threshold",
                *_tables(found),
            ),
            however=(f"{some_of(others)} is wrong too, and is not told",) if others else (),
        ),
    )


def before_the_reduction(case: Case) -> str | None:
    """Where the mistake must be if ranks are put together evenly and yet give something else."""
    found = mixed(case)
    if not found or any(m.wanted is not None for m in found):
        return None
    if {(m.rank, n) for m in found for n in m.names} != {
        (c.rank, c.name) for c in case.failing_cells
    }:
        return None
    return (
        f"each is put together from the ranks' own gradients with the weights {_weights(found[0])}"
        f", and no weights of them give the single run's: what some rank's own backward gives is "
        f"wrong before it is reduced"
    )


def mixed(case: Case) -> list[Mixed]:
    """Of every failing rank, its wrong parameters by the weights that they were put together with;
    nothing where own gradients were not kept or do not tell."""
    if "by_rank" not in case.known:
        case.known["by_rank"] = list(_mixed(case))
    return list(case.known["by_rank"])


def _mixed(case: Case) -> Iterator[Mixed]:
    at = (OWN, case.step)
    kept = all(at in held.grads for held in case.record.ranks.values())
    if case.has_plan or not kept or not case.exact:
        return
    alike: dict[tuple[int, tuple[Source, ...], int], list[_Columns]] = defaultdict(list)
    for cell in case.failing_cells:
        columns = _columns(case, cell)
        if columns is not None:
            alike[cell.rank, columns.sources, columns.passes].append(columns)
    for (rank, sources, passes), found in alike.items():
        groups: list[list[_Columns]] = []
        for columns in sorted(found, key=lambda c: -c.own.shape[1]):
            for group in groups:
                if _weights_of([*group, columns]) is not None:
                    group.append(columns)
                    break
            else:
                groups.append([columns])
        for group in groups:
            tables = _weights_of(group)
            numbers = sum(columns.own.shape[1] for columns in group)
            if tables is None or not tables.only or numbers < NEEDED * len(sources) * passes:
                continue
            yield Mixed(
                rank=rank,
                names=tuple(columns.cell.name for columns in group),
                sources=sources,
                got=tables.got.reshape(len(sources), passes),
                wanted=None if tables.wanted is None else tables.wanted.reshape(-1, passes),
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Columns:
    """A wrong parameter: what each source gave of some of its elements, (sources * passes, n), and
    those elements of what the rank has and of what it must have, (n,)."""

    cell: Cell
    sources: tuple[Source, ...]
    passes: int
    own: Tensor
    measured: Tensor
    wanted: Tensor

    @property
    def size(self) -> float:
        return self.cell.wanted.size or self.cell.wanted.scale or 1.0


def _columns(case: Case, cell: Cell) -> _Columns | None:
    """None where ranks kept other elements of it, or only one of them gave something else."""
    numel = cell.measured.numel()
    index = torch.arange(numel) if cell.index is None else cell.index.reshape(-1)
    kept: dict[Source, Tensor] = {}
    common: Tensor | None = None
    for rank, held in case.record.ranks.items():
        own = held.grads[OWN, case.step].get(cell.name)
        at = held.grads.get((OWN_AT, case.step), {}).get(cell.name)
        if own is None or at is None or own.dim() != 2 or own.shape[1:] != at.shape:
            continue
        here = torch.isin(at, index)
        if not bool(here.any()):
            continue  # another part of it
        if common is not None and not torch.equal(at[here], common):
            return None
        common, given = at[here], own[:, here].double()
        twin = next((s for s, g in kept.items() if g.shape == given.shape and _near(g, given)), ())
        kept[(*twin, rank)] = kept.pop(twin, given)
    if common is None or len(kept) < 2 or len({len(g) for g in kept.values()}) != 1:
        return None
    columns = torch.cat([kept[source] for source in sorted(kept)])
    if not bool(torch.isfinite(columns).all()):
        return None
    order = index.argsort()
    place = order[torch.searchsorted(index[order], common)]
    return _Columns(
        cell=cell,
        sources=tuple(sorted(kept)),
        passes=len(columns) // len(kept),
        own=columns,
        measured=cell.measured.reshape(-1)[place],
        wanted=cell.wanted.value.reshape(-1)[place],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weights:
    """One table for some parameters, (sources * passes,). only: no other gives the same."""

    got: Tensor
    wanted: Tensor | None
    only: bool


def _weights_of(together: Sequence[_Columns]) -> _Weights | None:
    """The weights that give what the rank has; None where none do."""
    matrix = torch.cat([c.own / c.size for c in together], dim=1)
    found = []
    for values in ([c.measured for c in together], [c.wanted for c in together]):
        target = torch.cat([v / c.size for v, c in zip(values, together, strict=True)])
        fit = fit_deviation(list(matrix), target)
        only = all(value is not None for value in fit.values)
        weights = torch.tensor([(v or 1.0) - 1 for v in fit.values], dtype=torch.float64)
        weights = weights.where(weights.abs() > ALIKE * weights.abs().max(), 0.0)
        left = fit.residual if not only else target - weights @ matrix
        start, fits = 0, True
        for c in together:
            here = left[start : start + c.own.shape[1]].abs() * c.size
            start += c.own.shape[1]
            roundings = ROUNDINGS * EPS * float((weights.abs() @ c.own.abs()).max())
            fits &= float(here.max()) <= c.cell.wanted.threshold + roundings
        found.append((weights if fits else None, only))
    (got, only), (wanted, _) = found
    return None if got is None else _Weights(got=got, wanted=wanted, only=only)


def _in_words(found: Sequence[Mixed]) -> tuple[str, str] | None:
    """Kind and cause, of the patterns that people make; None where one factor says it shorter."""
    if all(_scaled(m) is not None for m in found):
        return None
    if all(_alone(m) for m in found):
        return (
            "not_reduced",
            f"no gradient of another rank is in it: rank {_ranks(found)} each keep what their own "
            f"backward gave{_times(found)}; the single run's has other ranks' in it",
        )
    left_out = [_left_out(m) for m in found]
    if all(left_out):
        ranks = sorted({r for out in left_out for r in out})
        return (
            "not_reduced",
            f"gradients of rank {spans(ranks)} are not in it, on rank {_ranks(found)}",
        )
    if all(_early_passes_alone(m) for m in found):
        return (
            "not_reduced",
            f"only the last of {found[0].got.shape[1]} backwards is reduced; what the others gave "
            f"stays on the rank that made it",
        )
    if all(_even(m) for m in found):
        return (
            "weights_of_ranks",
            f"every rank counts alike, as when each divides its loss by its own number of rows or "
            f"tokens, or scales it by its own factor: every rank's own gradient is weighed alike "
            f"({_share(found[0].got[0, 0])}), where the single run weighs them by "
            f"{_weights(found[0], wanted=True)}",
        )
    return (
        "weights_of_ranks",
        f"the ranks' own gradients are weighed by {_weights(found[0])}, where the single run "
        f"weighs them by {_weights(found[0], wanted=True)}",
    )


def _scaled(mix: Mixed) -> float | None:
    """The one factor by which all weights are off, or None."""
    assert mix.wanted is not None
    at = int(mix.wanted.abs().argmax())
    factor = float(mix.got.reshape(-1)[at] / mix.wanted.reshape(-1)[at])
    return factor if _near(mix.got, factor * mix.wanted) else None


def _is_zero(weights: Tensor, mix: Mixed) -> bool:
    """Beside the largest weight of those that are there."""
    most = float(mix.got.abs().max())
    return not weights.numel() or float(weights.abs().max()) <= ALIKE * most


def _alone(mix: Mixed) -> bool:
    """Only its own backwards are in it, though others belong in it."""
    mine = mix.mine
    assert mix.wanted is not None
    return (
        bool(mine.any())
        and _is_zero(mix.got[~mine], mix)
        and not _is_zero(mix.got[mine], mix)
        and not _is_zero(mix.wanted[~mine], mix)
    )


def _left_out(mix: Mixed) -> list[int]:
    """Ranks of which nothing is in it, though it belongs there."""
    assert mix.wanted is not None
    return [
        rank
        for source, got, wanted in zip(mix.sources, mix.got, mix.wanted, strict=True)
        if _is_zero(got, mix) and not _is_zero(wanted, mix)
        for rank in source
    ]


def _early_passes_alone(mix: Mixed) -> bool:
    """Of others, only the last backward is in it."""
    mine = mix.mine
    others = mix.got[~mine]
    return (
        mix.got.shape[1] > 1
        and bool(mine.any())
        and _is_zero(others[:, :-1].reshape(-1), mix)
        and not _is_zero(others[:, -1], mix)
        and not _is_zero(mix.got[mine][:, :-1].reshape(-1), mix)
    )


def _even(mix: Mixed) -> bool:
    """All ranks and backwards weigh the same, though they must not."""
    assert mix.wanted is not None
    return _near(mix.got, mix.got[0, 0].expand_as(mix.got)) and bool((mix.wanted > 0).all())


def _near(a: Tensor, b: Tensor) -> bool:
    return float((a - b).abs().max()) <= ALIKE * max(float(a.abs().max()), float(b.abs().max()))


def _ranks(found: Sequence[Mixed]) -> str:
    return spans(sorted({m.rank for m in found}))


def _times(found: Sequence[Mixed]) -> str:
    """By which factor a rank that keeps its own keeps it; empty for once."""
    values = torch.cat([m.got[m.mine].reshape(-1) for m in found])
    if not _near(values, values[0].expand_as(values)):
        return ""
    once = abs(float(values[0]) - 1) <= ALIKE
    return "" if once else f" (times {_share(values[0])})"


def _tables(found: Sequence[Mixed]) -> list[str]:
    out = []
    for mix in found[:SHOWN]:
        out.append(
            f"rank {mix.rank}, {some_of(list(mix.names))}: {_weights(mix)}; to be "
            f"{_weights(mix, wanted=True)}"
        )
    return out


def _weights(mix: Mixed, *, wanted: bool = False) -> str:
    """`1/3 of rank 0-1 and 1/4 of rank 2`, ranks with equal weights together."""
    table = mix.wanted if wanted else mix.got
    assert table is not None
    groups: list[tuple[Tensor, list[int]]] = []
    for source, row in zip(mix.sources, table, strict=True):
        for other, ranks in groups:
            if float((row - other).abs().max()) <= ALIKE * float(table.abs().max()):
                ranks.extend(source)
                break
        else:
            groups.append((row, list(source)))
    return ", ".join(f"{_row(row)} of rank {spans(ranks)}" for row, ranks in groups)


def _row(row: Tensor) -> str:
    if _near(row, row[:1].expand_as(row)):
        return _share(row[0])
    return "(" + ", ".join(_share(value) for value in row) + " by backward)"


def _share(value: Tensor) -> str:
    number = float(value)
    fraction = as_fraction(number, ALIKE * abs(number) / 10)
    return str(fraction) if fraction is not None else f"{number:.6g}"
