"""Does an operator give the same bits whatever else is in the batch? Forward and every gradient.

    assert_invariant(plain("my_norm", my_norm, rows={"x": Rows((64,))}, weights={"weight": (64,)}))

An Operator says what it takes for each token and what it shares; the harness draws samples, lays
them out in every Arrangement, differentiates, and gathers results by (sample, position). They are
judged on raw bits: a NaN is red, -0 differs from +0. Deterministic is not enough: see `repeat`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from sumgrad.arrangement import Arrangement, Call, arrangements, base
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

LENGTHS = (37, 16, 1, 50, 0, 23, 31)
BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16}
Tensors = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Rows:
    """What an operator takes for each token. limit: integers below it, without a gradient."""

    shape: tuple[int, ...] = ()
    limit: int | None = None


class Operator(Protocol):
    """Something to be checked. output: shape of its result for each token; None: a loss, a SUM.

    cut: where samples may be cut. rows_alone: a row needs no other row of its sample. chunks:
    whether it can be prefilled in chunks. expect: "invariant", "planted" (must be caught),
    "control" (reported as it is).
    """

    @property
    def name(self) -> str: ...
    @property
    def rows(self) -> Mapping[str, Rows]: ...
    @property
    def weights(self) -> Mapping[str, tuple[int, ...]]: ...
    @property
    def output(self) -> tuple[int, ...] | None: ...
    @property
    def cut(self) -> int: ...
    @property
    def rows_alone(self) -> bool: ...
    @property
    def chunks(self) -> bool: ...
    @property
    def expect(self) -> str: ...

    def begin(self, lengths: Sequence[int], arrangement: Arrangement, weights: Tensors) -> Any:
        """State of one rank's calls: where weight gradients gather, caches."""

    def forward(self, state: Any, call: Call, rows: Tensors) -> Tensor | tuple[Tensor, Tensors]:
        """(num_rows, *output), or the loss; with it, maybe, other results for each row by name."""

    def totals(self, states: Sequence[Any]) -> Tensors:
        """Gradients of the weights (and the loss) from the states of all ranks, unrounded."""

    def exchange(self, state: Any, group: Any) -> Tensors:
        """The same, on real ranks: every rank gets them."""

    def oracle(self, rows: Tensors, weights: Tensors, seed: Tensor, lengths: Sequence[int]) -> Any:
        """float64 results by name ("y", "dx", "dweight", "loss"), or None if there is no oracle."""


class IdenticalConfigurations(AssertionError):
    """A configuration that does not differ from the base proves nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What is computed, without any layout. rows: (tokens, *shape), sample after sample."""

    lengths: tuple[int, ...]
    rows: Tensors
    weights: Tensors
    seed: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One tensor under two configurations. index: of the first differing element."""

    operator: str
    tensor: str
    prop: str
    first: str
    second: str
    index: tuple[int, ...] = ()
    num_differing: int = 0
    numel: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    what: str = "differs"

    def __str__(self) -> str:
        if self.what not in ("differs", "nan"):
            return f"{self.operator}: {self.what} [{self.second}]"
        how = "is NaN" if self.what == "nan" else "differs"
        return (
            f"{self.operator}: {self.tensor} {how} in {self.num_differing} of {self.numel} "
            f"elements, first at {list(self.index)}, max abs {self.max_abs:.3g}, "
            f"max rel {self.max_rel:.3g} [{self.second}] against [{self.first}]"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One operator's cells: (tensor, property) -> the first difference, or None where none is.

    errors: each tensor's largest error against the oracle, in units of what rounding the inputs
    once would cause (about 1 to 16 is right); empty without an oracle.
    """

    operator: str
    expect: str
    cells: dict[tuple[str, str], Difference | None] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)

    @property
    def red(self) -> list[Difference]:
        return [d for d in self.cells.values() if d is not None]

    @property
    def invariant(self) -> bool:
        return bool(self.cells) and not self.red


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
    lengths: Sequence[int] = LENGTHS,
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
            ids = generator.integers(0, spec.limit, shape)
            rows[name] = torch.from_numpy(ids).to(device)
    weights = {
        name: values(shape) / shape[-1] ** (0.5 * (len(shape) > 1))
        for name, shape in operator.weights.items()
    }
    shape = () if operator.output is None else (num_tokens, *operator.output)
    return Problem(lengths=tuple(lengths), rows=rows, weights=weights, seed=values(shape))


