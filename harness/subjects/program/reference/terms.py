"""A term of the loss over all rows in float64: in chunks where its rows add up, else at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from sumgrad.base.errors import Broken
from sumgrad.base.memory import give_back_memory, one_at_a_time
from sumgrad.record.reference import Kind
from sumgrad.subjects.noise_floor import Grads, Run, error
from sumgrad.subjects.program.reference.single import SAME, Single
from torch import Tensor

NARROW = 1e-4  # of the scale: what a float32 inside a float64 run leaves, and random draws do not
COUPLED_SHARE = 0.01  # of the largest gradient: the scale of one without partials
JITTERS = 1  # runs in other cuts, whose weights are off by one rounding
MORE_JITTERS = 9  # before an error that such runs may make is called wrong
QUIET = 1e-4  # of the largest scale: nothing is told from zero by less
FINE_CUT = 8  # chunks of the second sum at least, where there are as many rows

Sizes = dict[str, float]


class Cut:
    """The rows in several orders and cuts, each a list of chunks. chunks: (n,) int64."""

    def __init__(self, num_rows: int, num_chunks: int, jitters: int = JITTERS) -> None:
        rows = torch.arange(num_rows)
        self.rows = rows
        # At least two rows together, so that no two cuts are the same one.
        self.coarse = list(rows.tensor_split(max(1, min(num_chunks, num_rows // 2))))
        fine = min(num_rows, max(FINE_CUT, num_chunks + 1))
        self.fine = [chunk.flip(0) for chunk in reversed(rows.tensor_split(fine))]
        self.drawn = []
        for seed in range(1, jitters + 1):
            generator = torch.Generator().manual_seed(seed)
            order = torch.randperm(num_rows, generator=generator)
            self.drawn.append(list(order.tensor_split(min(num_chunks + seed, num_rows))))


@dataclass(slots=True, kw_only=True)
class Term:
    """One term at one step, in float64. again: the same in another cut and order. scale: largest
    sum of absolute parts, by name. even: of how many parts, as many as a pool has ranks, each has
    the same count; 0 where they differ."""

    grads: Grads
    again: Grads
    count: float
    scale: Sizes
    kind: Kind
    even: int = 0


def exact_term(exact: Single, name: str, cut: Cut) -> Term:
    """A term over all rows: in chunks where they add up, else at once.

    The second sum divides by the count before the backward, not after it, as a step may do.
    """
    coarse = summed(exact, name, cut.coarse, cut.rows)
    fine, parted = None, 0.0 if coarse is None else sum(coarse.counts)
    if coarse is not None and parted > 0:
        fine = summed(exact, name, cut.fine, cut.rows, seed=1 / parted, with_scale=True)
    # All rows at once need most memory: last, when the ranks are through with what they need most.
    with one_at_a_time():
        value, count = exact.value_and_count(name, cut.rows)
        give_back_memory()
    if not count > 0:
        raise Broken(f"{name}: the count of the full batch is {count:g}, expected more than 0")
    if fine is not None and parted != count:
        fine = fine.times(parted / count)
    if coarse is None or fine is None:
        return _at_once(exact, name, cut, fine, count)
    grads = over(coarse.grads, count)
    if all(
        _adds_up(exact, name, parts, value, count) for parts in (coarse, fine)
    ) and same_up_to(fine.grads, grads, fine.sizes, exact.same):  # fmt: skip
        even = len(coarse.counts) if len({*coarse.counts}) == 1 < len(coarse.counts) else 0
        return Term(grads=grads, again=fine.grads, count=count, scale=fine.sizes, kind="rows",
                    even=even)  # fmt: skip
    term = _at_once(exact, name, cut, fine, count)
    if not exact.lift and same_up_to(fine.grads, term.grads, fine.sizes, NARROW):
        term.again = fine.grads  # a cast that is left, or a weak coupling: not to be told apart
    return term


def _adds_up(exact: Single, name: str, parts: _Sum, value: float, count: float) -> bool:
    """Whether value and count of all rows at once are those of a sum over chunks.

    Chunks of the same rows would hide what couples them; in the value of all rows it shows.
    """
    if isinstance(exact.terms[name], tuple):
        return True  # made to add up
    off = abs(sum(parts.values) - value)
    return abs(sum(parts.counts) - count) <= SAME * count and off <= exact.same * sum(
        map(abs, parts.values)
    )


def _at_once(exact: Single, name: str, cut: Cut, parts: _Sum | None, count: float) -> Term:
    """A term whose rows do not add up: one that has none, or one that couples them."""
    summed, _ = exact.gradient_exact(name, cut.rows, cut.rows)
    grads = over(summed, count)
    again, _ = exact.gradient_exact(name, cut.rows.flip(0), cut.rows, seed=1 / count)
    largest = max(float(g.abs().max()) for g in grads.values() if g.numel())
    scale = {
        n: float((g.abs() + COUPLED_SHARE * largest).max()) if g.numel() else 0.0
        for n, g in grads.items()
    }
    once = parts is not None and all(own == count for own in parts.counts)
    if once:  # of some rows as of all
        last, _ = exact.gradient_exact(name, cut.fine[-1], cut.rows, seed=1 / count)
        once = same_up_to(last, grads, scale, exact.same)
    return Term(
        grads=grads, again=again, count=count, scale=scale, kind="once" if once else "coupled"
    )


@dataclass(slots=True, kw_only=True)
class _Sum:
    """A term's gradient summed over chunks; sizes: largest sum of absolute chunks, by name."""

    grads: Grads
    values: list[float]
    counts: list[float]
    sizes: Sizes

    def times(self, factor: float) -> _Sum:
        """As if the loss had been multiplied by it before the backward."""
        return replace(
            self,
            grads=over(self.grads, 1 / factor),
            sizes={n: factor * size for n, size in self.sizes.items()},
        )


