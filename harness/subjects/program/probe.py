"""Looking at a Program once, in one process, before any rank starts.

What raises, hangs or is drawn unseeded there is named there, and so is what the ranks and the
reference need to know: parameters, rows, terms, how loss_sum takes its rows, whether float64 runs.
"""

from __future__ import annotations

import fnmatch
import traceback
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from sumgrad.base.errors import Broken
from sumgrad.base.outcome import some_of
from sumgrad.base.tensors import hash_weights
from sumgrad.record.spec import Facts, RowsAs
from sumgrad.subjects.hashed import hashed_lines
from sumgrad.subjects.program.batch import cut, full_batch, hold_batch, to_dtype
from sumgrad.subjects.program.declared import after_of, compared_buffers, microbatches_of
from sumgrad.subjects.program.lift import lifting
from sumgrad.subjects.program.protocol import (
    build,
    default_dtype,
    function_of,
    hash_model,
    loss_of,
    scramble,
    terms_of,
    to_precision,
    trained,
    with_place,
)
from torch import Tensor, nn

PROBED_ROWS, SAMPLED_ROWS = 2, 8
SAME = 1e-6


def probe(program: Any, *, dtype: torch.dtype = torch.float32, lift: bool = True) -> Facts:
    """Look at a Program in one process: each method once or twice, on a few rows."""
    try:
        return _probe(program, dtype, lift)
    except Broken as error:
        return broken_facts(with_place(program, str(error)))


def broken_facts(problem: str) -> Facts:
    """The Facts of a Program that cannot be checked."""
    return Facts(
        params={}, num_rows=0, terms=(), rows_as="tensors", float64=None, problems=(problem,),
        weights="", batch="",
    )  # fmt: skip


def _probe(program: Any, dtype: torch.dtype, lift: bool) -> Facts:
    scramble(1)
    model = build(program)
    scramble(3)  # build() may seed the global generator itself
    batch = full_batch(program)
    weights, data = hash_model(model), hash_weights(batch)
    scramble(2)
    problems = []
    if hash_model(build(program)) != weights:
        problems.append("build() gives other weights when it is called again: seed what it draws")
    complex_ones = [name for name, p in trained(model).items() if p.is_complex()]
    if complex_ones:
        problems.append(f"{some_of(complex_ones)} is complex: such gradients are not compared")
    scramble(4)
    if hash_weights(full_batch(program)) != data:
        problems.append("batch() gives another batch when it is called again: seed what it draws")
    terms = terms_of(program)
    num_rows = len(next(iter(batch.values())))
    rows_as, dtype = _rows_as(program, terms, model, dtype)
    problem = _try_dtype(program, terms, rows_as, torch.float64, lift=lift)
    facts = Facts(
        params={name: tuple(p.shape) for name, p in trained(model).items()},
        num_rows=num_rows,
        terms=tuple(terms),
        rows_as=rows_as,
        float64=problem,
        problems=tuple(problems),
        weights=weights,
        batch=data,
        after=after_of(program),
        buffers=_compared_buffers(program, model),
        microbatches=microbatches_of(program),
        dtypes=tuple(sorted({str(p.dtype)[len("torch.") :] for p in trained(model).values()})),
        hashed=hashed_lines(),
        runs_in=str(dtype).removeprefix("torch."),
    )
    # Last: what a loss_sum does to its model is no fact of what build() gives.
    cast = to_dtype(batch, dtype)
    means = _means(program, terms, rows_as, model, cast, dtype)
    sample = _sample(program, terms, rows_as, model, cast, dtype)
    return replace(facts, problems=(*facts.problems, *means), sample=sample)


def _sample(
    program: Any, terms: Mapping[str, Any], rows_as: RowsAs, model: nn.Module,
    batch: Mapping[str, Tensor], dtype: torch.dtype,
) -> str:  # fmt: skip
    """What tells one loss_sum from another: of a few rows what it gives, and the gradients."""
    rows = torch.arange(min(SAMPLED_ROWS, len(next(iter(batch.values())))))
    hold_batch(program, batch)
    found: dict[str, Tensor] = {}
    for name, term in terms.items():
        if isinstance(term, tuple):
            continue
        scramble(5)
        model.zero_grad(set_to_none=True)
        try:
            with default_dtype(dtype):
                loss, count = loss_of(term, name, model, cut(batch, rows, rows_as))
                loss.backward()
        except Exception:
            continue  # it is said where the reference is made
        found[f"{name}/"] = loss.detach().reshape(1)
        found[f"{name}/count"] = torch.tensor([float(count)])
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        found |= {f"{name}/{n}": _dense(grad.detach()).clone() for n, grad in grads.items()}
    model.zero_grad(set_to_none=True)
    return hash_weights(found)


