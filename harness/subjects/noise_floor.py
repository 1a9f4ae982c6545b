"""The noise that arithmetic in a dtype makes around the reference, from single-process runs.

A floor is the largest error of runs that differ only in order and cut of the rows. Where ranks run
on other kernels or another device, runs on those raise it, within a bound (`tolerances`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from sumgrad.base.tolerances import with_kernels
from torch import Tensor

Grads = dict[str, Tensor]
FEW_ROWS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """By name, by term and name, and of the norm: the largest absolute errors."""

    by_name: dict[str, float]
    by_term: dict[str, dict[str, float]]
    norm: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one single-process run gave: its terms, and their sum in its own dtype."""

    by_term: Mapping[str, Grads]
    total: Grads

    def on_host(self) -> Run:
        """The same, in host memory."""
        terms = {t: {n: g.cpu() for n, g in own.items()} for t, own in self.by_term.items()}
        return Run(by_term=terms, total={n: g.cpu() for n, g in self.total.items()})


def measure_floor(exact: Run, runs: Sequence[Run]) -> Floor:
    """The largest errors of `runs` against the float64 run."""
    terms = [differences(run.by_term, exact.by_term) for run in runs]
    return Floor(
        by_name={n: max(error(r.total[n], g) for r in runs) for n, g in exact.total.items()},
        by_term={
            term: {name: max(one[term][name] for one in terms) for name in names}
            for term, names in terms[0].items()
        },
        norm=max(abs(norm(run.total) - norm(exact.total)) for run in runs),
    )


def raise_floor(
    floor: Floor, exact: Run, others: Sequence[Run], sizes: Mapping[str, float], dtype: torch.dtype
) -> Floor:
    """The floor that also knows runs on what the ranks have. sizes: sums of absolute partials."""
    return raised(floor, measure_floor(exact, others), sizes, norm(exact.total), dtype)


def louder(one: Floor, other: Floor) -> Floor:
    """The larger of two floors, name by name."""
    return Floor(
        by_name={n: max(x, other.by_name[n]) for n, x in one.by_name.items()},
        by_term={
            t: {n: max(x, other.by_term[t][n]) for n, x in own.items()}
            for t, own in one.by_term.items()
        },
        norm=max(one.norm, other.norm),
    )


def raised(
    floor: Floor, found: Floor, sizes: Mapping[str, float], of_norm: float, dtype: torch.dtype
) -> Floor:
    """The larger of two floors, within the bound for what was found beside the first."""
    name_of = str(dtype).removeprefix("torch.")

    def larger(old: Mapping[str, float], new: Mapping[str, float]) -> dict[str, float]:
        return {n: with_kernels(old[n], new[n], sizes[n], name_of) for n in old}

    return Floor(
        by_name=larger(floor.by_name, found.by_name),
        by_term={t: larger(old, found.by_term[t]) for t, old in floor.by_term.items()},
        norm=with_kernels(floor.norm, found.norm, of_norm, name_of),
    )


def floor_runs(num_rows: int, num_chunks: int, device: str) -> dict[str, list[Tensor]]:
    """At least eight single-process runs that differ only in order and cut of the rows.

    Few rows have few orders and small errors, whose largest says little: there are more runs then.
    """
    rows = torch.arange(num_rows, device=device)
    shuffled = [
        rows[torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed))]
        for seed in range(1, 7)
    ]
    runs = {
        "at once": [rows],
        "one by one": list(rows.split(1)),
        "reversed": [rows.flip(0)],
        "permuted": [shuffled[0]],
        "permuted again": [shuffled[1]],
        "two chunks": list(rows.chunk(min(2, num_rows))),
        "three chunks": list(shuffled[0].chunk(min(3, num_rows))),
        "as many chunks as the largest pool": list(rows.tensor_split(min(num_chunks, num_rows))),
    }
    if num_rows <= FEW_ROWS:
        for i, order in enumerate(shuffled[2:]):
            runs[f"permuted, one by one, {i}"] = list(order.split(1))
            runs[f"permuted, two chunks, {i}"] = list(order.chunk(2))
    return runs


def differences(
    got: Mapping[str, Grads], wanted: Mapping[str, Grads]
) -> dict[str, dict[str, float]]:
    return {
        term: {name: error(got[term][name], value) for name, value in grads.items()}
        for term, grads in wanted.items()
    }


def norm(grads: Grads) -> float:
    squares = [grad.double().square().sum() for grad in grads.values()]
    return float(torch.stack(squares).sum().sqrt())


def error(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted).abs().max()) if got.numel() else 0.0