def place(values: Tensor, call: Call, starts: Sequence[int], *, offset: int, junk: bool) -> Tensor:
    """Logical rows -> the physical rows of a call, in storage moved by `offset` elements.

    junk: padding is filled with other numbers (ids stay valid); else with 0.
    """
    shape = (call.num_rows, *values.shape[1:])
    numel = offset + int(np.prod(shape, dtype=np.int64))
    out = values.new_zeros(numel)[offset:].view(shape)
    if junk and len(values):
        filler = values[torch.arange(call.num_rows, device=values.device) * 7 % len(values)]
        out.copy_(-3 * filler if values.is_floating_point() else filler)
    for s in call.segments:
        first = starts[s.sample] + s.start
        out[s.row : s.row + s.length] = values[first : first + s.length]
    return out


def _gather(out: Tensor, physical: Tensor, call: Call, starts: Sequence[int]) -> None:
    for s in call.segments:
        first = starts[s.sample] + s.start
        out[first : first + s.length] = physical[s.row : s.row + s.length]


def starts_of(lengths: Sequence[int]) -> list[int]:
    """The logical row of each sample's position 0."""
    return [0, *np.cumsum(lengths).tolist()]


@dataclass(slots=True, kw_only=True)
class Share:
    """What one rank's calls gave. rows: logical, NaN where other ranks have the row."""

    state: Any
    rows: Tensors


def physical_inputs(problem: Problem, arrangement: Arrangement, call: Call) -> Tensors:
    """What an operator is given for each row of a call."""
    starts = starts_of(problem.lengths)
    return {
        name: place(value, call, starts, offset=arrangement.offset, junk=True)
        for name, value in problem.rows.items()
    }


def fingerprint(problem: Problem, arrangement: Arrangement) -> str:
    """A digest of every call's inputs, their shapes and places: equal where nothing differs."""
    digest = hashlib.sha256(repr((arrangement.chunked, arrangement.num_ranks)).encode())
    for call in arrangement.calls:
        for value in physical_inputs(problem, arrangement, call).values():
            digest.update(repr((tuple(value.shape), value.storage_offset())).encode())
            flat = value.cpu().contiguous().flatten()
            digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def run_share(
    operator: Operator, problem: Problem, arrangement: Arrangement, rank: int = 0
) -> Share:
    """Make one rank's calls, forward and backward: chunks all forward first, then back."""
    starts = starts_of(problem.lengths)
    weights = {
        name: _moved(value, arrangement.offset).requires_grad_()
        for name, value in problem.weights.items()
    }
    state = operator.begin(problem.lengths, arrangement, weights)
    gathered: Tensors = {}
    pending: list[_Pending] = []
    for call in (c for c in arrangement.calls if c.rank == rank):
        inputs = physical_inputs(problem, arrangement, call)
        for value in inputs.values():
            value.requires_grad_(value.is_floating_point())
        with Poison():
            result = operator.forward(state, call, inputs)
        if operator.output is None:
            seed = problem.seed
        else:
            seed = place(problem.seed, call, starts, offset=arrangement.offset, junk=False)
        more: Tensors = {}
        if isinstance(result, tuple):
            result, more = result
        pending.append(_Pending(call=call, inputs=inputs, result=result, seed=seed, more=more))
        if not arrangement.chunked:
            _backward(pending, gathered, problem, operator)
    _backward(pending, gathered, problem, operator)
    return Share(state=state, rows=gathered)


def _moved(value: Tensor, offset: int) -> Tensor:
    out = value.new_zeros(offset + value.numel())[offset:].view(value.shape)
    out.copy_(value)
    return out


@dataclass(slots=True, kw_only=True)
class _Pending:
    """A call that was made and not yet differentiated. more: results that are only compared."""

    call: Call
    inputs: Tensors
    result: Tensor
    seed: Tensor
    more: Tensors


def _backward(
    pending: list[_Pending],
    gathered: Tensors,
    problem: Problem,
    operator: Operator,
) -> None:
    """Differentiate the pending calls at once and gather their rows."""
    if not pending:
        return
    starts = starts_of(problem.lengths)
    with Poison():
        torch.autograd.backward(
            [p.result for p in pending], [p.seed.to(p.result.dtype) for p in pending]
        )
    for p in pending:
        found = {name: value.detach() for name, value in p.more.items()}
        if operator.output is not None:
            found["y"] = p.result.detach()
        for name, value in p.inputs.items():
            if value.is_floating_point():
                grad = value.grad
                found["d" + name] = torch.zeros_like(value) if grad is None else grad
        for name, physical in found.items():
            if name not in gathered:
                shape = (sum(problem.lengths), *physical.shape[1:])
                gathered[name] = physical.new_full(shape, float("nan"))
            _gather(gathered[name], physical, p.call, starts)
    pending.clear()


