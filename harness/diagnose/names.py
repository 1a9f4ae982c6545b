"""Names for recovered numbers: sizes of the topology, counts, powers, means of means, row spans."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product

import torch
from sumgrad.diagnose.case import Case, fails
from sumgrad.diagnose.reductions import CLOSE
from sumgrad.diagnose.row_fit import Factors
from sumgrad.judge.joint import joint_operations, sizes_of
from sumgrad.ledger.operations import group_name

MAX_POWER = 8
MOST_RUNS = 6  # of rows with one factor, that are written out


def factor_symbols(case: Case, value: float) -> list[str]:
    """Readings of a factor as sizes, counts and simple ratios of two of them; simplest first."""
    numbers: dict[str, float] = {n: float(s) for n, s in sizes_of(case.record).items() if s > 1}
    calls = [h.info[case.tier, case.step]["backwards"] for h in case.record.ranks.values()
             if (case.tier, case.step) in h.info]  # fmt: skip
    facts = case.record.spec.facts
    if facts is not None and facts.microbatches is not None and facts.microbatches > 1:
        numbers["num_microbatches"] = float(facts.microbatches)
    elif calls and len(set(calls)) == 1 and calls[0] > 1:
        numbers["micro-batches"] = float(calls[0])
    for term, count in case.reference.counts.items():
        numbers[f"count of {term}"] = float(count)
    if facts is not None:
        numbers["rows"] = float(facts.num_rows)
    numbers = {name: n for name, n in numbers.items() if n != 1}  # of which all would be made
    out = [name for name, n in numbers.items() if _near(value, n)]
    out += [f"1/{name}" for name, n in numbers.items() if n and _near(value, 1 / n)]
    for (a, x), (b, y) in product(numbers.items(), repeat=2):
        if a < b and _near(value, x * y):
            out.append(f"{a}*{b}")
        if a < b and x * y and _near(value, 1 / (x * y)):
            out.append(f"1/({a}*{b})")
        if a != b and y and x != y and _near(value, x / y):
            out.append(f"{a}/{b}")
    return out


def group_symbols(case: Case, value: float) -> list[str]:
    """Readings of a factor in the middle of a model: as the size of a pool or an axis alone."""
    sizes = {n: float(s) for n, s in sizes_of(case.record).items() if s > 1}
    found = [name for name, size in sizes.items() if _near(value, size)]
    return found + [f"1/{name}" for name, size in sizes.items() if _near(value, 1 / size)]


def _near(value: float, other: float) -> bool:
    return abs(value - other) <= CLOSE * max(abs(other), 1e-12)


def power_of(value: float, sizes: dict[str, int]) -> tuple[str, int] | None:
    """(size, k) with value = size^k, k from -8 to 8; k = 0 for 1."""
    for name, size in sizes.items():
        if size < 2:
            continue
        for k in range(-MAX_POWER, MAX_POWER + 1):
            if k and _near(value, float(size) ** k):
                return name, k
    return None


def mean_of_means(case: Case, found: Factors) -> int | None:
    """The number of parts, if each row's factor is total count / (parts x its part's count).

    0 if it is total count / its part's count: divided by their own counts, and summed.
    """
    counts = next(iter(case.reference.row_counts.values()), ())
    if len(case.reference.row_counts) != 1 or len(counts) != len(found.units):
        return None
    blocks: list[tuple[float, float]] = []
    for value, count in zip(found.values, counts, strict=True):
        if count and value is None:
            return None
        if not count or value is None:
            continue
        for i, (factor, held) in enumerate(blocks):
            if abs(factor - value) < CLOSE:
                blocks[i] = (factor, held + count)
                break
        else:
            blocks.append((value, count))
    if len(blocks) < 2:
        return None
    total = sum(held for _, held in blocks)
    shares = [factor * held / total for factor, held in blocks]
    if all(s > 0.5 and abs(s - round(s)) < 1e-5 for s in shares):
        return 0
    # Parts of equal counts have equal factors and look like one block of twice the share.
    parts = round(1 / min(shares)) if min(shares) > 0 else 0
    whole = parts > 1 and all(abs(s * parts - round(s * parts)) < 1e-5 for s in shares)
    return parts if whole and abs(sum(shares) - 1) < 1e-5 else None


def own_parts(
    case: Case, names: Sequence[str], *, wrong_only: bool = False, mean: bool = False
) -> str | None:
    """The axis over whose ranks the copies of these parameters add up to the reference, if any.

    wrong_only: at the elements that are wrong on every one of them. mean: their mean is it.
    """
    for label, groups in axis_groups(case):
        if all(_adds_up(case, name, groups, wrong_only, mean=mean) for name in names):
            return label
    return None


def axis_groups(case: Case) -> list[tuple[str, list[tuple[int, ...]]]]:
    """Every axis of every pool with its groups of ranks, the world, and the ledger's groups."""
    topology = case.record.spec.topology
    out: list[tuple[str, list[tuple[int, ...]]]] = []
    for pool in topology.pools:
        for i, (axis, size) in enumerate(pool.axes):
            if size < 2:
                continue
            by_rest: dict[tuple[int, ...], list[int]] = {}
            for rank in pool.ranks:
                coords = pool.coords(rank)
                by_rest.setdefault(coords[:i] + coords[i + 1 :], []).append(rank)
            head = f"{pool.name}." if len(topology.pools) > 1 else ""
            out.append((f"{head}{axis}", [tuple(r) for r in by_rest.values()]))
        if len(pool.axes) > 1:
            out.append((pool.name, [tuple(pool.ranks)]))
    if len(topology.pools) > 1:
        out.append(("world", [tuple(range(topology.world_size))]))
        out.append(("the pools", list(product(*(pool.ranks for pool in topology.pools)))[:256]))
    for joint in joint_operations(case.record, case.tier, case.step):
        name = group_name(topology, joint.ranks)
        if name[0].isdigit() and (name, [joint.ranks]) not in out:
            out.append((name, [joint.ranks]))
    return out


