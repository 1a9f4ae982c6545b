"""A gradient in a wrong place: another parameter's, other elements of its own, or one rank's part
where the parts of several belong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from sumgrad.base.outcome import some_of, spans
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.of_factors.factors import explained
from sumgrad.diagnose.explanation import Explanation, Left
from sumgrad.diagnose.own_gradients import (
    Given,
    columns_of,
    given_by_ranks,
    has_few_numbers,
    mixed,
    near,
)
from sumgrad.judge.cells import Cell
from torch import Tensor

ITS_OWN = "its own rank"
FEWEST = 8  # wrong elements of a parameter that have to be found elsewhere
ENOUGH = 0.9  # of them
TELLING = 1e3  # thresholds that an element is large, to be looked for
CHANCE = 1e-3  # that an element is found where it is not from
MAX_POOL = 1 << 22
NEEDED = 2  # elements for each gradient that may be in a sum
SHOWN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """All elements of the right gradients, sorted. owner: the number of its name; at: its place in
    the flat parameter."""

    names: tuple[str, ...]
    values: Tensor
    owner: Tensor
    at: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Elsewhere:
    """Of a rank's wrong parameter, whose elements it holds: names, the most frequent first. shift:
    by how many elements its own are off, if it is one number."""

    cell: Cell
    wrong: int
    found: int
    names: tuple[str, ...]
    shift: int | None


def held_elsewhere(case: Case, left: Left) -> Iterator[Explanation]:
    """Wrong gradients whose elements are, one by one, right ones of other places."""
    if case.has_plan or not case.exact or not case.failing_cells:
        return
    pool = _pool(case)
    found = [] if pool is None else [_look_for(cell, pool) for cell in case.failing_cells]
    told = [one for one in found if one is not None]
    if not told or 2 * len(told) < len(found):
        return
    others = {c.name: None for c, o in zip(case.failing_cells, found, strict=True) if o is None}
    words = list(dict.fromkeys(_in_words(one) for one in told))
    more = f"; and {len(words) - SHOWN} more" if len(words) > SHOWN else ""
    first = max(told, key=lambda one: one.found)
    yield explained(
        case,
        Diagnosis(
            cause=f"gradients are in the wrong place: {'; '.join(words[:SHOWN])}{more}",
            kind="held_elsewhere",
            ranks=tuple(sorted({one.cell.rank for one in told})),
            because=(
                f"of {first.wrong} wrong elements of {first.cell.name} on rank {first.cell.rank} "
                f"{first.found} are, within the threshold, right elements of "
                f"{some_of(list(first.names))}",
                "look at how gradients are put into buffers, and how they are cut or copied back",
            ),
        ),
        list(others),
    )


def _pool(case: Case) -> Pool | None:
    grads = {n: g.double().reshape(-1) for n, g in case.reference.grads.items()}
    if not grads or sum(len(g) for g in grads.values()) > MAX_POOL:
        return None
    values = torch.cat(list(grads.values()))
    owner = torch.cat([torch.full((len(g),), i) for i, g in enumerate(grads.values())])
    at = torch.cat([torch.arange(len(g)) for g in grads.values()])
    order = values.argsort()
    return Pool(names=tuple(grads), values=values[order], owner=owner[order], at=at[order])


def _look_for(cell: Cell, pool: Pool) -> Elsewhere | None:
    got, wanted = cell.measured.reshape(-1), cell.wanted.value.reshape(-1)
    bound = cell.wanted.threshold
    wrong = ((got - wanted).abs() > bound) & (got.abs() > TELLING * bound)
    num = int(wrong.sum())
    wide = float(got.abs().max()) if num else 0.0
    if num < FEWEST or len(pool.values) * bound > CHANCE * wide:
        return None
    looked = got[wrong]
    if bool(((looked + wanted[wrong]).abs() <= bound).all()):
        return None  # with the other sign, as the mirrored half of what is skew
    place = torch.searchsorted(pool.values, looked).clamp(max=len(pool.values) - 1)
    below = (place - 1).clamp(min=0)
    nearer = (pool.values[below] - looked).abs() < (pool.values[place] - looked).abs()
    place = torch.where(nearer, below, place)
    there = (pool.values[place] - looked).abs() <= bound
    if int(there.sum()) < ENOUGH * num or len(looked[there].unique()) < FEWEST:
        return None
    names = Counter(pool.names[i] for i in pool.owner[place[there]].tolist())
    index = torch.arange(len(got)) if cell.index is None else cell.index.reshape(-1)
    shifts = (pool.at[place] - index[wrong])[there]
    one = bool((shifts == shifts[0]).all()) and set(names) == {cell.name}
    return Elsewhere(
        cell=cell,
        wrong=num,
        found=int(there.sum()),
        names=tuple(name for name, _ in names.most_common()),
        shift=int(shifts[0]) if one else None,
    )


def _in_words(one: Elsewhere) -> str:
    if one.names == (one.cell.name,):
        if one.shift is not None:
            return f"{one.cell.name} holds in each place what belongs {one.shift:+d} elements on"
        return f"{one.cell.name} holds its own elements in other places"
    return f"{one.cell.name} holds elements of the gradient of {some_of(list(one.names))}"


def one_of_several(case: Case, left: Left) -> Iterator[Explanation]:
    """Elements that several ranks' gradients reach hold that of one rank alone."""
    told, given = list(_overwritten_cells(case)), given_by_ranks(case)
    known = {(one.cell.rank, one.cell.name) for one in told}
    others = [c for c in case.failing_cells if (c.rank, c.name) not in known]
    if not told or given is None or not all(has_few_numbers(c, given) for c in others):
        return
    names = some_of(list(dict.fromkeys(one.cell.name for one in told)))
    ranks = tuple(sorted({one.cell.rank for one in told}))
    kind, cause = "overwritten", (
        f"in places {names} holds one rank's gradient where those of several ranks belong "
        f"together: not added up there, or overwritten"
    )  # fmt: skip
    if len(ranks) > 1 and all(one.whose == ITS_OWN for one in told):
        kind, cause = "not_reduced", (
            f"in a part of {names} rank {spans(ranks)} each hold what their own backward gave, and "
            f"nothing of the others: it is not reduced there, or the sum is not put back"
        )  # fmt: skip
    yield explained(
        case,
        Diagnosis(
            cause=cause,
            kind=kind,
            standing="likely" if others else "proved",
            ranks=ranks,
            because=(told[0].in_words(),),
        ),
        list(dict.fromkeys(c.name for c in others)),
    )


