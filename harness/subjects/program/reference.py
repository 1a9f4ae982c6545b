"""The reference of a Program: its own loss_sum over the full batch, in one process.

Every term's gradient is that of SUM / count, the count taken over the full batch. Terms whose
row-wise gradients add up also give the partials that coefficients are recovered from; a term that
couples rows is compared, but has no coefficients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from sumgrad.record.reference import ALL, Kind, Reference
from sumgrad.record.spec import Facts
from sumgrad.subjects.noise_floor import (
    Grads,
    Run,
    differences,
    error,
    floor_runs,
    measure_floor,
    norm,
    raise_floor,
)
from sumgrad.subjects.program.protocol import Broken, hash_model, trained, weights_at
from sumgrad.subjects.program.single import SAME, Single
from torch import Tensor

NARROW = 1e-4  # of the scale: what a float32 inside a float64 run leaves, and random draws do not
COUPLED_SHARE = 0.01  # of the largest gradient: the scale of one without partials
JITTERS = 4  # runs whose weights are off by one rounding, for sums that are cut within a row
MAX_PARTIALS = 1 << 24  # elements kept of all partials of a step; rows are merged to fit

Progress = Callable[[str], None]


def compute_program_reference(
    program: Any,
    facts: Facts,
    dtype: torch.dtype,
    *,
    steps: int,
    num_chunks: int,
    lift: bool = True,
    progress: Progress = lambda _: None,
) -> list[Reference]:
    """The reference of every step in one dtype. Raises Broken where loss_sum does.

    It is float64, unless the Program cannot run in float64: then it is in the dtype itself.
    """
    best = torch.float64 if facts.float64 is None else dtype
    exact = Single(program, facts, best, rounded_to=dtype, lift=lift)
    working = Single(program, facts, dtype, rounded_to=dtype, lift=lift)  # before a batch is held
    reached = _reached(exact, facts, steps)
    out = []
    for step in range(steps):
        progress(f"reference, step {step}")
        hashed = exact.set_step(step)
        working.set_step(step)
        found = _reference(exact, working, facts, step, hashed, num_chunks)
        out.append(replace(found, reached=reached))
    return [replace(found, outside=exact.outside()) for found in out]


def _reached(exact: Single, facts: Facts, steps: int) -> tuple[str, ...]:
    """Parameters that the loss depends on, seen at the weights of a step that is not run."""
    exact.set_step(steps)
    rows = torch.arange(facts.num_rows)
    found: dict[str, None] = {}
    for name in exact.terms:
        grads, _ = exact.gradient(name, rows, rows)
        found |= dict.fromkeys(n for n, g in grads.items() if bool(g.any()))
    return tuple(found)


@dataclass(slots=True, kw_only=True)
class _Term:
    """One term at one step, in float64."""

    grads: Grads
    again: Grads
    count: float
    scale: Grads
    kind: Kind
    partials: Grads
    counts: tuple[float, ...]
    buffers: tuple[Grads, list[str]]


def _reference(
    exact: Single, working: Single, facts: Facts, step: int, hashed: str, num_chunks: int
) -> Reference:
    rows = torch.arange(facts.num_rows)
    intervals = _intervals(facts)
    before = hash_model(exact.model)
    terms = {name: _exact_term(exact, name, rows, intervals) for name in exact.terms}
    problems, warnings = _problems(exact, terms, before, step)
    by_term = {name: term.grads for name, term in terms.items()}
    total = _total(by_term)
    scale = _total({name: term.scale for name, term in terms.items()})
    runs = [
        _working_run(working, terms, rows, chunks, divide_first=bool(i % 2))
        for i, chunks in enumerate(floor_runs(facts.num_rows, num_chunks, "cpu").values())
    ]
    floor = measure_floor(Run(by_term=by_term, total=total), runs)
    for seed in range(JITTERS):
        working.set_step(step, jitter=seed + 1)
        run = _working_run(working, terms, rows, [rows])
        floor = raise_floor(floor, Run(by_term=by_term, total=total), run, scale, working.dtype)
    working.set_step(step)
    if exact.rounded_to == torch.float64 and not problems:
        problems += _low_precision(floor.by_name, scale)
    warnings += _other_sum(exact, total, rows, scale)
    buffers, changed = next(iter(terms.values())).buffers if len(terms) == 1 else ({}, [])
    return Reference(
        step=step,
        grads=total,
        by_term=by_term,
        resolution=differences({n: t.again for n, t in terms.items()}, by_term),
        scale=scale,
        floor=floor.by_name,
        floor_by_term=floor.by_term,
        same_dtype=dict(runs[0].total),
        norm=norm(total),
        norm_floor=floor.norm,
        counts={name: int(term.count) for name, term in terms.items()},
        weights=hashed,
        kinds={name: term.kind for name, term in terms.items()},
        reached=(),
        partials={(n, ALL): t.partials for n, t in terms.items() if t.kind != "coupled"},
        intervals=intervals,
        row_counts={name: term.counts for name, term in terms.items()},
        problems=tuple(problems),
        warnings=tuple(warnings),
        buffers=buffers,
        changed_buffers=tuple(changed),
    )


def _exact_term(
    exact: Single, name: str, rows: Tensor, intervals: Sequence[tuple[int, int]]
) -> _Term:
    """A term over all rows, over them once more, and one interval after the other."""
    summed, count = exact.gradient_exact(name, rows, rows)
    buffers = exact.buffers_after()
    if not count > 0:
        raise Broken(f"{name}: the count of the full batch is {count:g}, expected more than 0")
    grads = {n: g / count for n, g in summed.items()}
    again, _ = exact.gradient_exact(name, rows.flip(0), rows, seed=1 / count)
    parts: list[Grads] = []
    counts: list[float] = []
    try:
        for a, b in intervals:
            part, own = exact.gradient_exact(name, rows[a:b], rows)
            parts.append({n: g / count for n, g in part.items()})
            counts.append(own)
    except (ValueError, RuntimeError):  # some losses need several rows: batch norm, contrasts
        parts, counts = [grads], [-1.0]
    stacked = {n: torch.stack([part[n] for part in parts]) for n in grads}
    statistic = isinstance(exact.terms[name], tuple)
    scale = {n: s.abs().sum(0) for n, s in stacked.items()}
    if (statistic or abs(sum(counts) - count) <= SAME * count) and _same(
        {n: s.sum(0) for n, s in stacked.items()}, grads, scale, exact.same
    ):
        kind: Kind = "rows"
    elif all(own == count for own in counts) and all(
        _same(p, grads, grads, exact.same) for p in parts
    ):
        kind, stacked = "once", {n: g[None] for n, g in grads.items()}
    else:
        kind, stacked = "coupled", {}
    if kind != "rows":  # no partials: a gradient that is zero by mathematics has the others' scale
        largest = max(float(g.abs().max()) for g in grads.values() if g.numel())
        scale = {n: g.abs() + COUPLED_SHARE * largest for n, g in grads.items()}
    return _Term(
        grads=grads,
        again=again,
        count=count,
        scale=scale,
        kind=kind,
        partials=stacked,
        counts=tuple(counts),
        buffers=buffers,
    )


def _working_run(
    working: Single,
    terms: dict[str, _Term],
    rows: Tensor,
    chunks: Sequence[Tensor],
    *,
    divide_first: bool = False,
) -> Run:
    """One single-process run in the working dtype: rows in these chunks, or all in this order.

    divide_first: by the count before the backward, not after it; other roundings, same gradient.
    """
    by_term = {}
    for name, term in terms.items():
        parts = chunks if term.kind == "rows" else [torch.cat(list(chunks))]
        total: Grads = {}
        for part in parts:
            before, after = (1 / term.count, 1.0) if divide_first else (1.0, term.count)
            grads, _ = working.gradient(name, part, rows, seed=before)
            total = {n: total[n] + g / after if n in total else g / after for n, g in grads.items()}
        by_term[name] = total
    return Run(by_term=by_term, total=_total(by_term))


def _problems(
    exact: Single, terms: dict[str, _Term], before: str, step: int
) -> tuple[list[str], list[str]]:
    """What makes the reference untrustworthy, and what only limits the diagnosis."""
    problems: list[str] = []
    warnings: list[str] = []
    trained_now = {n: p.detach() for n, p in trained(exact.model).items()}
    wanted = weights_at(exact.base, step, exact.rounded_to)
    if any(not torch.equal(trained_now[n], wanted[n].to(exact.dtype)) for n in wanted):
        problems.append("loss_sum() changes the weights")
    for name, term in terms.items():
        if not all(bool(torch.isfinite(g).all()) for g in term.grads.values()):
            problems.append(f"{name}: the single-process gradient is not finite")
        elif not _same(term.again, term.grads, term.scale, exact.same):
            if _same(term.again, term.grads, term.scale, NARROW):
                (problems if exact.rounded_to == torch.float64 else warnings).append(
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
    return problems, warnings


def _low_precision(floor: dict[str, float], scale: Grads) -> list[str]:
    """float64 that is none: a cast inside loss_sum leaves its mark on the noise floor."""
    from sumgrad.base.tolerances import STRUCTURE_CAP

    sizes = {n: float(s.max()) for n, s in scale.items() if s.numel()}
    odd = [n for n, size in sizes.items() if floor[n] > STRUCTURE_CAP * max(size, 1e-300)]
    loud = [n for n in odd if floor[n] > STRUCTURE_CAP]
    if not loud:
        return []
    return [
        f"loss_sum() computes {loud[0]} in less than float64 somewhere (a cast?): its "
        f"single-process runs differ by {floor[loud[0]]:.1e}"
    ]


def _other_sum(exact: Single, total: Grads, rows: Tensor, scale: Grads) -> list[str]:
    """Whether `terms` add up to loss_sum; where they do not, the terms are the reference."""
    if list(exact.terms) == ["loss"]:
        return []
    terms = exact.terms
    exact.terms = {**terms, "loss_sum": exact.program.loss_sum}
    try:
        grads, count = exact.gradient_exact("loss_sum", rows, rows)
    except Exception:
        return []
    finally:
        exact.terms = terms
    if count and _same({n: g / count for n, g in grads.items()}, total, scale, exact.same):
        return []
    return ["`terms` add up to another gradient than loss_sum; the reference is that of `terms`"]


def _same(got: Grads, wanted: Grads, scale: Grads, same: float) -> bool:
    return all(
        error(value, wanted[name]) <= same * float(scale[name].abs().max()) + 1e-300
        for name, value in got.items()
        if value.numel()
    )


def _total(by_term: dict[str, Grads]) -> Grads:
    out: Grads = {}
    for grads in by_term.values():
        for name, grad in grads.items():
            out[name] = out[name] + grad if name in out else grad.clone()
    return out


def _intervals(facts: Facts) -> tuple[tuple[int, int], ...]:
    """Row by row, or in as many intervals as their partials may take memory."""
    numel = sum(torch.Size(shape).numel() for shape in facts.params.values())
    most = max(1, min(facts.num_rows, MAX_PARTIALS // max(1, numel * len(facts.terms))))
    cuts = [round(i * facts.num_rows / most) for i in range(most + 1)]
    return tuple(pairwise(cuts))
