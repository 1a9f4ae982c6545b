"""Runs an operator under one Arrangement: draw, lay out, differentiate, gather.

An Operator says what it takes for each token and what it shares. Results come back without any
layout: rows in the order of samples and positions, gradients of weights as totals.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sumgrad.base.tensors import same_bits
from sumgrad.invariance.arrangement import Arrangement, Call
from sumgrad.invariance.protocol import Operator, OperatorError, validate_results
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Tensors = dict[str, Tensor]
EXPECTATIONS = ("invariant", "planted", "control")
LOSS_SCALE = 16.0  # a loss is divided by it in float16, whose range its gradients would leave


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What is computed, without any layout. rows: (tokens, *shape), sample after sample."""

    lengths: tuple[int, ...]
    rows: Tensors
    weights: Tensors
    seed: Tensor


class Poison(TorchDispatchMode):
    """Fills memory that torch hands out uninitialised with NaN, so that a hole is seen."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if "empty" in func.overloadpacket.__name__ and isinstance(out, Tensor):
            if out.is_floating_point():
                out.fill_(float("nan"))
            elif not out.is_complex() and out.dtype != torch.bool:
                out.fill_(torch.iinfo(out.dtype).min)
        return out


def draw_problem(
    operator: Operator,
    *,
    lengths: Sequence[int],
    seed: int = 0,
    dtype: torch.dtype,
    device: str = "cpu",
) -> Problem:
    """Random values over eight powers of two, so that sums cancel and their order shows."""
    generator = np.random.default_rng([seed, *operator.name.encode()])

    def values(shape: tuple[int, ...]) -> Tensor:
        drawn = generator.standard_normal(shape) * 2.0 ** generator.integers(-4, 4, shape)
        return torch.from_numpy(np.asarray(drawn)).to(device=device, dtype=dtype)

    num_tokens = sum(lengths)
    rows: Tensors = {}
    for name, spec in operator.rows.items():
        shape = (num_tokens, *spec.shape)
        if spec.limit is None:
            rows[name] = values(shape)
        else:
            rows[name] = torch.from_numpy(generator.integers(0, spec.limit, shape)).to(device)
    weights = {
        name: values(shape) / shape[-1] ** (0.5 * (len(shape) > 1))
        for name, shape in operator.weights.items()
    }
    shape = () if operator.output is None else (num_tokens, *operator.output)
    drawn = values(shape)
    if operator.output is None and dtype == torch.float16:
        drawn = drawn / LOSS_SCALE
    return Problem(lengths=tuple(lengths), rows=rows, weights=weights, seed=drawn)


def place(
    values: Tensor, call: Call, starts: Sequence[int], *, offset: int, junk: bool, nan: bool = False
) -> Tensor:
    """Logical rows -> the physical rows of a call, in storage moved by `offset` elements.

    junk: padding is filled with other numbers (ids stay valid), or with NaN; else with 0.
    """
    shape = (call.num_rows, *values.shape[1:])
    numel = offset + int(np.prod(shape, dtype=np.int64))
    out = values.new_zeros(numel)[offset:].view(shape)
    if junk and len(values):
        filler = values[torch.arange(call.num_rows, device=values.device) * 7 % len(values)]
        if values.is_floating_point():
            filler = torch.full_like(filler, float("nan")) if nan else -3 * filler
        out.copy_(filler)
    for s in call.segments:
        first = starts[s.sample] + s.start
        out[s.row : s.row + s.length] = values[first : first + s.length]
    return out


def starts_of(lengths: Sequence[int]) -> list[int]:
    """The logical row of each sample's position 0."""
    return [0, *np.cumsum(lengths, dtype=np.int64).tolist()]


def physical_inputs(problem: Problem, arrangement: Arrangement, call: Call) -> Tensors:
    """What an operator is given for each row of a call."""
    starts = starts_of(problem.lengths)
    return {
        name: place(
            value, call, starts, offset=arrangement.offset, junk=True, nan=arrangement.nan_padding
        )
        for name, value in problem.rows.items()
    }


def fingerprint(problem: Problem, arrangement: Arrangement) -> str:
    """A digest of every call's inputs, their shapes and places: equal where nothing differs."""
    digest = hashlib.sha256()
    for call in arrangement.calls:
        for value in physical_inputs(problem, arrangement, call).values():
            digest.update(repr((tuple(value.shape), value.storage_offset())).encode())
            flat = value.cpu().contiguous().flatten()
            digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@dataclass(slots=True, kw_only=True)
class Share:
    """What one rank's calls gave. rows: logical, NaN where other ranks have the row."""

    state: Any
    rows: Tensors


@dataclass(slots=True, kw_only=True)
class _Pending:
    """A call that was made and not yet differentiated. more: results that are only compared."""

    call: Call
    inputs: Tensors
    copies: Tensors
    result: Tensor
    seed: Tensor
    more: Tensors