def mixed_up(case: Case, left: Left) -> Iterator[Explanation]:
    """Sums of ranks' own gradients, where some ranks' are those of another parameter."""
    given = given_by_ranks(case)
    if case.has_plan or given is None or not case.exact:
        return
    told = [(cell, found) for cell in case.failing_cells if (found := _sources(cell, given))]
    names = list(dict.fromkeys(cell.name for cell, _ in told))
    others = {c.name: None for c in case.failing_cells if c.name not in names}
    small = min((cell.measured.numel() for cell, _ in told), default=0)
    large = {c.name for c in case.failing_cells if c.measured.numel() >= small} - set(names)
    if not told or large:
        return
    cell, found = told[0]
    yield explained(
        case,
        Diagnosis(
            cause=f"gradients of different parameters are added up: {cell.name} on rank "
            f"{cell.rank} is the sum of {found}",
            kind="other_parameters",
            standing="likely" if others else "proved",
            ranks=tuple(sorted({c.rank for c, _ in told})),
            because=(
                f"so it is for {some_of(names)}: with what each rank's own backwards gave, under "
                f"the threshold",
                "look at the order in which each rank puts gradients into buffers or calls its "
                "reductions",
            ),
            however=(f"{some_of(list(others))} is wrong too, and too small to tell",)
            if others
            else (),
        ),
    )