def _dense(grad: Tensor) -> Tensor:
    return grad if grad.layout is torch.strided else grad.to_dense()


def _means(
    program: Any, terms: Mapping[str, Any], rows_as: RowsAs, model: nn.Module,
    batch: Mapping[str, Tensor], dtype: torch.dtype,
) -> list[str]:  # fmt: skip
    """Functions that give a mean where a SUM is meant: of the same rows twice they give the same,
    and count twice as many."""
    once = torch.arange(min(PROBED_ROWS, len(next(iter(batch.values())))))
    hold_batch(program, batch)
    found = []
    for name, term in terms.items():
        if isinstance(term, tuple):
            continue
        try:
            with default_dtype(dtype):
                (a, n), (b, m), (c, _) = (
                    loss_of(term, name, model, cut(batch, rows, rows_as))
                    for rows in (once, once.repeat(2), once)
                )
            first, twice, again = (float(x.detach()) for x in (a, b, c))
            same = first != 0 and all(abs(x - first) <= SAME * abs(first) for x in (twice, again))
        except Exception:
            continue  # it takes no row twice
        if n > 0 and m == 2 * n and same:
            text = (
                f"{function_of(name)} returns a mean, not the SUM over the rows: of the same rows "
                f"twice it gives the same, and counts twice as many"
            )
            found.append(with_place(program, text))
    return found


def _compared_buffers(program: Any, model: nn.Module) -> tuple[str, ...]:
    """What it wants compared. Broken where a pattern names no buffer."""
    patterns, names = compared_buffers(program), [name for name, _ in model.named_buffers()]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            has = some_of(names) if names else "none"
            raise Broken(f"compare_buffers: {pattern!r} names no buffer; the model has {has}")
    return patterns


def _rows_as(
    program: Any, terms: Mapping[str, Any], model: nn.Module, dtype: torch.dtype
) -> tuple[RowsAs, torch.dtype]:
    """Whether its functions take a cut batch or indices, and in which dtype they run: the first
    that does not raise. A model of one dtype may be given what is cast to it, and runs in no
    other."""
    errors: list[str | None] = []
    orders: tuple[RowsAs, RowsAs] = ("tensors", "indices")
    own = {param.dtype for param in trained(model).values()}
    for one in dict.fromkeys([dtype, *(own if len(own) == 1 else ())]):
        for rows_as in orders:
            errors.append(_try_dtype(program, terms, rows_as, one))
            if errors[-1] is None:
                return rows_as, one
    raise Broken(errors[0] or "")


def _try_dtype(
    program: Any, terms: Mapping[str, Any], rows_as: RowsAs, dtype: torch.dtype,
    *, lift: bool = False,
) -> str | None:  # fmt: skip
    """Run every term forward and backward on a few rows; the reason if that cannot be done."""
    model = to_precision(build(program), dtype)
    batch = to_dtype(full_batch(program), dtype)
    rows = torch.arange(min(PROBED_ROWS, len(next(iter(batch.values())))))
    hold_batch(program, batch)
    try:
        with default_dtype(dtype), lifting(dtype, change=lift):
            for name, term in terms.items():
                given = cut(batch, rows, rows_as)
                if isinstance(term, tuple):
                    statistics = term[0](model, given)
                    loss = term[1](statistics, len(rows))
                else:
                    loss, _ = loss_of(term, name, model, given)
                if loss.requires_grad:
                    loss.backward()
    except Broken as error:
        return str(error)
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        users = [f for f in frames if f.filename != __file__ and "/torch/" not in f.filename]
        place = f" at {users[-1].filename}:{users[-1].lineno}" if users else ""
        return f"loss_sum() raised {type(error).__name__}: {error}{place}"
    return None
