"""Backwards that a line calls beside those of the loss, and that leave what they give in `.grad`.

As an attack on inputs, a penalty that is only measured, a probe of a gradient's norm: one line
calls the backward that is meant, another one's is added to it. Ranks may run each as often as they
like.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from sumgrad.base.outcome import some_of
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.of_factors.by_rank import LEFT_IN
from sumgrad.diagnose.explainers.of_factors.factors import explained
from sumgrad.diagnose.explanation import Explanation, Left
from sumgrad.diagnose.own_gradients import (
    ALIKE,
    EPS,
    ROUNDINGS,
    Columns,
    are_of_rows,
    columns_of,
    given_by_ranks,
)
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weights:
    """By line, how often what its backwards gave on all ranks is in a gradient, and belongs."""

    got: Mapping[str, float]
    wanted: Mapping[str, float]

    @property
    def left(self) -> frozenset[str]:
        """Lines of which nothing belongs in it."""
        most = max(abs(w) for w in self.wanted.values())
        return frozenset(line for line, w in self.wanted.items()
                         if abs(w) <= ALIKE * most < abs(self.got[line]))  # fmt: skip

    @property
    def is_so(self) -> bool:
        """Whether all that belongs in it is there as it should be, beside what is left."""
        others = [line for line in self.wanted if line not in self.left]
        most = max(abs(w) for w in self.wanted.values())
        return bool(self.left) and bool(others) and all(
            abs(self.got[line] - self.wanted[line]) <= ALIKE * most for line in others)  # fmt: skip


def left_by_a_line(case: Case, left: Left) -> Iterator[Explanation]:
    """Where it is so of every wrong gradient, and of the same lines."""
    given = given_by_ranks(case)
    if given is None or case.traces is None or not case.exact or case.has_plan:
        return
    found: list[_Weights] = []
    gave: list[tuple[Columns, Tensor]] = []
    for cell in case.failing_cells:
        columns = columns_of(cell, given, uneven=True)
        sums = None if columns is None else _sums_by_line(case, columns)
        weights = None if columns is None or not sums else _weights(columns, sums)
        if columns is None or not sums or weights is None or not weights.is_so:
            return
        found.append(weights)
        gave.append((columns, torch.stack([sums[line] for line in weights.left]).sum(0)))
    if are_of_rows(case, gave):
        return  # rows that are read once more are another mistake
    if len({weights.left for weights in found}) != 1:
        return
    lines = sorted(found[0].left)
    others = sorted(line for line in found[0].wanted if line not in lines)
    names = list(dict.fromkeys(c.name for c in case.failing_cells))
    every = {*names} == {*case.record.spec.params}
    yield explained(
        case,
        Diagnosis(
            cause=f"{'every gradient' if every else some_of(names)}: what the backward called at "
            f"{some_of(lines)} gives is left in it, each time, and is no part of the right one: "
            f"look whether that should leave anything in .grad (torch.autograd.grad leaves "
            f"nothing), or what should clear it",
            kind=LEFT_IN,
            standing="proved",
            ranks=tuple(sorted({c.rank for c in case.failing_cells})),
            because=(f"what those called at {some_of(others)} gave on all ranks is there as it "
                     f"should be, and adds up to the right gradient",),
        ),
        [],
    )  # fmt: skip


def _sums_by_line(case: Case, columns: Columns) -> dict[str, Tensor]:
    """(n,) what the backwards called at each line gave on all ranks; nothing where some are called
    at lines that are not known."""
    assert case.traces is not None
    passes = columns.own.reshape(len(columns.sources), columns.passes, -1)
    out: dict[str, Tensor] = {}
    for source, own in zip(columns.sources, passes, strict=True):
        for rank in source:
            lines = case.traces.ranks[rank].own_lines.get(columns.cell.name, ())
            if not _are_all(lines, own):
                return {}
            for line, gave in zip(lines, own, strict=False):
                out[line] = out.get(line, torch.zeros_like(gave)) + gave
    return out if len(out) > 1 else {}


def _are_all(lines: Sequence[str], own: Tensor) -> bool:
    """Whether each backward that gave something has its line."""
    return all(lines) and not bool(own[len(lines) :].any())


def _weights(columns: Columns, sums: Mapping[str, Tensor]) -> _Weights | None:
    """None where no weights of these sums give both, or others do the same."""
    lines = [line for line, total in sums.items() if bool(total.any())]
    matrix = torch.stack([sums[line] for line in lines], dim=1) if lines else torch.zeros(0, 0)
    if len(lines) < 2 or matrix.shape[0] < 2 * len(lines):
        return None
    if int(torch.linalg.matrix_rank(matrix / matrix.norm(dim=0), rtol=1e-9)) < len(lines):
        return None
    found = []
    for target in (columns.measured, columns.wanted):
        own = torch.linalg.lstsq(matrix, target[:, None], driver="gelsd").solution[:, 0]
        size = (matrix.abs() @ own.abs()).max()
        bound = columns.cell.wanted.threshold + ROUNDINGS * EPS * float(size)
        if float((matrix @ own - target).abs().max()) > bound:
            return None
        found.append(dict(zip(lines, own.tolist(), strict=True)))
    return _Weights(got=found[0], wanted=found[1])