def run_arrangement(operator: Operator, problem: Problem, arrangement: Arrangement) -> Tensors:
    """All results of one configuration by name.

    Ranks are run one after another in this process; `ops_rank` runs them as ranks.
    """
    ranks = range(max(1, arrangement.num_ranks))
    shares = [run_share(operator, problem, arrangement, rank) for rank in ranks]
    found: Tensors = {}
    for share in shares:
        for name, values in share.rows.items():
            there = ~values.isnan()
            found[name] = values if name not in found else torch.where(there, values, found[name])
    found |= operator.totals([share.state for share in shares])
    return {name: value.cpu() for name, value in found.items()}


def compare(
    operator: str, prop: str, first: tuple[str, Tensors], second: tuple[str, Tensors]
) -> dict[str, Difference | None]:
    """Every tensor of two configurations, (name, results) each, bit by bit."""
    out: dict[str, Difference | None] = {}
    for tensor, a in first[1].items():
        b = second[1].get(tensor)
        out[tensor] = None
        what: dict[str, Any] = {
            "operator": operator,
            "tensor": tensor,
            "prop": prop,
            "first": first[0],
            "second": second[0],
        }
        if b is None or a.shape != b.shape or a.dtype != b.dtype:
            got = "nothing" if b is None else f"{tuple(b.shape)} {b.dtype}"
            out[tensor] = Difference(**what, what=f"{tensor}: {got}, not {tuple(a.shape)}")
            continue
        wrong = a.isnan() | b.isnan()
        kind = "nan" if bool(wrong.any()) else "differs"
        if kind == "differs":
            integer = BITS[a.element_size()]
            wrong = a.contiguous().view(integer) != b.contiguous().view(integer)
        if bool(wrong.any()):
            gap = (a.double() - b.double()).abs().nan_to_num()
            scale = a.double().abs().nan_to_num().max().item() or 1.0
            out[tensor] = Difference(
                **what,
                what=kind,
                index=tuple(wrong.nonzero()[0].tolist()) if wrong.dim() else (),
                num_differing=int(wrong.sum()),
                numel=wrong.numel(),
                max_abs=gap.max().item(),
                max_rel=gap.max().item() / scale,
            )
    return out