def _sources(cell: Cell, given: Given) -> str | None:
    """Of which parameter's gradient each rank put in, if it is a plain sum with another's in it."""
    if cell.index is not None:
        return None
    measured, size = cell.measured.reshape(-1), cell.measured.numel()
    columns: dict[tuple[int, str], Tensor] = {}
    for rank, (own, at) in given.items():
        for name, passes in own.items():
            whole = passes.dim() == 2 and torch.equal(at[name], torch.arange(size))
            if whole and passes.shape[1] == size and bool(passes.any()):
                columns[rank, name] = passes.sum(0).double()
    if len(columns) < 2 or size < NEEDED * len(columns):
        return None
    matrix = torch.stack(list(columns.values()), dim=1)
    if not bool(matrix.isfinite().all() and measured.isfinite().all()):
        return None
    solved = torch.linalg.lstsq(matrix, measured[:, None], driver="gelsd").solution[:, 0]
    taken = [key for key, value in zip(columns, solved.tolist(), strict=True) if abs(value) > 1e-6]
    one = all(abs(v - 1) < 1e-6 or abs(v) < 1e-6 for v in solved.tolist())
    foreign = any(name != cell.name for _, name in taken)
    error = float((matrix @ solved - measured).abs().max())
    ranks = [rank for rank, _ in taken]
    if not one or not foreign or len(set(ranks)) < len(ranks):
        return None
    if error > 2 * cell.wanted.threshold:
        return None
    by_name: dict[str, list[int]] = {}
    for rank, name in taken:
        by_name.setdefault(name, []).append(rank)
    return " and ".join(f"{n}'s of rank {spans(held)}" for n, held in by_name.items())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Alone:
    """Elements of a parameter on a rank that hold what one rank gave. at: their numbers in the flat
    part that it holds; whose: in words, or ITS_OWN."""

    cell: Cell
    at: Tensor
    whose: str

    def in_words(self) -> str:
        where = _where(self.cell, self.at)
        return (
            f"{self.cell.name} on rank {self.cell.rank}: {len(self.at)} elements{where} that "
            f"several ranks' gradients reach hold that of {self.whose} alone; every other element "
            f"is the sum"
        )


def _where(cell: Cell, at: Tensor) -> str:
    """`, at 1 of dimension 3`, where all elements there and no others are meant."""
    shape = cell.measured.shape
    if cell.index is not None or len(shape) < 2:
        return ""
    mask = torch.zeros(cell.measured.numel(), dtype=torch.bool)
    mask[at] = True
    for dim in range(len(shape)):
        told = mask.reshape(shape).movedim(dim, 0).flatten(1)
        whole = told.all(1)
        if bool(whole.any()) and bool((whole | ~told.any(1)).all()):
            numbers = spans(whole.nonzero()[:, 0].tolist())
            return f", those at {numbers} of dimension {dim},"
    return ""


def _overwritten_cells(case: Case) -> Iterator[Alone]:
    given = given_by_ranks(case)
    if case.has_plan or given is None:
        return
    cells = {(c.rank, c.name): c for c in case.failing_cells}
    for mix in mixed(case):
        if mix.got is not None or mix.wanted is None or len(mix.sources) < 2:
            continue
        weight = mix.wanted.reshape(-1)[0]
        if not near(mix.wanted, weight.expand_as(mix.wanted)):
            continue
        for name in mix.names:
            cell = cells[mix.rank, name]
            columns = columns_of(cell, given)
            if columns is None or columns.sources != mix.sources:
                continue
            parts = columns.own.reshape(*mix.wanted.shape, -1).sum(1) * weight
            mine = next((i for i, s in enumerate(columns.sources) if cell.rank in s), None)
            found = _overwritten(cell, columns.measured, parts, mine)
            if found is not None:
                odd, whose = found
                yield Alone(cell=cell, at=columns.place[odd], whose=whose)


def _overwritten(
    cell: Cell, measured: Tensor, parts: Tensor, mine: int | None
) -> tuple[Tensor, str] | None:
    """Which elements are one of the parts instead of their sum, and whose. parts: (ranks, n); mine:
    which of them is the rank's own."""
    bound = 2 * cell.wanted.threshold
    alone = ((parts - measured).abs() <= bound) & (parts.abs() > bound)
    summed = (parts.sum(0) - measured).abs() <= bound
    odd = alone.any(0) & ~summed
    if not bool((odd | summed).all()) or int(odd.sum()) < FEWEST:
        return None
    live, taken = parts[:, odd].abs() > bound, alone[:, odd]
    numbers = torch.arange(len(parts))[:, None]
    highest = torch.where(live, numbers, -1).amax(0)
    lowest = torch.where(live, numbers, len(parts)).amin(0)
    ranks = [i for i in range(len(parts)) if bool(taken[i].any())]
    whose = f"one of them (number {spans(ranks)})"
    if bool(taken.gather(0, lowest[None]).all()):
        whose = "the lowest of these ranks"
    if bool(taken.gather(0, highest[None]).all()):
        whose = "the highest of these ranks"
    if mine is not None and bool(taken[mine].all()):
        whose = ITS_OWN
    return odd, whose