def summed(
    single: Single, name: str, chunks: Sequence[Tensor], whole: Tensor, *,
    seed: float = 1.0, with_scale: bool = False,
) -> _Sum | None:  # fmt: skip
    """None where a chunk cannot be run alone: some losses need several rows."""
    total: Grads = {}
    sizes: Grads = {}
    values: list[float] = []
    counts: list[float] = []
    try:
        for chunk in chunks:
            grads, count = single.gradient_exact(name, chunk, whole, seed=seed)
            counts.append(count)
            values.append(single.value)
            for n, grad in grads.items():
                if with_scale:
                    sizes[n] = sizes[n].add_(grad.abs()) if n in sizes else grad.abs()
                total[n] = total[n].add_(grad) if n in total else grad
    except (ValueError, RuntimeError):  # batch norm, contrasts
        if chunks[0].numel() == len(whole):
            raise
        return None
    largest = {n: float(size.max()) if size.numel() else 0.0 for n, size in sizes.items()}
    return _Sum(grads=total, values=values, counts=counts, sizes=largest)


def same_up_to(got: Grads, wanted: Grads, scale: Sizes, same: float) -> bool:
    """Up to a part of each tensor's scale; what is zero by mathematics has but noise."""
    least = QUIET * same * max(scale.values(), default=0.0)
    return all(
        error(value, wanted[name]) <= max(same * scale[name], least) + 1e-300
        for name, value in got.items()
        if value.numel()
    )


def over(grads: Grads, count: float) -> Grads:
    return {name: grad / count for name, grad in grads.items()}


def sum_of(by_term: Mapping[str, Grads]) -> Grads:
    if len(by_term) == 1:
        return dict(next(iter(by_term.values())))
    out: Grads = {}
    for grads in by_term.values():
        for name, grad in grads.items():
            out[name] = out[name] + grad if name in out else grad.clone()
    return out


def sum_of_sizes(by_term: Sequence[Sizes]) -> Sizes:
    return {name: sum(sizes[name] for sizes in by_term) for name in by_term[0]}


def run_of(by_term: Mapping[str, Grads]) -> Run:
    """One run's terms, and their sum."""
    return Run(by_term=by_term, total=sum_of(by_term))


@dataclass(frozen=True, kw_only=True)
class Exact:
    """All terms of one step over all rows, by a process that holds the weights of that step."""

    single: Single
    step: int
    terms: Mapping[str, Term]
    cut: Cut

    @cached_property
    def sums(self) -> Run:
        return run_of({name: term.grads for name, term in self.terms.items()})

    @cached_property
    def again(self) -> Run:
        """The same in another cut and order."""
        return run_of({name: term.again for name, term in self.terms.items()})

    @cached_property
    def scale(self) -> Sizes:
        """Largest sum of absolute parts, by name."""
        return sum_of_sizes([term.scale for term in self.terms.values()])