def check_operator(
    operator: Operator,
    *,
    dtype: torch.dtype = torch.float32,
    lengths: Sequence[int] = LENGTHS,
    seed: int = 0,
    num_ranks: Sequence[int] = (1, 2, 3, 5),
    properties: Iterable[str] | None = None,
    reference: Tensors | None = None,
    device: str = "cpu",
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """Run every configuration and compare it with the base.

    num_ranks: sizes of the data-parallel group to try in this process. reference: the base's
    results, where they are known; then the oracle is not asked. Raises IdenticalConfigurations
    where a configuration's inputs are those of the base.
    """
    problem = draw_problem(operator, lengths=lengths, seed=seed, dtype=dtype, device=device)
    report = Report(operator=operator.name, expect=operator.expect)
    if reference is None:
        reference = run_arrangement(operator, problem, base(lengths))
        report.errors.update(errors_against_oracle(operator, problem, reference))
    mark = fingerprint(problem, base(lengths))
    wanted = None if properties is None else set(properties)
    for arrangement in arrangements(
        lengths, cut=operator.cut, rows_alone=operator.rows_alone, num_ranks=num_ranks
    ):
        if wanted is not None and arrangement.prop not in wanted:
            continue
        if arrangement.chunked and not operator.chunks:
            continue
        if arrangement.differs and fingerprint(problem, arrangement) == mark:
            raise IdenticalConfigurations(
                f"{operator.name}: [{arrangement.name}] gives the operator the very inputs of "
                f"[{base(lengths).name}]; choose lengths that differ (got {list(lengths)})"
            )
        progress(f"{operator.name}: {arrangement.name}")
        try:
            found = run_arrangement(operator, problem, arrangement)
        except Exception as error:  # whatever an operator under test may raise is its result
            cells = raised(operator.name, arrangement, reference, error)
        else:
            cells = compare(
                operator.name,
                arrangement.prop,
                (base(lengths).name, reference),
                (arrangement.name, found),
            )
        add_cells(report, arrangement.prop, cells)
    return report


def raised(
    operator: str, arrangement: Arrangement, reference: Tensors, error: Exception
) -> dict[str, Difference | None]:
    """An operator that raises is red in every tensor."""
    difference = Difference(
        operator=operator,
        tensor="",
        prop=arrangement.prop,
        first="",
        second=arrangement.name,
        what=f"raised {type(error).__name__}: {error}",
    )
    return dict.fromkeys(reference, difference)


def add_cells(report: Report, prop: str, cells: Mapping[str, Difference | None]) -> None:
    """Keep each cell's first difference."""
    for tensor, difference in cells.items():
        if report.cells.get((tensor, prop)) is None:
            report.cells[tensor, prop] = difference


def errors_against_oracle(operator: Operator, problem: Problem, found: Tensors) -> dict[str, float]:
    """Largest error of each tensor over what one rounding of the inputs would change.

    That change is measured: the oracle runs again on inputs moved by one eps at random, eight
    times; never under one eps of the largest value. So an ill-conditioned sum is not blamed.
    """

    def evaluate(generator: torch.Generator | None) -> dict[str, Tensor] | None:
        def moved(value: Tensor) -> Tensor:
            if not value.is_floating_point():
                return value.cpu()
            wide = value.double().cpu()
            if generator is None:
                return wide
            sign = torch.randint(0, 2, wide.shape, generator=generator) * 2 - 1
            return wide * (1 + sign * torch.finfo(value.dtype).eps / 2)

        result = operator.oracle(
            {name: moved(v) for name, v in problem.rows.items()},
            {name: moved(v) for name, v in problem.weights.items()},
            moved(problem.seed),
            problem.lengths,
        )
        return result and {name: torch.as_tensor(v) for name, v in result.items()}

    exact = evaluate(None)
    if exact is None:
        return {}
    unit = {name: torch.finfo(problem.seed.dtype).eps * _largest(v) for name, v in exact.items()}
    for k in range(8):
        other = evaluate(torch.Generator().manual_seed(k))
        assert other is not None
        unit = {name: max(unit[name], _largest(other[name] - exact[name])) for name in exact}
    return {
        name: _largest(found[name].double() - exact[name]) / (unit[name] or 1.0)
        for name in exact
        if name in found
    }


def _largest(values: Tensor) -> float:
    if values.isnan().any():
        return float("inf")
    return values.abs().max().item() if values.numel() else 0.0


@dataclass(frozen=True, kw_only=True)
class PlainOperator:
    """An operator under torch's own autograd: micro-batches meet in `.grad`, ranks in all-reduce.

    function(rows, weights, call) -> (num_rows, *output), or the SUM of a loss when output is None.
    """

    name: str
    function: Callable[[Tensors, Tensors, Call], Tensor]
    rows: Mapping[str, Rows]
    weights: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    output: tuple[int, ...] | None = None
    cut: int = 16
    rows_alone: bool = True
    chunks: bool = False
    expect: str = "invariant"
    reference: Callable[..., Any] | None = None

    def begin(self, lengths: Sequence[int], arrangement: Arrangement, weights: Tensors) -> Any:
        return {"weights": weights, "loss": []}

    def forward(self, state: Any, call: Call, rows: Tensors) -> Tensor:
        out = self.function(rows, state["weights"], call)
        if self.output is None:
            state["loss"].append(out.detach())
        return out

    def totals(self, states: Sequence[Any]) -> Tensors:
        parts = [self._own(state) for state in states]
        total = dict(parts[0])
        for part in parts[1:]:
            total = {name: total[name] + part[name] for name in total}
        return total

    def _own(self, state: Any) -> Tensors:
        out = {
            "d" + name: torch.zeros_like(w) if w.grad is None else w.grad
            for name, w in state["weights"].items()
        }
        if self.output is None:
            first = torch.zeros(()) if not state["loss"] else torch.zeros_like(state["loss"][0])
            out["loss"] = sum(state["loss"], first)
        return out

    def exchange(self, state: Any, group: Any) -> Tensors:
        from sumgrad.convention import sum_over_ranks

        own = self._own(state)  # gloo reduces on the CPU
        return {name: sum_over_ranks(value.cpu(), group) for name, value in own.items()}

    def oracle(self, rows: Tensors, weights: Tensors, seed: Tensor, lengths: Sequence[int]) -> Any:
        return self.reference and self.reference(rows, weights, seed, lengths)


def plain(name: str, function: Callable[..., Tensor], **fields: Any) -> PlainOperator:
    """A user's operator: function(rows, weights, call), under torch's autograd."""
    return PlainOperator(name=name, function=function, **fields)


def assert_invariant(operator: Operator, **options: Any) -> Report:
    """Raise AssertionError with every cell that is red; options as for check_operator."""
    report = check_operator(operator, **options)
    if not report.invariant:
        lines = [str(difference) for difference in report.red]
        raise AssertionError("\n".join([f"{operator.name} is not invariant:", *lines]))
    return report
