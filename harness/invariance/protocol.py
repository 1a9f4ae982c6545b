"""What an operator is to the invariance matrix, and whether an object is one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from sumgrad.invariance.arrangement import Arrangement, Call
from torch import Tensor

Tensors = dict[str, Tensor]
EXPECTATIONS = ("invariant", "planted", "control")


@dataclass(frozen=True, slots=True)
class Rows:
    """What an operator takes for each token. limit: integers below it, without a gradient."""

    shape: tuple[int, ...] = ()
    limit: int | None = None


class OperatorError(ValueError):
    """An operator that contradicts what it says about itself; the message names it."""


class Operator(Protocol):
    """Something to be checked. output: shape of its result for each token; None: a loss, a SUM.

    cut: where samples may be cut. rows_alone: a row needs no other row of its sample. chunks:
    whether it can be prefilled in chunks. expect: "invariant", "planted" (the cells of must_differ
    must be red), "control" (reported as it is).
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
    @property
    def must_differ(self) -> Sequence[tuple[str, str]]: ...

    def begin(
        self, lengths: Sequence[int], arrangement: Arrangement, weights: Tensors, dtype: torch.dtype
    ) -> Any:
        """State of one rank's calls: where weight gradients gather, caches."""

    def forward(self, state: Any, call: Call, rows: Tensors) -> Tensor | tuple[Tensor, Tensors]:
        """(num_rows, *output), or the loss; with it, maybe, other results for each row by name:
        their bits are compared, no gradient goes back through them."""

    def totals(self, states: Sequence[Any]) -> Tensors:
        """Gradients of the weights (and the loss) from the states of all ranks, unrounded."""

    def exchange(self, state: Any, group: Any) -> Tensors:
        """The same, on real ranks: every rank gets them."""

    def oracle(self, rows: Tensors, weights: Tensors, seed: Tensor, lengths: Sequence[int]) -> Any:
        """float64 results by name ("y", "dx", "dweight", "loss"), or None if there is no oracle."""


@dataclass(frozen=True, kw_only=True)
class OperatorFields:
    """What every operator says of itself; see Operator.

    parts: how many blocks it is made of, each of which rounds what it gives to the dtype; in 16
    bits its errors may be larger by the root of that.
    reference: float64 results by name, or None; what it is given is up to the kind of operator.
    """

    name: str
    rows: Mapping[str, Rows]
    weights: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    output: tuple[int, ...] | None = None
    cut: int = 16
    rows_alone: bool = True
    chunks: bool = False
    expect: str = "invariant"
    must_differ: Sequence[tuple[str, str]] = ()
    parts: int = 1
    reference: Callable[..., Any] | None = None


def validate(operator: Any) -> None:
    """Raise OperatorError where an object cannot be an Operator."""
    what = f"operator {getattr(operator, 'name', operator)!r}"
    lacking = [
        name
        for name in ("name", "rows", "weights", "output", "begin", "forward", "totals", "exchange")
        if not hasattr(operator, name)
    ]
    if lacking:
        raise OperatorError(
            f"{what}: lacks {', '.join(lacking)}; wrap a function with sumgrad.invariance.plain"
        )
    if operator.expect not in EXPECTATIONS:
        raise OperatorError(f"{what}: expect: got {operator.expect!r}, not one of {EXPECTATIONS}")
    parts = getattr(operator, "parts", 1)
    if not isinstance(parts, int) or parts < 1:
        raise OperatorError(f"{what}: parts: got {parts!r}, expected an integer >= 1")
    if not operator.rows:
        raise OperatorError(f"{what}: rows: is empty; an operator takes something for each token")
    for name, spec in operator.rows.items():
        if not isinstance(spec, Rows) or not isinstance(spec.shape, tuple):
            raise OperatorError(f"{what}: rows[{name!r}]: got {spec!r}, expected Rows((...))")
    names = _own_names(operator)
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise OperatorError(f"{what}: rows, weights and results share the name {twice.pop()!r}")


def validate_results(operator: Operator, names: Iterable[str]) -> None:
    """Raise OperatorError where other results for each row have names that are taken."""
    # A loss has no row for each token: what it is made of may be called so.
    taken = {*_own_names(operator)} - ({"y"} if operator.output is None else set())
    twice = sorted({*names} & taken)
    if twice:
        raise OperatorError(f"another result has the name {twice[0]!r}, which is taken; rename it")


def _own_names(operator: Operator) -> list[str]:
    return [*("d" + name for name in (*operator.rows, *operator.weights)), "y", "loss"]


def has_a_row_for_each_token(operator: Operator, name: str) -> bool:
    """Whether a result has: all but what is summed over tokens."""
    return name != "loss" and name not in {"d" + weight for weight in operator.weights}
