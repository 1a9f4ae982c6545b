"""Compares results bit by bit, and with an oracle: differences, cells, one operator's report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from sumgrad.invariance.arrangement import Arrangement
from sumgrad.invariance.operator_run import Problem, Tensors
from sumgrad.invariance.protocol import Operator, OperatorError
from torch import Tensor

BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
ERROR_LIMIT = 16.0
"""In units of one rounding of the inputs; the shipped operators measure at most 10."""
ERROR_LIMIT_16_BIT = 2.0
"""The same where results are float32 inside and rounded once; measured: at most 0.6."""
PERTURBATIONS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One tensor under two configurations. index: of the first differing element.

    what: "differs", "nan", or the message of an error. order: place of the second configuration.
    """

    operator: str
    tensor: str
    prop: str
    first: str
    second: str
    index: tuple[int, ...] = ()
    num_differing: int = 0
    numel: int = 0
    max_abs: float | None = None
    max_rel: float | None = None
    what: str = "differs"
    order: int = 0

    @property
    def kind(self) -> str:
        """differs, nan or error."""
        return self.what if self.what in ("differs", "nan") else "error"

    def __str__(self) -> str:
        if self.kind == "error":
            return f"{self.operator}: {self.what} [{self.second}]"
        where = f"{self.num_differing} of {self.numel} elements, first at {list(self.index)}"
        if self.kind == "nan":
            return f"{self.operator}: {self.tensor} is NaN in {where} [{self.second}]"
        return (
            f"{self.operator}: {self.tensor} differs in {where}, max abs {self.max_abs:.3g}, "
            f"max rel {self.max_rel:.3g} [{self.second}] against [{self.first}]"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One operator's cells: (tensor, property) -> the first difference, or None where none is.

    errors: each tensor's largest error against the oracle, in units of what rounding the inputs
    once would cause; empty without an oracle. expected: the cells that there must be.
    must_differ: cells of a planted operator that must be red. error_limit: of its errors.
    """

    operator: str
    expect: str
    cells: dict[tuple[str, str], Difference | None] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    expected: set[tuple[str, str]] = field(default_factory=set)
    must_differ: Sequence[tuple[str, str]] = ()
    error_limit: float = ERROR_LIMIT

    @property
    def red(self) -> list[Difference]:
        return [d for d in self.cells.values() if d is not None]

    @property
    def invariant(self) -> bool:
        return bool(self.cells) and not self.red

    @property
    def wrong(self) -> list[str]:
        """What must not be: a red cell, a poor accuracy, a cell that is missing, a plant missed."""
        out = [
            f"{self.operator}: {tensor}, {prop}: was not compared"
            for tensor, prop in sorted(self.expected - set(self.cells))
        ]
        if not self.cells:
            out.append(f"{self.operator}: nothing was compared")
        if self.expect == "invariant":
            out += self._red_lines() + self._poor()
        if self.expect == "planted":
            required = (
                list(self.must_differ) or [(d.tensor, d.prop) for d in self.red] or [("", "")]
            )
            missed = [
                cell
                for cell in required
                if (found := self.cells.get(cell)) is None or found.kind == "error"
            ]
            out += [f"{self.operator}: planted, not caught in {t} {p}".rstrip() for t, p in missed]
        return out

    def _red_lines(self) -> list[str]:
        """One line for each tensor (or message): the first cell, and how many more."""
        groups: dict[str, list[Difference]] = {}
        for difference in self.red:
            key = difference.what if difference.kind == "error" else difference.tensor
            groups.setdefault(key, []).append(difference)
        lines = []
        for group in groups.values():
            others = sorted({d.prop for d in group} - {group[0].prop})
            more = f"; also in: {', '.join(others)}" if others else ""
            lines.append(f"{group[0]}{more}")
        return lines

    def _poor(self) -> list[str]:
        return [
            f"{self.operator}: {tensor} is {error:.3g} roundings of its inputs off the oracle, "
            f"more than {self.error_limit:g}"
            for tensor, error in self.errors.items()
            if not error <= self.error_limit
        ]


def error_limit(dtype: torch.dtype, parts: int = 1) -> float:
    """How many roundings of its inputs a result may be off.

    parts: blocks one after another. In 16 bits each of them rounds what is float32 inside, up or
    down, so their errors grow with the root of their number (the chain's four: at most 3.3).
    """
    return ERROR_LIMIT_16_BIT * parts**0.5 if torch.finfo(dtype).bits == 16 else ERROR_LIMIT


def compare(
    operator: str,
    arrangement: Arrangement,
    first: tuple[str, Tensors],
    second: tuple[str, Tensors],
    *,
    order: int = 0,
) -> dict[str, Difference | None]:
    """Every tensor of two configurations, (name, results) each, bit by bit."""
    out: dict[str, Difference | None] = {}
    for tensor in dict.fromkeys([*first[1], *second[1]]):
        what: dict[str, Any] = {
            "operator": operator,
            "tensor": tensor,
            "prop": arrangement.prop,
            "first": first[0],
            "second": second[0],
            "order": order,
        }
        out[tensor] = _difference(what, first[1].get(tensor), second[1].get(tensor))
    return out


def _difference(what: dict[str, Any], a: Tensor | None, b: Tensor | None) -> Difference | None:
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        got, wanted = ("nothing" if t is None else f"{tuple(t.shape)} {t.dtype}" for t in (b, a))
        return Difference(**what, what=f"{what['tensor']}: got {got}, the base gave {wanted}")
    if not a.numel():
        return Difference(**what, what=f"{what['tensor']}: it has no element to be compared")
    if not bool((a.isfinite() | a.isnan()).any()):  # of which all bits are equal
        return Difference(**what, what=f"{what['tensor']}: every element is infinite")
    wrong = a.isnan() | b.isnan()
    if bool(wrong.any()):
        return Difference(**what, what="nan", **_where(wrong))
    wrong = a.contiguous().view(BITS[a.element_size()]) != b.contiguous().view(
        BITS[b.element_size()]
    )
    if not bool(wrong.any()):
        return None
    largest = (a.double() - b.double()).abs().nan_to_num().max().item()
    scale = a.double().abs().nan_to_num().max().item() or 1.0
    return Difference(**what, max_abs=largest, max_rel=largest / scale, **_where(wrong))


def _where(wrong: Tensor) -> dict[str, Any]:
    return {
        "index": tuple(wrong.nonzero()[0].tolist()) if wrong.dim() else (),
        "num_differing": int(wrong.sum()),
        "numel": wrong.numel(),
    }


def raised(
    operator: str, arrangement: Arrangement, tensors: Sequence[str], error: object, order: int = 0
) -> dict[str, Difference | None]:
    """An operator that raises is red in every tensor."""
    text = str(error) if isinstance(error, (str, OperatorError)) else describe(error)
    difference = Difference(
        operator=operator,
        tensor="",
        prop=arrangement.prop,
        first="",
        second=arrangement.name,
        what=text,
        order=order,
    )
    return dict.fromkeys(tensors, difference)


def describe(error: object) -> str:
    """An exception in one line."""
    text = str(error).strip().splitlines()
    return f"raised {type(error).__name__}: {text[0] if text else ''}"


def add_cells(report: Report, prop: str, cells: Mapping[str, Difference | None]) -> None:
    """Keep each cell's difference of the first configuration."""
    for tensor, new in cells.items():
        old = report.cells.get((tensor, prop))
        if old is None or (new is not None and new.order < old.order):
            report.cells[tensor, prop] = new


def errors_against_oracle(operator: Operator, problem: Problem, found: Tensors) -> dict[str, float]:
    """Each tensor's error over what one rounding of the inputs would change, in two norms.

    That change is measured: the oracle runs again on inputs moved by half an eps at random, eight
    times; it is never under one eps of the result. So an ill-conditioned sum is not blamed.
    In the maximum norm one element counts, in L2 many small ones do. Raises OperatorError for an
    oracle that does not give what the operator gives.
    """
    exact = _oracle(operator, problem, None)
    if exact is None:
        return {}
    if set(exact) != set(found) or any(exact[n].shape != found[n].shape for n in exact):
        raise OperatorError(
            f"its oracle gives {_shapes(exact)}, the operator gives {_shapes(found)}"
        )
    eps = torch.finfo(problem.seed.dtype).eps
    unit = {name: [eps * size for size in _norms(value)] for name, value in exact.items()}
    for k in range(PERTURBATIONS):
        other = _oracle(operator, problem, torch.Generator().manual_seed(k))
        assert other is not None
        for name in exact:
            moved = _norms(other[name] - exact[name])
            unit[name] = [max(u, m) for u, m in zip(unit[name], moved, strict=True)]
    return {
        name: max(
            float("inf") if not u < float("inf") else error / u if u else error
            for error, u in zip(_norms(found[name].double() - exact[name]), unit[name], strict=True)
        )
        for name in exact
    }


def _oracle(
    operator: Operator, problem: Problem, generator: torch.Generator | None
) -> Tensors | None:
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


def _shapes(tensors: Tensors) -> str:
    return ", ".join(f"{name} {tuple(value.shape)}" for name, value in sorted(tensors.items()))


def _norms(values: Tensor) -> tuple[float, float]:
    """Maximum and L2; infinite where anything is not finite."""
    if not bool(torch.isfinite(values).all()):
        return float("inf"), float("inf")
    if not values.numel():
        return 0.0, 0.0
    return values.abs().max().item(), values.double().square().sum().sqrt().item()