def _adds_up(
    case: Case, name: str, groups: Sequence[tuple[int, ...]], wrong_only: bool, *, mean: bool
) -> bool:
    held = {cell.rank: cell for cell in case.cells if cell.name == name}
    told: set[int] = set()
    for ranks in groups:
        mine = [held[r] for r in ranks if r in held]
        if len(mine) < 2:
            continue
        first = mine[0]
        same = all(
            (c.index is None) == (first.index is None)
            and (c.index is None or first.index is None or torch.equal(c.index, first.index))
            for c in mine
        )
        if not same:
            return False
        together = torch.stack([c.measured for c in mine])
        if mean and bool((together == together[0]).all()):
            continue  # what all have alike is its own mean
        error = (together.mean(0) if mean else together.sum(0)) - first.wanted.value
        if wrong_only:
            wrong = torch.stack(
                [(c.measured - c.wanted.value).abs() > c.wanted.threshold for c in mine]
            ).all(0)
            if not bool(wrong.any()):
                return False  # each element is right on some rank: no copies are parts there
            error = error * wrong
        if fails(first, error, factor=2.0 * len(mine)):
            return False
        told |= {c.rank for c in mine}
    wrong_ranks = {c.rank for c in case.failing_cells if c.name == name} if mean else set()
    return bool(told) and wrong_ranks <= told


def list_rows(rows: Iterable[tuple[int, int] | None]) -> str:
    """`0-3, 7` for row intervals [0, 4) and [7, 8)."""
    from sumgrad.base.outcome import spans

    return spans([i for r in rows if r for i in range(r[0], r[1])])


def block_counts(found: Factors) -> str:
    """Runs of rows with equal factors, in words."""
    parts: list[tuple[list[tuple[int, int]], float | None]] = []
    for unit, value in zip(found.units, found.values, strict=True):
        if unit.rows is None:
            continue
        last = parts[-1][1] if parts else None
        if parts and (last is value or (last is not None and value is not None
                                        and abs(last - value) < CLOSE)):  # fmt: skip
            parts[-1][0].append(unit.rows)
        else:
            parts.append(([unit.rows], value))
    shown = [
        f"rows {list_rows(rows)}: " + ("?" if value is None else _often(value))
        for rows, value in parts[:MOST_RUNS]
    ]
    more = len(parts) - MOST_RUNS
    return "; ".join([*shown, f"{more} more such runs of rows"] if more > 0 else shown)


def _often(value: float) -> str:
    return "0" if abs(value) < CLOSE else f"{value:.6g}"
