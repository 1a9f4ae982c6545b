"""A Program's gradient in parts, row by row: what a failure is explained from, and only then."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from sumgrad.record.reference import ALL, Partials, Parts, Reference
from sumgrad.record.spec import Facts
from sumgrad.subjects.program.protocol import coarsest
from sumgrad.subjects.program.reference.single import Single

MAX_PARTIALS = 1 << 24  # elements kept of all partials of a step; rows are merged to fit


def compute_parts(
    program: Any,
    facts: Facts,
    tiers: Mapping[str, torch.dtype],
    reference: Reference,
    *,
    lift: bool = True,
) -> Parts:
    """The parts of one step, of the terms whose rows add up and of those that have none.

    reference: of the same step; what kind each term is was found there.
    """
    rounded = coarsest(tiers.values())
    best = torch.float64 if facts.float64 is None else rounded
    exact = Single(program, facts, best, rounded_to=rounded, lift=lift)
    exact.set_step(reference.step)
    rows, intervals = torch.arange(facts.num_rows), _intervals(facts)
    partials: Partials = {}
    counts: dict[str, tuple[float, ...]] = {}
    for name in exact.terms:
        kind, whole = reference.kinds[name], reference.counts[name]
        if kind == "once":
            partials[name, ALL] = {n: g[None] for n, g in reference.by_term[name].items()}
        if kind != "rows":
            continue
        parts, own = [], []
        for a, b in intervals:
            part, count = exact.gradient_exact(name, rows[a:b], rows)
            parts.append(part)
            own.append(count)
        statistic = isinstance(exact.terms[name], tuple)
        total = 1.0 if statistic else sum(own)
        assert statistic or abs(whole - total) < 1, (whole, total)
        partials[name, ALL] = {
            n: torch.stack([part[n] for part in parts]) * (reference.factor / total)
            for n in parts[0]
        }
        counts[name] = tuple(own)
    return Parts(partials=partials, intervals=intervals, row_counts=counts)


def _intervals(facts: Facts) -> tuple[tuple[int, int], ...]:
    """Row by row, or in as many intervals as their partials may take memory."""
    numel = sum(torch.Size(shape).numel() for shape in facts.params.values())
    most = max(1, min(facts.num_rows, MAX_PARTIALS // max(1, numel * len(facts.terms))))
    cuts = [round(i * facts.num_rows / most) for i in range(most + 1)]
    return tuple(pairwise(cuts))
