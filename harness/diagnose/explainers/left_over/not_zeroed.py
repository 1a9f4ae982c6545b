"""Elements that have a gradient where the single process's is exactly zero, and all else right.

A tensor hook, a mask or a frozen part that one process has and the ranks do not: a wrapper that
puts another parameter in the place of the one that a hook was registered on loses it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from sumgrad.base.outcome import some_of, spans
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.in_code.lines import expression
from sumgrad.diagnose.explainers.by_modules.looked import as_a_hint, looked_by_rows, owners
from sumgrad.diagnose.explainers.of_factors.blocks import places_of_elements
from sumgrad.diagnose.explainers.of_factors.factors import explained
from sumgrad.diagnose.explanation import Explanation, Left
from sumgrad.diagnose.modules.autograd.changed_outside import changed_outside
from sumgrad.diagnose.modules.where.first_wrong import first_wrong_backward, first_wrong_forward
from sumgrad.judge.cells import Cell
from torch import Tensor

MOST_SHOWN = 4


def gradient_where_zero_belongs(case: Case, left: Left) -> Iterator[Explanation]:
    """Every wrong element is one that the single process has zero in, and its parameter has
    others."""
    if case.has_plan or not case.failing_cells:
        return
    if not all(_is_zero_where_wrong(cell) for cell in case.failing_cells):
        return
    names = list(dict.fromkeys(cell.name for cell in case.failing_cells))
    if any(not bool(case.reference.grads[name].any()) for name in names):
        return  # all of it: frozen, or never reached
    shown = [f"{name} {_places(case, name)}" for name in names[:MOST_SHOWN]]
    more = f" and {len(names) - MOST_SHOWN} more" if len(names) > MOST_SHOWN else ""
    look = looked_by_rows(case)
    right = look is not None and not (
        first_wrong_forward(look) or first_wrong_backward(look, owners(case))
    )
    yield explained(
        case,
        Diagnosis(
            cause=f"a gradient is there where the single process has exactly zero, everything else "
            f"of {some_of(names)} is right: {'; '.join(shown)}{more}",
            kind="not_zeroed",
            ranks=tuple(sorted({cell.rank for cell in case.failing_cells})),
            because=tuple(_changed_outside(case, names) or _no_line(right)),
        ),
    )


def _no_line(right: bool) -> list[str]:
    return [
        "what sets it to zero in one process, as a tensor hook or a mask, does not act on these "
        "ranks; a wrapper that makes the parameter anew (fully_shard, a flat buffer) may lose "
        "hooks that were registered before",
        *([] if right else ["or what does not reach it in one process reaches it there"]),
    ]


@as_a_hint
def _changed_outside(case: Case, names: Sequence[str]) -> list[str]:
    """The line that does to the numbers alone what the single process does to the parameters."""
    traces = case.traces
    found = [] if traces is None else list(changed_outside(traces, names))
    if not found:
        return []
    first = found[0]
    alike = [one for one in found if one.mine.site == first.mine.site]
    of = some_of(list(dict.fromkeys(one.name for one in alike)))
    ranks = spans([one.rank for one in alike])
    return [f"{expression(first.mine)} changes the numbers of {of} outside of autograd on rank "
            f"{ranks}, where the single process has {expression(first.its)}, which a gradient "
            f"passes: what it does to the numbers it does to no gradient"]  # fmt: skip


def _is_zero_where_wrong(cell: Cell) -> bool:
    return not bool(cell.wanted.value[_wrong(cell)].any())


def _wrong(cell: Cell) -> Tensor:
    return (cell.measured - cell.wanted.value).abs() > cell.wanted.threshold


def _places(case: Case, name: str) -> str:
    """The wrong elements, by the ranks that hold them."""
    shape = tuple(case.reference.grads[name].shape)
    by_place: dict[str, list[int]] = {}
    for cell in case.failing_cells:
        if cell.name == name:
            wrong = _wrong(cell).reshape(-1)
            index = torch.arange(len(wrong)) if cell.index is None else cell.index.reshape(-1)
            by_place.setdefault(places_of_elements(index[wrong], shape), []).append(cell.rank)
    return ", ".join(f"{place} on rank {spans(ranks)}" for place, ranks in by_place.items())