def run_share(
    operator: Operator, problem: Problem, arrangement: Arrangement, rank: int = 0
) -> Share:
    """Make one rank's calls, forward and backward: chunks all forward first, then back.

    Raises OperatorError for results of another shape or dtype, inputs that were changed, and
    inputs or weights that no call gave a gradient to.
    """
    weights = {
        name: _moved(value, arrangement.offset).requires_grad_()
        for name, value in problem.weights.items()
    }
    state = operator.begin(problem.lengths, arrangement, weights, problem.seed.dtype)
    gather = _Gather(operator, problem)
    pending: list[_Pending] = []
    for call in (c for c in arrangement.calls if c.rank == rank):
        pending.append(_make_call(operator, problem, arrangement, call, state))
        if not arrangement.chunked:
            _differentiate(pending, gather)
    _differentiate(pending, gather)
    for name, value in weights.items():
        if not same_bits(value.detach(), problem.weights[name]):
            raise OperatorError(f"changed its weight {name!r}")
    return Share(state=state, rows=gather.finish())


def _make_call(
    operator: Operator, problem: Problem, arrangement: Arrangement, call: Call, state: Any
) -> _Pending:
    inputs = physical_inputs(problem, arrangement, call)
    copies = {name: value.clone() for name, value in inputs.items()}
    for value in inputs.values():
        value.requires_grad_(value.is_floating_point())
    with Poison():
        result = operator.forward(state, call, inputs)
    more: Tensors = {}
    if isinstance(result, tuple):
        result, more = result
    seed = problem.seed
    if operator.output is not None:
        starts = starts_of(problem.lengths)
        seed = place(problem.seed, call, starts, offset=arrangement.offset, junk=False)
        if result.dtype != problem.seed.dtype:
            raise OperatorError(f"y: got {result.dtype}, expected {problem.seed.dtype}")
    if result.shape != seed.shape:
        raise OperatorError(
            f"y: got shape {tuple(result.shape)}, expected {tuple(seed.shape)} (rows, *output)"
            if operator.output is not None
            else f"got shape {tuple(result.shape)}, expected a scalar loss; give output=(...) for "
            "an operator with a result for each row"
        )
    return _Pending(call=call, inputs=inputs, copies=copies, result=result, seed=seed, more=more)


class _Gather:
    """Logical rows, filled call by call."""

    def __init__(self, operator: Operator, problem: Problem) -> None:
        self.operator, self.problem = operator, problem
        self.starts = starts_of(problem.lengths)
        self.rows: Tensors = {}
        self.without: list[tuple[str, Call, Tensor]] = []
        self.calls = 0

    def take(self, p: _Pending) -> None:
        self.calls += 1
        validate_results(self.operator, p.more)
        found = {name: _as_a_number(value.detach()) for name, value in p.more.items()}
        if self.operator.output is not None:
            found["y"] = p.result.detach()
        for name, value in p.inputs.items():
            if not same_bits(value.detach(), p.copies[name]):
                raise OperatorError(f"changed its input {name!r}")
            if value.is_floating_point() and value.grad is None:
                self.without.append(("d" + name, p.call, torch.zeros_like(value)))
            elif value.grad is not None:
                found["d" + name] = value.grad
        for name, physical in found.items():
            self.put(name, p.call, physical)

    def put(self, name: str, call: Call, physical: Tensor) -> None:
        if name not in self.rows:
            shape = (sum(self.problem.lengths), *physical.shape[1:])
            self.rows[name] = physical.new_full(shape, _nobodys(physical.dtype))
        for s in call.segments:
            first = self.starts[s.sample] + s.start
            self.rows[name][first : first + s.length] = physical[s.row : s.row + s.length]

    def finish(self) -> Tensors:
        """A call may leave an input without a gradient (it is 0 then), but not every call that has
        rows."""
        for name, call, zeros in self.without:
            if name not in self.rows and any(s.length for s in call.segments):
                raise OperatorError(f"{name}: no call gave a gradient to this input")
            self.put(name, call, zeros)
        return self.rows


def _as_a_number(value: Tensor) -> Tensor:
    """A truth value as one of three, of which the third is nobody's."""
    return value.to(torch.int8) if value.dtype == torch.bool else value


def _nobodys(dtype: torch.dtype) -> float | int:
    """What stands in rows that no call of this rank has."""
    wide = dtype.is_floating_point or dtype.is_complex
    return float("nan") if wide else torch.iinfo(dtype).max


def _differentiate(pending: list[_Pending], gather: _Gather) -> None:
    """Differentiate the pending calls at once and gather their rows."""
    differentiable = [p for p in pending if p.result.requires_grad]
    if differentiable:
        with Poison():
            torch.autograd.backward(
                [p.result for p in differentiable],
                [p.seed.to(p.result.dtype) for p in differentiable],
            )
    for p in pending:
        gather.take(p)
    pending.clear()


def _moved(value: Tensor, offset: int) -> Tensor:
    out = value.new_zeros(offset + value.numel())[offset:].view(value.shape)
    out.copy_(value)
    return out


def run_arrangement(operator: Operator, problem: Problem, arrangement: Arrangement) -> Tensors:
    """All results of one configuration by name.

    Ranks are run one after another in this process; `ops_rank` runs them as ranks.
    """
    ranks = range(max(1, arrangement.num_ranks))
    shares = [run_share(operator, problem, arrangement, rank) for rank in ranks]
    found: Tensors = {}
    for share in shares:
        for name, values in share.rows.items():
            nobodys = _nobodys(values.dtype)
            there = ~values.isnan() if isinstance(nobodys, float) else values != nobodys
            found[name] = values if name not in found else torch.where(there, values, found[name])
    found |= operator.totals([share.state for share in shares])
    return {name: value.cpu() for name, value in found.items()}
