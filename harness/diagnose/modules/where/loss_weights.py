"""With which factor every row enters the loss: the gradient at the last module that has one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise
from typing import Any

import torch
from sumgrad.base.outcome import spans
from sumgrad.diagnose.modules.values.matching import SAME_FACTOR
from sumgrad.diagnose.modules.values.seen import Seen, constant
from sumgrad.diagnose.modules.where.look import Look
from torch import Tensor

LOST = 1e-9
MOST_RANKS = 10  # whose groups are tried one by one
MOST_PATTERNS = 3  # of positions, that are told apart by rows
SAME_SHARE = 1e-5  # a part of it: counts that differ by one in a hundred thousand are no cause


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Share:
    """One call on one rank: its rows, and the factor of all vectors; None where they differ.

    live: how many of its vectors have a gradient; None where only some were
    compared. part: which tensor of the module's output. shape: of it. vectors: number in it -> its
    factor; row_of: -> its row, where all are known.
    """

    rank: int
    number: int
    rows: tuple[int, ...]
    factor: float | None
    by_row: dict[int, float | None]
    live: int | None = None
    part: int = 0
    shape: tuple[int, ...] = ()
    vectors: dict[int, float] = field(default_factory=dict)
    row_of: dict[int, int] = field(default_factory=dict)


def shares_at_the_loss(look: Look) -> tuple[str, list[Share]] | None:
    """The last module whose gradients are right up to a factor on every rank that has it."""
    for module in reversed(look.modules):
        told = [s for s in look.seen[module] if s.backward == "right" and s.factors is not None
                and not bool(s.factors.isnan().all())]  # fmt: skip
        if told and look.backward(module) == "right" and not is_untold(look, module):
            return module, _of_one_part([_share(s) for s in told])
    return None


def is_untold(look: Look, module: str) -> bool:
    """Whether a gradient was compared there whose vectors have too few directions to tell."""
    return any(
        s.backward == "untold" and s.forward == "right" and s.call.operation_back is not None
        and not s.call.recomputed and not s.shared and not s.shifted
        for s in look.seen[module]
    )  # fmt: skip


def behind_few_directions(look: Look, module: str) -> str | None:
    """What follows a module and tells its gradients' size only, as a head of one number a token: a
    factor below it may be any mistake of the loss."""
    above = look.paths.all_above(module)
    return next((m for m in reversed(look.modules) if m in above and is_untold(look, m)), None)


def _of_one_part(shares: list[Share]) -> list[Share]:
    """Those of the first part of an output of several, where all of its parts have its factors."""
    factors: dict[tuple[int, int], list[float | None]] = {}
    for s in shares:
        factors.setdefault((s.rank, s.number), []).append(s.factor)
    told = [[f for f in own if f is not None] for own in factors.values()]
    if any(len(f) < len(own) or not same(f) for f, own in zip(told, factors.values(), strict=True)):
        return shares
    return [s for s in shares if s.part == min(t.part for t in shares)]


def shares_of_term(look: Look, term: str) -> tuple[str, list[Share]] | None:
    """The same of one term of several: where its gradient is met first, against the forward.

    An output that is changed in place after its module shows no gradient of what came later: where
    a module below has some, that one is believed.
    """
    at = look.terms.index(term)
    first: tuple[str, list[Share]] | None = None
    for module in reversed(look.modules):
        if look.backward(module) != "right":
            continue
        told = [replace(s, factors=s.terms[:, at]) for s in look.seen[module]
                if s.terms is not None and not bool(s.terms[:, at].isnan().all())]  # fmt: skip
        if not told:
            continue
        found = module, [_share(s) for s in told]
        if not never_enters(found[1]):
            return found
        first = first or found
    return first


def never_enters(shares: Sequence[Share]) -> bool:
    """Whether the factor of every vector is zero."""
    return all(abs(f) < LOST for s in shares for f in s.vectors.values())


def _share(seen: Seen) -> Share:
    factors, rows = seen.factors, seen.rows
    assert factors is not None
    by_row: dict[int, float | None] = {}
    if rows is not None and not bool((rows == -1).any()):
        for row in sorted(set(rows.tolist()) - {-1}):
            by_row[row] = constant(factors[rows == row])
    return Share(
        rank=seen.rank,
        number=seen.call.number,
        rows=tuple(by_row),
        factor=constant(factors),
        by_row=by_row,
        part=seen.call.part,
        shape=seen.shape,
        vectors=_by_vector(seen, factors),
        row_of=_by_vector(seen, rows) if by_row and rows is not None else {},
        live=int((~factors.isnan()).sum()) if len(factors) == _num_vectors(seen) else None,
    )


def _by_vector(seen: Seen, values: Tensor) -> dict[int, Any]:
    """Number of a vector in its tensor -> its value, where it has one."""
    picked = seen.where.picked.tolist() if seen.where is not None else []
    return {at: v for at, v in zip(picked, values.tolist(), strict=True) if not math.isnan(v)}


def usual_factor(shares: Sequence[Share]) -> float | None:
    """The factor that at least a third of all vectors of all ranks have, and no other as many."""
    factors = sorted(f for s in shares for f in s.vectors.values())
    runs: list[list[float]] = []
    for factor in factors:
        if runs and abs(factor - runs[-1][0]) <= SAME_FACTOR * abs(factor):
            runs[-1].append(factor)
        else:
            runs.append([factor])
    runs.sort(key=len, reverse=True)
    if not runs or len(runs[0]) < 2 or 3 * len(runs[0]) < len(factors):
        return None
    return runs[0][0] if len(runs) < 2 or len(runs[1]) < len(runs[0]) else None


def odd_vectors(share: Share, usual: float) -> list[int]:
    """Those that do not have the usual factor."""
    bound = SAME_FACTOR * max(abs(usual), 1e-300)
    return [at for at, factor in share.vectors.items() if abs(factor - usual) > bound]


def places_of(share: Share, vectors: Sequence[int]) -> str:
    """Vectors by positions and rows where the output has three dimensions, else by number."""
    if len(share.shape) < 3:
        return f"vector{'s'[: len(vectors) > 1]} {spans(vectors)} of {math.prod(share.shape[:-1])}"
    each = math.prod(share.shape[1:-1])
    by_row: dict[int, set[int]] = {}
    for at in vectors:
        by_row.setdefault(share.row_of.get(at, -1), set()).add(at % each)
    alike: dict[frozenset[int], list[int]] = {}
    for row, positions in by_row.items():
        alike.setdefault(frozenset(positions), []).append(row)
    if len(alike) > MOST_PATTERNS or -1 in by_row:
        return f"{len(vectors)} of the {len(share.vectors)} tokens that show one"
    return ", ".join(
        f"position{'s'[: len(positions) > 1]} {spans(sorted(positions))} of {each} in "
        f"row{'s'[: len(rows) > 1]} {spans(sorted(rows))}"
        for positions, rows in alike.items()
    )


def _num_vectors(seen: Seen) -> int:
    return math.prod(seen.shape[:-1])


def same(values: Sequence[float]) -> bool:
    """Whether these are one number."""
    first = values[0]
    return all(abs(v - first) <= SAME_SHARE * max(abs(first), abs(v)) for v in values)


def own_counts(shares: Sequence[Share], counts: Tensor, *, level: str) -> float | None:
    """The number c where each part's factor is c / its own count. level: what a part is, a `call`
    or all calls of a `rank`. counts: (rows,) float64."""
    told = [s for s in shares if s.factor is not None and s.rows]
    if not told or len(told) < len([s for s in shares if s.factor is not None]):
        return None
    total: dict[object, float] = {}
    for s in told:
        key = s.rank if level == "rank" else (s.rank, s.number)
        total[key] = total.get(key, 0.0) + float(counts[list(s.rows)].sum())
    products = [
        float(s.factor or 0.0) * total[s.rank if level == "rank" else (s.rank, s.number)]
        for s in told
    ]
    return products[0] if same(products) else None


def counts_of_groups(shares: Sequence[Share], counts: Tensor) -> list[tuple[int, ...]] | None:
    """Groups of ranks where each rank divides by the count of its group's rows: its factor is the
    whole count over it. None where that is not so, or other groups would give the same factors.

    counts: (rows,) float64.
    """
    own: dict[int, float] = {}
    factors: dict[int, float] = {}
    for s in shares:
        if (
            s.factor is None
            or not s.rows
            or not same([factors.setdefault(s.rank, s.factor), s.factor])
        ):
            return None
        own[s.rank] = own.get(s.rank, 0.0) + float(counts[list(s.rows)].sum())
    if not 2 < len(own) <= MOST_RANKS or not all(factors.values()):
        return None
    whole = float(counts.sum())
    groups: set[tuple[int, ...]] = set()
    for rank, factor in factors.items():
        fits = [
            group
            for size in range(1, len(own))
            for group in combinations(sorted(own), size)
            if rank in group and same([sum(own[r] for r in group) * factor, whole])
            and all(same([factors[r], factor]) for r in group)
        ]  # fmt: skip
        if len(fits) != 1:
            return None
        groups.add(fits[0])
    return sorted(groups) if sum(map(len, groups)) == len(own) else None


def own_positions(shares: Sequence[Share], *, level: str) -> bool:
    """Whether each part's factor times the number of its own vectors with a gradient is one number.

    The parts of a row, as context parallel ranks hold them, have no other count.
    """
    told = [s for s in shares if s.factor is not None]
    if any(s.live is None for s in told):
        return False
    live: dict[object, int] = {}
    for s in told:
        key = s.rank if level == "rank" else (s.rank, s.number)
        live[key] = live.get(key, 0) + (s.live or 0)
    products = [
        (s.factor or 0.0) * live[s.rank if level == "rank" else (s.rank, s.number)] for s in told
    ]
    return len(set(live.values())) > 1 and same(products)


def geometric(shares: Sequence[Share]) -> float | None:
    """The ratio where on every rank each call's factor is that multiple of the one before."""
    ratios = []
    for rank in {s.rank for s in shares}:
        mine = sorted((s for s in shares if s.rank == rank), key=lambda s: s.number)
        values = [s.factor for s in mine]
        if len(values) < 3 or any(not v for v in values):
            return None
        ratios += [b / a for a, b in pairwise(values) if a and b]
    return ratios[0] if ratios and same(ratios) and abs(ratios[0] - 1) > SAME_FACTOR else None


def row_weights(shares: Sequence[Share], num_rows: int) -> Tensor | None:
    """(rows,) with which factor each row enters, of all ranks and calls; None if not known."""
    weights = torch.zeros(num_rows, dtype=torch.float64)
    for s in shares:
        if not s.by_row:
            return None
        for row, factor in s.by_row.items():
            if factor is None:
                return None
            weights[row] += factor
    return weights
