"""The reference of a Program: its own loss_sum over the full batch, in one process.

Every term's gradient is that of SUM / count, the count taken over the full batch. A term whose rows
add up is summed chunk by chunk, twice, in two cuts and orders: that they agree is the proof that it
does add up. A term that couples rows is run over all of them at once, and has no coefficients.
Every tier has the same weights and rows, rounded to the coarsest dtype, so they share one float64
gradient; what is measured in each dtype is its noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from sumgrad.base.tolerances import FLOOR_FACTOR, STRUCTURE_CAP, ZERO_FACTOR
from sumgrad.record.reference import Kind, Reference
from sumgrad.record.spec import After, Facts
from sumgrad.subjects.noise_floor import (
    Floor,
    Grads,
    Run,
    differences,
    error,
    measure_floor,
    norm,
    raise_floor,
    raised,
)
from sumgrad.subjects.program.protocol import Broken, Weights, coarsest, hash_model, trained
from sumgrad.subjects.program.single import SAME, Single
from torch import Tensor

NARROW = 1e-4  # of the scale: what a float32 inside a float64 run leaves, and random draws do not
COUPLED_SHARE = 0.01  # of the largest gradient: the scale of one without partials
JITTERS = 1  # runs whose weights are off by one rounding, for sums that are cut within a row
QUIET = 1e-4  # of the largest scale: nothing is told from zero by less
FINE_CUT = 8  # chunks of the second sum at least, where there are as many rows

Progress = Callable[[str], object]
Sizes = dict[str, float]


def compute_program_reference(
    program: Any,
    facts: Facts,
    tiers: Mapping[str, torch.dtype],
    *,
    step: int,
    num_chunks: int,
    num_steps: int = 1,
    lift: bool = True,
    progress: Progress = lambda _: None,
) -> dict[str, Reference]:
    """Every tier's reference of one step. Raises Broken where loss_sum does.

    It is float64, unless the Program cannot run in float64: then it is in the coarsest dtype.
    """
    rounded = coarsest(tiers.values())
    best = torch.float64 if facts.float64 is None else rounded
    progress(f"reference of step {step}: the gradient over all rows")
    exact = Single(program, facts, best, rounded_to=rounded, lift=lift)
    hashed = exact.set_step(step)
    before = hash_model(exact.model)
    cut = _Cut(facts.num_rows, num_chunks)
    terms = {name: _exact_term(exact, name, cut) for name in exact.terms}
    problems, warnings, narrow = _problems(exact, terms, before, step)
    warnings += _other_sum(exact, terms, cut)
    buffers, changed = _buffers(exact, cut) if len(terms) == 1 else ({}, [])
    sums = _run({n: t.grads for n, t in terms.items()})
    scale = _total_sizes([t.scale for t in terms.values()])
    shared = Reference(
        step=step,
        grads=sums.total,
        by_term=dict(sums.by_term),
        resolution=differences({n: t.again for n, t in terms.items()}, sums.by_term),
        scale=scale,
        floor={},
        floor_by_term={},
        same_dtype={},
        norm=norm(sums.total),
        norm_floor=0.0,
        counts={name: int(term.count) for name, term in terms.items()},
        weights=hashed,
        kinds={name: term.kind for name, term in terms.items()},
        reached=_reached(exact, scale, cut, step, num_steps),
        outside=exact.outside(),
        buffers=buffers,
        changed_buffers=tuple(changed),
        batch=exact.batch_hash,
    )
    out: dict[str, Reference] = {}
    coarser: tuple[torch.dtype, Floor] | None = None
    for tier, dtype in sorted(tiers.items(), key=lambda item: -torch.finfo(item[1]).eps):
        progress(f"reference of step {step}: the noise of {dtype}".replace("torch.", ""))
        own, said = list(problems), list(warnings)
        (own if dtype == torch.float64 else said).extend(narrow)
        if dtype == best:
            working, run = exact, _run({n: t.again for n, t in terms.items()})
        else:
            working = Single(program, facts, dtype, rounded_to=rounded, lift=lift)
            working.set_step(step)
            run = _working_run(working, terms, cut.coarse)
        floor = measure_floor(sums, [run])
        if dtype == torch.float64 and coarser is not None:
            floor = raised(floor, _finer(*coarser), scale, norm(sums.total), dtype)
        else:
            floor = _jittered(floor, working, terms, sums, scale, cut, step)
        coarser = dtype, floor
        by_name = _typical(floor.by_name, scale, _zeros(terms))
        if dtype == torch.float64 and not own:
            own += _low_precision(by_name, scale)
        out[tier] = replace(
            shared,
            floor=by_name,
            floor_by_term=floor.by_term,
            norm_floor=floor.norm,
            same_dtype={} if dtype == best else dict(run.total),
            problems=tuple(own),
            warnings=tuple(said),
        )
    if facts.after is not None:
        out = _after(out, facts.after, tiers)
    return {tier: out[tier] for tier in tiers}


def _after(
    found: Mapping[str, Reference], after: After, tiers: Mapping[str, torch.dtype]
) -> dict[str, Reference]:
    """References of gradients that the step multiplies by one factor, which has its own noise."""
    whole = next(iter(found.values())).norm
    factor = after.factor(whole)
    times: dict[int, Tensor] = {}

    def multiplied(grads: Mapping[str, Tensor]) -> Grads:
        return {n: times.setdefault(id(g), g * factor) for n, g in grads.items()}

    shared = multiplied(next(iter(found.values())).grads)
    out = {}
    for tier, r in found.items():
        off = 0.0 if math.frexp(factor)[0] == 0.5 else 2 * torch.finfo(tiers[tier]).eps
        near = whole + FLOOR_FACTOR * r.norm_floor + after.eps > after.value
        if after.kind == "clip" and near and whole > 0:  # of a norm that has noise itself
            off += r.norm_floor / whole
        largest = {n: float(g.abs().max()) if g.numel() else 0.0 for n, g in shared.items()}
        out[tier] = replace(
            r,
            grads=shared,
            by_term={term: multiplied(grads) for term, grads in r.by_term.items()},
            same_dtype=multiplied(r.same_dtype),
            resolution={t: _times(own, factor) for t, own in r.resolution.items()},
            scale=_times(r.scale, factor),
            floor={n: factor * noise + off * largest[n] for n, noise in r.floor.items()},
            floor_by_term={t: _times(own, factor) for t, own in r.floor_by_term.items()},
            factor=factor,
        )
    return out


def _times(sizes: Sizes, factor: float) -> Sizes:
    return {name: factor * size for name, size in sizes.items()}


def _run(by_term: Mapping[str, Grads]) -> Run:
    return Run(by_term=by_term, total=_total(by_term))


class _Cut:
    """The rows in several orders and cuts, each a list of chunks. chunks: (n,) int64."""

    def __init__(self, num_rows: int, num_chunks: int) -> None:
        rows = torch.arange(num_rows)
        self.rows = rows
        # At least two rows together, so that no two cuts are the same one.
        self.coarse = list(rows.tensor_split(max(1, min(num_chunks, num_rows // 2))))
        fine = min(num_rows, max(FINE_CUT, num_chunks + 1))
        self.fine = [chunk.flip(0) for chunk in reversed(rows.tensor_split(fine))]
        self.drawn = []
        for seed in range(1, JITTERS + 1):
            generator = torch.Generator().manual_seed(seed)
            order = torch.randperm(num_rows, generator=generator)
            self.drawn.append(list(order.tensor_split(min(num_chunks + seed, num_rows))))


@dataclass(slots=True, kw_only=True)
class _Term:
    """One term at one step, in float64. again: the same in another cut and order. scale: largest
    sum of absolute parts, by name."""

    grads: Grads
    again: Grads
    count: float
    scale: Sizes
    kind: Kind


def _exact_term(exact: Single, name: str, cut: _Cut) -> _Term:
    """A term over all rows: in chunks where they add up, else at once.

    The second sum divides by the count before the backward, not after it, as a step may do.
    """
    value, count = exact.value_and_count(name, cut.rows)
    if not count > 0:
        raise Broken(f"{name}: the count of the full batch is {count:g}, expected more than 0")
    coarse = _summed(exact, name, cut.coarse, cut.rows)
    fine = None
    if coarse is not None:
        fine = _summed(exact, name, cut.fine, cut.rows, seed=1 / count, with_scale=True)
    if coarse is None or fine is None:
        return _at_once(exact, name, cut, fine, count)
    grads = _over(coarse.grads, count)
    if all(
        _adds_up(exact, name, parts, value, count) for parts in (coarse, fine)
    ) and _same(fine.grads, grads, fine.sizes, exact.same):  # fmt: skip
        return _Term(grads=grads, again=fine.grads, count=count, scale=fine.sizes, kind="rows")
    term = _at_once(exact, name, cut, fine, count)
    if not exact.lift and _same(fine.grads, term.grads, fine.sizes, NARROW):
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


def _at_once(exact: Single, name: str, cut: _Cut, parts: _Sum | None, count: float) -> _Term:
    """A term whose rows do not add up: one that has none, or one that couples them."""
    summed, _ = exact.gradient_exact(name, cut.rows, cut.rows)
    grads = _over(summed, count)
    again, _ = exact.gradient_exact(name, cut.rows.flip(0), cut.rows, seed=1 / count)
    largest = max(float(g.abs().max()) for g in grads.values() if g.numel())
    scale = {
        n: float((g.abs() + COUPLED_SHARE * largest).max()) if g.numel() else 0.0
        for n, g in grads.items()
    }
    once = parts is not None and all(own == count for own in parts.counts)
    once = once and parts is not None and _same(parts.last, grads, scale, exact.same)
    return _Term(
        grads=grads, again=again, count=count, scale=scale, kind="once" if once else "coupled"
    )


@dataclass(slots=True, kw_only=True)
class _Sum:
    """A term's gradient summed over chunks; sizes: largest sum of absolute chunks, by name; last:
    that of the last chunk alone."""

    grads: Grads
    values: list[float]
    counts: list[float]
    sizes: Sizes
    last: Grads


def _summed(
    single: Single, name: str, chunks: Sequence[Tensor], whole: Tensor, *,
    seed: float = 1.0, with_scale: bool = False,
) -> _Sum | None:  # fmt: skip
    """None where a chunk cannot be run alone: some losses need several rows."""
    total: Grads = {}
    sizes: Grads = {}
    values: list[float] = []
    counts: list[float] = []
    grads: Grads = {}
    try:
        for chunk in chunks:
            grads, count = single.gradient_exact(name, chunk, whole, seed=seed)
            counts.append(count)
            values.append(single.value)
            for n, grad in grads.items():
                total[n] = total[n] + grad if n in total else grad
                if with_scale:
                    sizes[n] = sizes[n] + grad.abs() if n in sizes else grad.abs()
    except (ValueError, RuntimeError):  # batch norm, contrasts
        if chunks[0].numel() == len(whole):
            raise
        return None
    largest = {n: float(size.max()) if size.numel() else 0.0 for n, size in sizes.items()}
    return _Sum(grads=total, values=values, counts=counts, sizes=largest, last=grads)


def _jittered(
    floor: Floor, working: Single, terms: dict[str, _Term], exact: Run, scale: Sizes, cut: _Cut,
    step: int,
) -> Floor:  # fmt: skip
    """The noise of a dtype, with that of runs whose weights are off by one rounding."""
    for seed, chunks in enumerate(cut.drawn, 1):
        working.set_step(step, jitter=seed)
        run = _working_run(working, terms, chunks, divide_first=bool(seed % 2))
        floor = raise_floor(floor, exact, run, scale, working.dtype)
    working.set_step(step)
    return floor


def _finer(dtype: torch.dtype, floor: Floor) -> Floor:
    """The noise that float64 has where a dtype of fewer digits has this one."""
    part = torch.finfo(torch.float64).eps / torch.finfo(dtype).eps
    return Floor(
        by_name={n: part * noise for n, noise in floor.by_name.items()},
        by_term={t: {n: part * x for n, x in own.items()} for t, own in floor.by_term.items()},
        norm=part * floor.norm,
    )


def _typical(floor: Sizes, scale: Sizes, zeros: set[str]) -> Sizes:
    """No tensor is quieter than half of them are: a small one may come out exact by luck.

    zeros: what is zero by mathematics is all noise, that of the largest numbers it cancels from.
    """
    parts = sorted(floor[name] / size for name, size in scale.items() if size > 0)
    typical, largest = parts[len(parts) // 2] if parts else 0.0, max(scale.values())
    return {
        name: max(noise, typical * (largest if name in zeros else scale[name]))
        for name, noise in floor.items()
    }


def _zeros(terms: Mapping[str, _Term]) -> set[str]:
    """Parameters whose gradient is no more than what two float64 runs of it differ by."""
    first = next(iter(terms.values()))
    return {
        name
        for name, grad in first.grads.items()
        if grad.numel()
        and all(
            float(t.grads[name].abs().max()) <= ZERO_FACTOR * error(t.again[name], t.grads[name])
            for t in terms.values()
        )
    }


def _working_run(
    working: Single,
    terms: dict[str, _Term],
    chunks: Sequence[Tensor],
    *,
    divide_first: bool = False,
) -> Run:
    """One single-process run in the working dtype: rows in these chunks, or all in this order.

    divide_first: by the count before the backward, not after it; other roundings, same gradient.
    """
    by_term = {}
    whole = torch.arange(working.facts.num_rows)
    for name, term in terms.items():
        parts = chunks if term.kind == "rows" else [torch.cat(list(chunks))]
        total: Grads = {}
        for part in parts:
            before, after = (1 / term.count, 1.0) if divide_first else (1.0, term.count)
            grads, _ = working.gradient(name, part, whole, seed=before)
            total = {n: total[n] + g / after if n in total else g / after for n, g in grads.items()}
        by_term[name] = total
    return _run(by_term)


def _reached(exact: Single, scale: Sizes, cut: _Cut, step: int, num_steps: int) -> tuple[str, ...]:
    """Parameters that the loss depends on. Where a gradient is zero here it is asked for again, at
    the weights of a step that is not run."""
    found = {n: None for n, size in scale.items() if size > 0}
    if all(n in found for n in scale):
        return tuple(found)
    exact.set_step(num_steps, rows_of=step)
    for name in exact.terms:
        grads, _ = exact.gradient(name, cut.rows, cut.rows)
        found |= dict.fromkeys(n for n, g in grads.items() if bool(g.any()))
    return tuple(found)


def _buffers(exact: Single, cut: _Cut) -> tuple[Grads, list[str]]:
    """Buffers after one pass over all rows, where a pass changes any."""
    if not exact.buffers:
        return {}, []
    (name,) = exact.terms
    looks: list[Callable[[], object]] = [  # cheap ones, with a graph and over all rows
        lambda: _summed(exact, name, cut.fine[:1], cut.rows),
        lambda: exact.value_and_count(name, cut.rows),
    ]
    for look in looks:
        look()
        held, changed = exact.buffers_after()
        if changed:
            exact.gradient(name, cut.rows, cut.rows)
            return exact.buffers_after()
    return held, changed


def _problems(
    exact: Single, terms: dict[str, _Term], before: str, step: int
) -> tuple[list[str], list[str], list[str]]:
    """What makes the reference untrustworthy; what only limits the diagnosis; which casts it has,
    a problem in float64 only."""
    problems: list[str] = []
    warnings: list[str] = []
    narrow: list[str] = []
    trained_now = {n: p.detach() for n, p in trained(exact.model).items()}
    wanted = Weights(exact.base, step, exact.rounded_to, exact.dtype)
    if any(not torch.equal(trained_now[n], wanted[n]) for n in wanted):
        problems.append("loss_sum() changes the weights")
    for name, term in terms.items():
        if not all(bool(torch.isfinite(g).all()) for g in term.grads.values()):
            problems.append(f"{name}: the single-process gradient is not finite")
        elif not _same(term.again, term.grads, term.scale, exact.same):
            if _same(term.again, term.grads, term.scale, NARROW):
                narrow.append(
                    f"{name}: loss_sum computes in less than float64 somewhere (a cast?): two "
                    f"single-process runs over the same rows differ like float32"
                )
                continue
            problems.append(
                f"{name}: two single-process runs of loss_sum over the same rows differ: it draws "
                f"unseeded random numbers, or depends on the order of the rows"
            )
        elif term.kind == "coupled":
            warnings.append(
                f"{name} is non-additive: its rows' gradients do not add up to that of all rows, "
                f"so it has no coefficients"
            )
    return problems, warnings, narrow


def _low_precision(floor: dict[str, float], scale: Sizes) -> list[str]:
    """float64 that is none: a cast inside loss_sum leaves its mark on the noise floor."""
    odd = [n for n, size in scale.items() if floor[n] > STRUCTURE_CAP * max(size, 1e-300)]
    loud = [n for n in odd if floor[n] > STRUCTURE_CAP]
    if not loud:
        return []
    return [
        f"loss_sum() computes {loud[0]} in less than float64 somewhere (a cast?): its "
        f"single-process runs differ by {floor[loud[0]]:.1e}"
    ]


def _other_sum(exact: Single, terms: dict[str, _Term], cut: _Cut) -> list[str]:
    """Whether `terms` add up to loss_sum; where they do not, the terms are the reference."""
    if list(exact.terms) == ["loss"]:
        return []
    kept = exact.terms
    total = _total({name: term.grads for name, term in terms.items()})
    scale = _total_sizes([term.scale for term in terms.values()])
    exact.terms = {**kept, "loss_sum": exact.program.loss_sum}
    try:
        grads, count = exact.gradient_exact("loss_sum", cut.rows, cut.rows)
    except Exception:
        return []
    finally:
        exact.terms = kept
    if count and _same(_over(grads, count), total, scale, exact.same):
        return []
    return ["`terms` add up to another gradient than loss_sum; the reference is that of `terms`"]


def _same(got: Grads, wanted: Grads, scale: Sizes, same: float) -> bool:
    """Up to a part of each tensor's scale; what is zero by mathematics has but noise."""
    least = QUIET * same * max(scale.values(), default=0.0)
    return all(
        error(value, wanted[name]) <= max(same * scale[name], least) + 1e-300
        for name, value in got.items()
        if value.numel()
    )


def _over(grads: Grads, count: float) -> Grads:
    return {name: grad / count for name, grad in grads.items()}


def _total(by_term: Mapping[str, Grads]) -> Grads:
    if len(by_term) == 1:
        return dict(next(iter(by_term.values())))
    out: Grads = {}
    for grads in by_term.values():
        for name, grad in grads.items():
            out[name] = out[name] + grad if name in out else grad.clone()
    return out


def _total_sizes(by_term: Sequence[Sizes]) -> Sizes:
    return {name: sum(sizes[name] for sizes in by_term) for name in by_term[0]}
