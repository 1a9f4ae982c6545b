"""What the explainers that look at modules share: the look itself, names, whether rows predict."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch
from sumgrad.diagnose.case import Case, explains, fails
from sumgrad.diagnose.fit import as_fraction
from sumgrad.diagnose.modules.values.seen import Seen
from sumgrad.diagnose.modules.where.look import ELSEWHERE, Look, look_at, look_into, terms_together
from sumgrad.diagnose.modules.where.loss_weights import shares_at_the_loss
from sumgrad.diagnose.names import axis_groups
from sumgrad.diagnose.row_fit import Unit, column
from sumgrad.judge.cells import Cell
from sumgrad.record.trace import Traces
from torch import Tensor

P = ParamSpec("P")
T = TypeVar("T")
ORDINALS = ("first", "second", "third", "fourth")
MOST_CODE = 88  # characters of a line that are shown


def as_a_hint(function: Callable[P, list[str]]) -> Callable[P, list[str]]:
    """Lines of words that may be lacking: tensors of shapes that nobody thought of take no cause
    away."""

    @functools.wraps(function)
    def hint(*args: P.args, **kwargs: P.kwargs) -> list[str]:
        try:
            return function(*args, **kwargs)
        except (RuntimeError, ValueError, LookupError):
            return []

    return hint


def unless_it_fails(function: Callable[P, T]) -> Callable[P, T | None]:
    """The same of what is one thing or nothing."""

    @functools.wraps(function)
    def found(*args: P.args, **kwargs: P.kwargs) -> T | None:
        try:
            return function(*args, **kwargs)
        except (RuntimeError, ValueError, LookupError):
            return None

    return found


def looked(case: Case) -> Look | None:
    """The failing step's modules, where they were recorded."""
    if "look" not in case.known:
        made = case.record.once(f"look/{case.tier}/{case.step}", lambda: _look(case))
        case.known["look"] = made
    found: Look | None = case.known["look"]
    return found


def looked_by_rows(case: Case) -> Look | None:
    """The same where rows and their factors are known: a script's ranks weigh theirs as they like,
    by means of their own that are averaged, and nothing tells its rows apart."""
    return None if case.record.spec.script is not None else looked(case)


def _look(case: Case) -> Look | None:
    traces = case.traces
    if traces is None:
        return None
    try:
        return look_at(traces, case.record.spec.tiers[case.tier], axis_groups(case))
    except (RuntimeError, ValueError, LookupError):
        return None  # tensors of shapes that nobody thought of take no verdict away


def traces_looked_at(case: Case) -> Traces | None:
    """The failing step's traces, with the calls that looked() has."""
    traces = case.traces
    if traces is None or looked(case) is None:
        return None
    if "terms_together" not in case.known:
        case.known["terms_together"] = terms_together(traces)
    found: Traces = case.known["terms_together"]
    return found


def gone_into(case: Case, module: str) -> list[Seen]:
    """What went into a module on every rank; nothing where it was not recorded."""
    traces = traces_looked_at(case)
    if traces is None:
        return []
    known = case.known.setdefault("gone_into", {})
    if module not in known:
        dtype = case.record.spec.tiers[case.tier]
        try:
            known[module] = look_into(traces, dtype, axis_groups(case), module)
        except (RuntimeError, ValueError, LookupError):
            known[module] = []
    found: list[Seen] = known[module]
    return found


def rows_of_micro_batches(case: Case) -> dict[int, frozenset[int]] | None:
    """Number of a rank's call -> the rows that ranks take in it; None unless each row is in one."""
    look = looked_by_rows(case)
    shares = None if look is None else shares_at_the_loss(look)
    if shares is None:
        return None
    found: dict[int, set[int]] = {}
    for share in shares[1]:
        if not share.rows:
            return None
        found.setdefault(share.number, set()).update(share.rows)
    rows = [row for own in found.values() for row in own]
    if len(found) < 2 or len(set(rows)) < len(rows):
        return None
    return {number: frozenset(own) for number, own in sorted(found.items())}


def owners(case: Case) -> list[str]:
    """Modules that own a parameter whose gradient is wrong."""
    return [cell.name.rpartition(".")[0] for cell in case.failing_cells]


def named(look: Look, module: str) -> str:
    """A module by its name, class and line."""
    source = ELSEWHERE.join(map(source_from_here, look.sources.get(module, "").split(ELSEWHERE)))
    return f"{module or 'the model itself'} ({source})" if source else module


def source_from_here(source: str) -> str:
    """`Linear at FILE:LINE` with the file as it is called from here."""
    words, _, path = source.rpartition(" at ")
    try:
        return f"{words} at {Path(path).relative_to(Path.cwd())}" if words else source
    except ValueError:
        return source


def line_from_here(line: str) -> str:
    """`PATH:12` with the path as it is called from here, or the file's name."""
    path = Path(line)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else path.name


def line_and_code(line: str, code: str, most: int = MOST_CODE) -> str:
    """A line, and what stands there: at most so many characters of it."""
    shown = code if len(code) <= most else f"{code[: most - 3]}..."
    return f"{line_from_here(line)} `{shown}`"


def line_in_its_function(line: str, code: str, within: str) -> str:
    """The same, and the function that it is in. within: as a Computation has it."""
    _, _, function = within.partition(" ")
    return line_and_code(line, code) + (f" in {function}" if function else "")


def ordinal(at: int) -> str:
    """`second` of 1."""
    return ORDINALS[at] if at < len(ORDINALS) else f"{at + 1}th"


def ordinals(numbers: Iterable[int]) -> str:
    """`first, third` of 0 and 2."""
    return ", ".join(ordinal(n) for n in sorted({*numbers}))


def fraction_of(value: float) -> str:
    """`1/3` where it is one, else six digits."""
    fraction = as_fraction(value, 1e-9)
    return str(fraction) if fraction is not None else f"{value:.6g}"


def predicts(case: Case, weights: Tensor) -> bool:
    """Whether rows with these weights, up to one factor, are every failing gradient."""
    if not case.reference.intervals or any(b - a != 1 for a, b in case.reference.intervals):
        return False
    pairs = [
        (cell, (weights @ parts_of_rows(case, cell)).reshape(cell.measured.shape))
        for cell in case.failing_cells
    ]
    squares = sum(float((t * t).sum()) for _, t in pairs)
    if not squares:
        return False
    scale = sum(float((c.measured * t).sum()) for c, t in pairs) / squares
    most = max(1.0, abs(scale) * float(weights.abs().max()))
    left = [(c, c.measured - scale * t) for c, t in pairs]
    return explains(left) and not any(fails(c, error, factor=2 * most) for c, error in left)


def parts_of_rows(case: Case, cell: Cell) -> Tensor:
    """(rows, n) what each row interval gives to the elements of a cell."""
    units = [Unit(term=None, rows=rows) for rows in case.reference.intervals]
    return torch.stack([column(case, cell, unit).reshape(-1) for unit in units])
