"""How the ranks' own gradients were put together, where a script's ranks wrote them down.

Both the gradient that a rank ends with and the single run's are held against what each rank's own
backwards gave: got = sum of b[rank, pass] own[rank, pass], wanted = sum of a[rank, pass] own. Where
both hold, the difference of the two tables is the mistake, and it is proved.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from sumgrad.base.outcome import some_of, spans
from sumgrad.base.tensors import bits
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.factors import explained
from sumgrad.diagnose.explanation import Explanation, Left
from sumgrad.diagnose.fit import as_fraction, fit_deviation
from sumgrad.judge.cells import Cell
from sumgrad.record.ranks import OWN, sampled
from torch import Tensor

ALIKE = 1e-6  # of the largest weight: weights that are the same
NEEDED = 4  # numbers for each weight that is fitted
ROUNDINGS, EPS = 64, torch.finfo(torch.float64).eps  # of the largest term, that a fit leaves
SHOWN = 4  # ranks whose weights are written out


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixed:
    """Some parameters of one rank, as combinations of what the ranks' own backwards gave.

    sources: the ranks that hold the same elements. got, wanted: (sources, passes). wanted is None
    where no weights of their own gradients give the single run's.
    """

    rank: int
    names: tuple[str, ...]
    sources: tuple[int, ...]
    got: Tensor
    wanted: Tensor | None

    def is_like(self, other: Mixed) -> bool:
        """Whether another parameter was put together by the same weights."""
        return (
            self.sources == other.sources
            and self.got.shape == other.got.shape
            and _near(self.got, other.got)
            and (self.wanted is None) == (other.wanted is None)
            and (self.wanted is None or other.wanted is None or _near(self.wanted, other.wanted))
        )


def put_together_by_rank(case: Case, left: Left) -> Iterator[Explanation]:
    """What the ranks' own gradients were weighed by, beside what they had to be weighed by."""
    found = mixed(case)
    known = [m for m in found if m.wanted is not None]
    if not found or len(known) < len(found):
        return
    if {(m.rank, n) for m in known for n in m.names} != {
        (c.rank, c.name) for c in case.failing_cells
    }:
        return
    said = _in_words(known)
    if said is None:
        return
    kind, cause = said
    names = list(dict.fromkeys(n for m in known for n in m.names))
    every = set(names) == set(case.record.spec.params)
    yield explained(
        case,
        Diagnosis(
            cause=f"{'every gradient' if every else some_of(names)}: {cause}",
            kind=kind,
            standing="proved",
            ranks=tuple(sorted({m.rank for m in known})),
            because=(
                "what every rank's own backward gave was kept before its reduction; with these "
                "weights it gives the measured gradient, and with those the single run's, both "
                "under the threshold",
                *_tables(known),
            ),
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
    own = {r: held.grads[at] for r, held in case.record.ranks.items() if at in held.grads}
    if case.has_plan or len(own) < len(case.record.ranks) or not case.exact:
        return
    by_rank: dict[int, list[Cell]] = defaultdict(list)
    for cell in case.failing_cells:
        by_rank[cell.rank].append(cell)
    for cells in by_rank.values():
        columns = [_columns(case, own, cell) for cell in cells]
        alike: dict[tuple[tuple[int, ...], int], list[_Columns]] = defaultdict(list)
        for column in columns:
            if column is not None:
                alike[column.sources, column.passes].append(column)
        for together in alike.values():
            one = _fitted(together)
            if one is not None:
                yield one
                continue
            single = [m for column in together if (m := _fitted([column])) is not None]
            while single:
                like = [m for m in single if m.is_like(single[0])]
                single = [m for m in single if not m.is_like(like[0])]
                yield replace(like[0], names=tuple(n for m in like for n in m.names))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Columns:
    """A wrong parameter: samples of what each source gave, (sources * passes, samples)."""

    cell: Cell
    sources: tuple[int, ...]
    passes: int
    own: Tensor

    @property
    def size(self) -> float:
        return self.cell.wanted.size or self.cell.wanted.scale or 1.0


def _columns(case: Case, own: dict[int, dict[str, Tensor]], cell: Cell) -> _Columns | None:
    """None where not every rank that holds the same elements kept what its own backwards gave."""
    part = None if cell.index is None else bits([cell.index])
    sources = []
    for rank, held in case.record.ranks.items():
        index = held.index_of(case.tier, cell.name)
        if cell.name in held.params and (None if index is None else bits([index])) == part:
            sources.append(rank)
    given = [own[rank].get(cell.name) for rank in sources]
    wanted = sampled(cell.measured).numel()
    kept = [g.double() for g in given if g is not None and g.dim() == 2 and g.shape[1] == wanted]
    if len(kept) < len(sources) or len(sources) < 2 or len({len(g) for g in kept}) != 1:
        return None
    columns = torch.cat(kept)
    if not bool(torch.isfinite(columns).all()):
        return None
    return _Columns(cell=cell, sources=tuple(sources), passes=len(kept[0]), own=columns)


def _fitted(together: Sequence[_Columns]) -> Mixed | None:
    """One table of weights for some parameters of a rank; None where none gives what it has."""
    matrix = torch.cat([c.own / c.size for c in together], dim=1)
    if matrix.shape[1] < NEEDED * matrix.shape[0]:
        return None
    first = together[0]
    got = _weights_of(together, matrix, [sampled(c.cell.measured) for c in together])
    if got is None:
        return None
    wanted = _weights_of(together, matrix, [sampled(c.cell.wanted.value) for c in together])
    shape = (len(first.sources), first.passes)
    return Mixed(
        rank=first.cell.rank,
        names=tuple(c.cell.name for c in together),
        sources=first.sources,
        got=got.reshape(shape),
        wanted=None if wanted is None else wanted.reshape(shape),
    )


def _weights_of(
    together: Sequence[_Columns], matrix: Tensor, values: Sequence[Tensor]
) -> Tensor | None:
    """The weights that give these values under every threshold; None where they do not, or are
    not the only ones."""
    target = torch.cat([v / c.size for v, c in zip(values, together, strict=True)])
    fit = fit_deviation(list(matrix), target)
    if any(value is None for value in fit.values):
        return None
    known = [value - 1 for value in fit.values if value is not None]
    weights = torch.tensor(known, dtype=torch.float64)
    for column, value in zip(together, values, strict=True):
        left = value - weights @ column.own
        roundings = ROUNDINGS * EPS * float((weights.abs() @ column.own.abs()).max())
        if not float(left.abs().max()) <= column.cell.wanted.threshold + roundings:
            return None
    return weights.where(weights.abs() > ALIKE * weights.abs().max(), 0.0)


def _in_words(found: Sequence[Mixed]) -> tuple[str, str] | None:
    """Kind and cause, of the patterns that people make; None where one factor says it shorter."""
    if all(_scaled(m) is not None for m in found):
        return None
    if all(_alone(m) for m in found):
        return (
            "not_reduced",
            f"no gradient of another rank is in it: rank {_ranks(found)} each keep what their own "
            f"backward gave{_times(found)}, where the single run's is a sum over the ranks",
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
            "mean_of_means",
            f"every rank's own gradient is weighed alike ({_share(found[0].got[0, 0])}), where the "
            f"single run weighs them by {_weights(found[0], wanted=True)}: each rank divides by a "
            f"number of its own (rows, tokens), and the ranks are averaged",
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
    mine = torch.tensor([r == mix.rank for r in mix.sources])
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
        for rank, got, wanted in zip(mix.sources, mix.got, mix.wanted, strict=True)
        if _is_zero(got, mix) and not _is_zero(wanted, mix)
    ]


def _early_passes_alone(mix: Mixed) -> bool:
    """Of others, only the last backward is in it."""
    mine = torch.tensor([r == mix.rank for r in mix.sources])
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
    values = torch.cat([m.got[m.sources.index(m.rank)] for m in found])
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
    for rank, row in zip(mix.sources, table, strict=True):
        for other, ranks in groups:
            if float((row - other).abs().max()) <= ALIKE * float(table.abs().max()):
                ranks.append(rank)
                break
        else:
            groups.append((row, [rank]))
    return ", ".join(f"{_row(row)} of rank {spans(ranks)}" for row, ranks in groups)


def _row(row: Tensor) -> str:
    if _near(row, row[:1].expand_as(row)):
        return _share(row[0])
    return "(" + ", ".join(_share(value) for value in row) + " by backward)"


def _share(value: Tensor) -> str:
    number = float(value)
    fraction = as_fraction(number, ALIKE * abs(number) / 10)
    return str(fraction) if fraction is not None else f"{number:.6g}"
