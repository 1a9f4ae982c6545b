"""What arithmetic in a dtype does to a reference: runs in that dtype, and what no run shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from sumgrad.base.tolerances import STRUCTURE_CAP, zero_factor
from sumgrad.subjects.noise_floor import (
    Floor,
    Grads,
    Run,
    error,
    louder,
    measure_floor,
    norm,
    raised,
)
from sumgrad.subjects.program.reference.single import Single
from sumgrad.subjects.program.reference.terms import JITTERS, Exact, Sizes, Term, run_of
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """What a dtype does to a step's gradients. by_name: its floor, none quieter than is typical;
    run: one in that dtype."""

    dtype: torch.dtype
    floor: Floor
    by_name: Sizes
    run: Run


def measure(
    exact: Exact, working: Single, coarser: Noise | None, beside: Single | None = None
) -> Noise:
    """The noise in the dtype of `working`, at the step's weights. coarser: that of fewer digits.
    beside: the same on the device of the ranks, whose roundings are its own.

    float64's own two sums are its runs; what sums that are cut within a row do to it is taken from
    the coarser dtype's, where there is one, and no more runs are asked for.
    """
    dtype, single = working.dtype, exact.single
    run = exact.again if working is single else working_run(working, exact.terms, exact.cut.coarse)
    floor = measure_floor(exact.sums, [run])
    few = len(exact.cut.drawn) <= JITTERS
    less = coarser if dtype == torch.float64 else None
    found = [] if less is None else [finer(less.dtype, less.floor)]
    if beside is not None:
        cuts = (exact.cut.coarse, exact.cut.fine, *exact.cut.drawn)
        runs = [working_run(beside, exact.terms, chunks) for chunks in cuts]
        found.append(measure_floor(exact.sums, runs))
    moved = None if few and less is not None else jittered(working, exact)
    if few and moved is not None:
        found.append(louder(floor, moved))
    if found:  # at once: the bound is on what was found beside the first
        floor = raised(floor, reduce(louder, found), exact.scale, norm(exact.sums.total), dtype)
    if not few and moved is not None:
        floor = louder(floor, moved)
    by_name = at_least_typical(
        floor.by_name, exact.scale, zero_by_mathematics(exact.terms, exact.single.dtype)
    )
    return Noise(dtype=dtype, floor=floor, by_name=by_name, run=run)


def jittered(working: Single, exact: Exact) -> Floor:
    """The noise of runs whose weights are off by one rounding: no step can be held to less."""
    found: Floor | None = None
    for seed, chunks in enumerate(exact.cut.drawn, 1):
        working.set_step(exact.step, jitter=seed)
        run = working_run(working, exact.terms, chunks, divide_first=bool(seed % 2))
        one = measure_floor(exact.sums, [run])
        found = one if found is None else louder(found, one)
    working.set_step(exact.step)
    assert found is not None, "a cut without a drawn order"
    return found


def finer(dtype: torch.dtype, floor: Floor) -> Floor:
    """The noise that float64 has where a dtype of fewer digits has this one."""
    part = torch.finfo(torch.float64).eps / torch.finfo(dtype).eps
    return Floor(
        by_name={n: part * noise for n, noise in floor.by_name.items()},
        by_term={t: {n: part * x for n, x in own.items()} for t, own in floor.by_term.items()},
        norm=part * floor.norm,
    )


def at_least_typical(floor: Sizes, scale: Sizes, zeros: set[str]) -> Sizes:
    """No tensor is quieter than half of them are: a small one may come out exact by luck.

    zeros: what is zero by mathematics is all noise, that of the largest numbers it cancels from,
    and says nothing of how noisy others are for their size.
    """
    told = (name for name, size in scale.items() if size > 0 and name not in zeros)
    parts = sorted(floor[name] / scale[name] for name in told)
    typical, largest = parts[len(parts) // 2] if parts else 0.0, max(scale.values())
    return {
        name: max(noise, typical * (largest if name in zeros else scale[name]))
        for name, noise in floor.items()
    }


def zero_by_mathematics(terms: Mapping[str, Term], dtype: torch.dtype) -> set[str]:
    """Parameters whose gradient is no more than what two runs of it in `dtype` differ by."""
    first, factor = next(iter(terms.values())), zero_factor(str(dtype).removeprefix("torch."))
    return {
        name
        for name, grad in first.grads.items()
        if grad.numel()
        and all(
            float(t.grads[name].abs().max()) <= factor * error(t.again[name], t.grads[name])
            for t in terms.values()
        )
    }


def working_run(
    working: Single,
    terms: Mapping[str, Term],
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
    return run_of(by_term)


def low_precision(floor: dict[str, float], scale: Sizes) -> list[str]:
    """float64 that is none: a cast inside loss_sum leaves its mark on the noise floor."""
    odd = [n for n, size in scale.items() if floor[n] > STRUCTURE_CAP * max(size, 1e-300)]
    loud = [n for n in odd if floor[n] > STRUCTURE_CAP]
    if not loud:
        return []
    return [
        f"loss_sum() gives the gradient of {loud[0]} in fewer digits than float64 has: its "
        f"single-process runs differ by {floor[loud[0]] / max(scale[loud[0]], 1e-300):.1e} of it "
        f"(a cast somewhere, or a loss that loses digits: a determinant, an inverse, a difference "
        f"of large numbers)"
    ]
