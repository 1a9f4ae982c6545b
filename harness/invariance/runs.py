"""Does an operator give the same bits whatever else is in the batch? Forward and every gradient of
its result.

    from sumgrad.invariance import Rows, assert_invariant, plain

    def double(rows, weights, call):
        return 2 * rows["x"]

    assert_invariant(plain("double", double, rows={"x": Rows((64,))}, output=(64,)))

The operator runs in every Arrangement, and its results, gathered by (sample, position), are judged
on raw bits: a NaN is red, -0 differs from +0. Deterministic is not enough: see `repeat`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from sumgrad.invariance.arrangement import PROPERTIES, Arrangement, Call, arrangements, base
from sumgrad.invariance.bits import (
    Report,
    add_cells,
    compare,
    error_limit,
    errors_against_oracle,
    raised,
)
from sumgrad.invariance.operator_run import Tensors, draw_problem, fingerprint, run_arrangement
from sumgrad.invariance.protocol import Operator, OperatorError, OperatorFields, validate
from torch import Tensor

LENGTHS = (37, 16, 1, 50, 0, 23, 31)
USER_ERRORS = (Exception, SystemExit)  # whatever an operator under test raises is its result


class IdenticalConfigurations(AssertionError):
    """A configuration that does not differ from the base proves nothing."""


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
    results, where they are known; then the oracle is not asked. Raises OperatorError for an
    impossible operator, ValueError for lengths or properties that are not, and
    IdenticalConfigurations where a configuration's inputs are those of the base.
    """
    validate(operator)
    wanted = set(PROPERTIES if properties is None else properties)
    if not wanted <= set(PROPERTIES):
        raise ValueError(
            f"properties: {sorted(wanted - set(PROPERTIES))} are not in {[*PROPERTIES]}"
        )
    if sum(lengths) == 0:
        raise ValueError(f"lengths: got {list(lengths)}, expected at least one token")
    problem = draw_problem(operator, lengths=lengths, seed=seed, dtype=dtype, device=device)
    report = Report(
        operator=operator.name,
        expect=operator.expect,
        must_differ=operator.must_differ,
        error_limit=error_limit(dtype, getattr(operator, "parts", 1)),
    )
    if reference is None:
        reference = run_arrangement(operator, problem, base(lengths))
        report.errors.update(errors_against_oracle(operator, problem, reference))
    mark = fingerprint(problem, base(lengths))
    for order, arrangement in enumerate(
        arrangements(lengths, cut=operator.cut, rows_alone=operator.rows_alone, num_ranks=num_ranks)
    ):
        if arrangement.prop not in wanted or (arrangement.chunked and not operator.chunks):
            continue
        _must_differ(operator, arrangement, lengths, fingerprint(problem, arrangement) == mark)
        progress(f"{operator.name}: {arrangement.name}")
        try:
            found = run_arrangement(operator, problem, arrangement)
        except USER_ERRORS as error:
            cells = raised(operator.name, arrangement, list(reference), error, order)
        else:
            names = (base(lengths).name, reference), (arrangement.name, found)
            cells = compare(operator.name, arrangement, *names, order=order)
        add_cells(report, arrangement.prop, cells)
    return report


def _must_differ(
    operator: Operator, arrangement: Arrangement, lengths: Sequence[int], same: bool
) -> None:
    if arrangement.chunked and len(arrangement.calls) == 1:
        same = True
    if same and arrangement.differs:
        raise IdenticalConfigurations(
            f"{operator.name}: [{arrangement.name}] gives the operator the very inputs of "
            f"[{base(lengths).name}]; choose lengths that differ (got {list(lengths)})"
        )


@dataclass(frozen=True, kw_only=True)
class PlainOperator(OperatorFields):
    """An operator under torch's own autograd: micro-batches meet in `.grad`, ranks in all-reduce.

    function(rows, weights, call) -> (num_rows, *output), or the SUM of a loss when output is None.
    reference(rows, weights, seed, lengths): float64 results by name; seed is what the result's
    gradient is.
    """

    function: Callable[[Tensors, Tensors, Call], Tensor]

    def begin(
        self, lengths: Sequence[int], arrangement: Arrangement, weights: Tensors, dtype: torch.dtype
    ) -> Any:
        return {"weights": weights, "loss": [], "calls": 0, "dtype": dtype}

    def forward(self, state: Any, call: Call, rows: Tensors) -> Tensor:
        state["calls"] += 1
        out = self.function(rows, state["weights"], call)
        if self.output is None:
            loss = out[0] if isinstance(out, tuple) else out
            state["loss"].append(loss.detach())
        return out

    def totals(self, states: Sequence[Any]) -> Tensors:
        parts = [self._own(state) for state in states]
        total = dict(parts[0])
        for part in parts[1:]:
            total = {name: total[name] + part[name] for name in total}
        for name in self.weights:
            if all(state["weights"][name].grad is None for state in states):
                raise OperatorError(f"d{name}: no call gave a gradient to this weight")
        return total

    def _own(self, state: Any) -> Tensors:
        out = {
            "d" + name: torch.zeros_like(w) if w.grad is None else w.grad
            for name, w in state["weights"].items()
        }
        if self.output is None:
            losses = state["loss"]
            first = torch.zeros_like(losses[0]) if losses else torch.zeros((), dtype=state["dtype"])
            out["loss"] = sum(losses, first)
        return out

    def exchange(self, state: Any, group: Any) -> Tensors:
        from sumgrad.convention import sum_over_ranks

        own = self._own(state)  # gloo reduces on the CPU
        return {name: sum_over_ranks(value.cpu(), group) for name, value in own.items()}

    def oracle(self, rows: Tensors, weights: Tensors, seed: Tensor, lengths: Sequence[int]) -> Any:
        return self.reference and self.reference(rows, weights, seed, lengths)


def plain(name: str, function: Callable[..., Tensor], **fields: Any) -> PlainOperator:
    """A user's operator: function(rows, weights, call), under torch's autograd.

    fields: rows={"x": Rows((64,))}; weights={"w": (64,)}; output=(64,), or None for a loss (the
    default); reference=..., see PlainOperator.
    """
    return PlainOperator(name=name, function=function, **fields)


def assert_invariant(operator: Operator, **options: Any) -> Report:
    """Raise AssertionError for a red cell or a poor accuracy; options: check_operator's."""
    report = check_operator(operator, **options)
    wrong = _judged(report).wrong
    if wrong:
        raise AssertionError("\n".join([f"{operator.name} is not invariant:", *wrong]))
    return report


def _judged(report: Report) -> Report:
    """The report as that of an operator that must be invariant, whatever it says of itself."""
    return replace(report, expect="invariant")
