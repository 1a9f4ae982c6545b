"""The reference of a Program: its own loss_sum over the full batch, in one process.

Every term's gradient is that of SUM / count, the count taken over the full batch. A term whose rows
add up is summed chunk by chunk, twice, in two cuts and orders: that they agree is the proof that it
does add up. A term that couples rows is run over all of them at once, and has no coefficients.
Every tier has the same weights and rows, rounded to the coarsest dtype, so they share one float64
gradient; what is measured in each dtype is its noise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from sumgrad.base.devices import take_device
from sumgrad.base.memory import give_back_memory
from sumgrad.record.reference import Reference, as_count
from sumgrad.record.spec import Facts
from sumgrad.subjects.noise_floor import Grads, differences, norm
from sumgrad.subjects.program.protocol import Weights, coarsest, misspelled, trained
from sumgrad.subjects.program.reference.after import after_step
from sumgrad.subjects.program.reference.noise import Noise, low_precision, measure
from sumgrad.subjects.program.reference.single import Single
from sumgrad.subjects.program.reference.terms import (
    JITTERS,
    NARROW,
    Cut,
    Exact,
    exact_term,
    over,
    same_up_to,
    summed,
)
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

Progress = Callable[[str], object]


def compute_program_reference(
    program: Any,
    facts: Facts,
    tiers: Mapping[str, torch.dtype],
    *,
    step: int,
    num_chunks: int,
    num_steps: int = 1,
    lift: bool = True,
    jitters: int = JITTERS,
    ranks_on: str = "cpu",
    progress: Progress = lambda _: None,
) -> dict[str, Reference]:
    """Every tier's reference of one step. Raises Broken where loss_sum does.

    It is float64, unless the Program cannot run in float64: then it is in the coarsest dtype.
    jitters: runs with other roundings that the noise floor is taken from. ranks_on: "cpu" or
    "cuda"; there the noise is measured too.
    """
    rounded = coarsest(tiers.values())
    best = torch.float64 if facts.float64 is None else rounded
    progress(f"reference of step {step}: the gradient over all rows")
    single = Single(program, facts, best, rounded_to=rounded, lift=lift)
    hashed = single.set_step(step)
    cut = Cut(facts.num_rows, num_chunks, jitters)
    terms = {name: exact_term(single, name, cut) for name in single.terms}
    exact = Exact(single=single, step=step, terms=terms, cut=cut)
    problems, warnings, narrow = _problems(exact)
    warnings += _other_sum(exact)
    shared = _without_noise(exact, hashed, num_steps)
    give_back_memory()
    out: dict[str, Reference] = {}
    coarser: Noise | None = None
    for tier, dtype in sorted(tiers.items(), key=lambda item: -torch.finfo(item[1]).eps):
        progress(f"reference of step {step}: the noise of {dtype}".replace("torch.", ""))
        working = single
        if dtype != best:
            working = Single(program, facts, dtype, rounded_to=rounded, lift=lift)
            working.set_step(step)
        beside = None
        if ranks_on != "cpu":
            beside = Single(
                program, facts, dtype, rounded_to=rounded, lift=lift, device=take_device(ranks_on)
            )
            beside.set_step(step)
        coarser = noise = measure(exact, working, coarser, beside)
        own = [*problems, *(narrow if dtype == torch.float64 else ())]
        if dtype == torch.float64 and not own:
            own += low_precision(noise.by_name, exact.scale)
        out[tier] = replace(
            shared,
            floor=noise.by_name,
            floor_by_term=noise.floor.by_term,
            norm_floor=noise.floor.norm,
            same_dtype={} if working is single else dict(noise.run.total),
            problems=tuple(own),
            warnings=(*warnings, *(narrow if dtype != torch.float64 else ())),
        )
    if facts.after is not None:
        out = after_step(out, facts.after, tiers)
    return {tier: out[tier] for tier in tiers}


def _without_noise(exact: Exact, weights: str, num_steps: int) -> Reference:
    """What all tiers share."""
    single, terms = exact.single, exact.terms
    buffers, changed = _buffers(single, exact.cut) if len(terms) == 1 else ({}, [])
    return Reference(
        step=exact.step,
        grads=exact.sums.total,
        by_term=dict(exact.sums.by_term),
        resolution=differences(exact.again.by_term, exact.sums.by_term),
        scale=exact.scale,
        floor={},
        floor_by_term={},
        same_dtype={},
        norm=norm(exact.sums.total),
        norm_floor=0.0,
        counts={name: as_count(term.count) for name, term in terms.items()},
        weights=weights,
        kinds={name: term.kind for name, term in terms.items()},
        reached=_reached(exact, num_steps),
        outside=single.outside(),
        buffers=buffers,
        changed_buffers=tuple(changed),
        batch=single.batch_hash,
    )


def _reached(exact: Exact, num_steps: int) -> tuple[str, ...]:
    """Parameters that the loss depends on. Where a gradient is zero here it is asked for again, at
    the weights of a step that is not run."""
    single, rows = exact.single, exact.cut.rows
    found = {n: None for n, size in exact.scale.items() if size > 0}
    if all(n in found for n in exact.scale):
        return tuple(found)
    single.set_step(num_steps, rows_of=exact.step)
    for name in single.terms:
        grads, _ = single.gradient(name, rows, rows)
        found |= dict.fromkeys(n for n, g in grads.items() if bool(g.any()))
    return tuple(found)


def _buffers(exact: Single, cut: Cut) -> tuple[Grads, list[str]]:
    """Buffers after one pass over all rows, where a pass changes any."""
    if not exact.buffers:
        return {}, []
    (name,) = exact.terms
    looks: list[Callable[[], object]] = [  # cheap ones, with a graph and over all rows
        lambda: summed(exact, name, cut.fine[:1], cut.rows),
        lambda: exact.value_and_count(name, cut.rows),
    ]
    for look in looks:
        look()
        held, changed = exact.buffers_after()
        if changed:
            exact.gradient(name, cut.rows, cut.rows)
            return exact.buffers_after()
    return held, changed


def _problems(exact: Exact) -> tuple[list[str], list[str], list[str]]:
    """What makes the reference untrustworthy; what only limits the diagnosis; which casts it has,
    a problem in float64 only."""
    problems: list[str] = []
    warnings: list[str] = []
    narrow: list[str] = []
    single = exact.single
    trained_now = {n: p.detach() for n, p in trained(single.model).items()}
    wanted = Weights(single.base, exact.step, single.rounded_to, single.dtype)
    if any(not torch.equal(trained_now[n], wanted[n]) for n in wanted):
        problems.append("loss_sum() changes the weights")
    whole = [t for t in single.batch.values() if t.dim() and len(t) > 1]
    if whole and all(bool((t == t[:1]).all()) for t in whole):
        problems.append(
            "all rows of batch() are alike: which rows a rank takes, and whether they are reduced, "
            "would not be noticed"
        )
    for name, term in exact.terms.items():
        if not all(bool(torch.isfinite(g).all()) for g in term.grads.values()):
            problems.append(f"{name}: the single-process gradient is not finite")
        elif not same_up_to(term.again, term.grads, term.scale, single.same):
            if same_up_to(term.again, term.grads, term.scale, NARROW):
                narrow.append(
                    f"{name}: loss_sum computes in less than float64 somewhere (a cast?): two "
                    f"single-process runs over the same rows differ like float32"
                )
                continue
            problems.append(
                f"{name}: two single-process runs of loss_sum over the same rows, one of them in "
                f"another order, differ: {_draws(single.model)}"
            )
        elif term.even and not isinstance(single.terms[name], tuple):  # that has no own count
            warnings.append(
                f"{name}: cut over {term.even} ranks, every part of batch() has the same count, so "
                f"a mean of the ranks' means is the right gradient here and would not be noticed: "
                f"choose rows or masks of unlike counts"
            )
        elif term.kind == "coupled":
            warnings.append(
                f"{name} is non-additive: its rows' gradients do not add up to that of all rows, "
                f"so it has no coefficients"
                + ("; a loss_sum that returns a mean looks like this" if name == "loss" else "")
            )
    warnings += misspelled(single.program)
    return problems, warnings, narrow


def _draws(model: nn.Module) -> str:
    """Why two runs over the same rows may differ: the first dropout that is on, if one is."""
    for name, module in model.named_modules():
        p = getattr(module, "p", None)
        if isinstance(module, _DropoutNd) and module.training and p:
            return (
                f"{name} ({type(module).__name__}, p={p:g}) draws random numbers: set its p to 0 "
                f"in build(), or draw its masks by row from a seed"
            )
    return (
        "it draws unseeded random numbers, or depends on which row stands where (as by an index "
        "of rows that batch() holds: it does not count from 0 in a part of the rows)"
    )


def _other_sum(exact: Exact) -> list[str]:
    """Whether `terms` add up to loss_sum; where they do not, the terms are the reference."""
    single, rows = exact.single, exact.cut.rows
    if list(single.terms) == ["loss"]:
        return []
    kept = single.terms
    single.terms = {**kept, "loss_sum": single.program.loss_sum}
    try:
        grads, count = single.gradient_exact("loss_sum", rows, rows)
    except Exception:
        return []
    finally:
        single.terms = kept
    if count and same_up_to(over(grads, count), exact.sums.total, exact.scale, single.same):
        return []
    return ["`terms` add up to another gradient than loss_sum; the reference is that of `terms`"]
