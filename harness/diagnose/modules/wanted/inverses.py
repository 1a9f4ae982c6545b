"""What an argument of a torch function would have to be for the function to give what is wanted.

All else that it takes stays as it is. NaN is where nothing tells: where a zero swallows the
argument, or where what is wanted is not known.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

SMALL = 1e-9  # of the largest: what is smaller tells nothing when it is divided by
CLOSE = 1e-9  # as of a rounding, of the largest number
ROUNDINGS = 1e3 * CLOSE  # as of what was solved for and put in again
MOST_NUMBERS = 1 << 16
FEWEST = 3  # different numbers that are no chance
PARTS_JOINED = {"cat", "stack", "concat"}
COPIES = {"contiguous", "clone", "detach", "to", "float", "double"}
OF_PRODUCTS = {"matmul", "mm", "bmm", "linear"}

Arguments = Sequence[Tensor | float | None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Needed:
    """value: of the argument's shape. spare: how many numbers that are wanted it is not needed for
    to solve, and that come out right all the same."""

    value: Tensor
    spare: int


def needed(function: str, takes: Arguments, at: int, gave: Tensor, wanted: Tensor) -> Needed | None:
    """Argument `at`, which is a tensor, for a result `wanted` where it `gave` another. None where
    no such one does it, or the function is none of those that are known."""
    own = takes[at]
    if not isinstance(own, Tensor) or not own.is_floating_point():
        return None
    if max(own.numel(), wanted.numel()) > MOST_NUMBERS:
        return None
    name = function.removesuffix("_")
    if not _is_given(name, takes, gave):
        return None  # with an option that is not known here
    if name in OF_PRODUCTS:
        return _of_product(name, takes, at, wanted)
    if name == "softmax":
        return None if at else _of_softmax(own, wanted)
    solved = None
    if name in OF_ONE and len(takes) == 1:
        solved = OF_ONE[name](wanted)
    elif name in OF_TWO and len(takes) == 2 and takes[1 - at] is not None:
        solved = OF_TWO[name](at, wanted, takes[1 - at])
    return None if solved is None else _gathered(solved, own.shape)


def moved_back(
    function: str, takes: Sequence[Tensor | str], at: int, which: int, gave: Tensor, wanted: Tensor
) -> Needed | None:
    """Argument `at` of a function that only moves numbers; None where nothing tells where to.

    takes: what is no tensor in words, as the record has it. which: of its results `gave` is.
    """
    own = takes[at]
    if not isinstance(own, Tensor) or gave.shape != wanted.shape:
        return None
    if max(own.numel(), gave.numel()) > MOST_NUMBERS:
        return None
    index = _moved_index(function, takes, at, which)
    if index is None or index.shape != gave.shape:
        return _moved_by_value(own, gave, wanted)
    here = index.reshape(-1) >= 0
    value = torch.full((own.numel(),), torch.nan, dtype=torch.float64)
    value[index.reshape(-1)[here]] = wanted.reshape(-1)[here].double()
    return Needed(value=value.reshape(own.shape), spare=0)


def _moved_index(
    function: str, takes: Sequence[Tensor | str], at: int, which: int
) -> Tensor | None:
    """Which element of argument `at` each of the result is; -1 where it is another argument's."""
    indexes = [
        torch.arange(t.numel()).reshape(t.shape) if i == at else torch.full(t.shape, -1)
        for i, t in enumerate(takes)
        if isinstance(t, Tensor)
    ]
    words = [t for t in takes if isinstance(t, str)]
    args = [literal(w.rpartition("=")[2]) for w in words]
    if any(isinstance(a, Unread) for a in args):
        return None
    by_name = {w.partition("=")[0]: a for w, a in zip(words, args, strict=True) if "=" in w}
    by_place = [a for w, a in zip(words, args, strict=True) if "=" not in w]
    try:
        if function in PARTS_JOINED:
            return getattr(torch, function)(indexes, *by_place, **by_name)
        if len(indexes) != 1:
            return None
        if function == "getitem":
            return indexes[0][by_place[0]]
        if function in COPIES:
            return indexes[0]
        given = getattr(indexes[0], function)(*by_place, **by_name)
        return given if isinstance(given, Tensor) else given[which]
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
        return None


def other_way(function: str, takes: Arguments, wanted: Tensor) -> str:
    """How the function would give what is wanted of just what it takes, in words; else empty."""
    tensors = [t for t in takes if isinstance(t, Tensor)]
    if len({*wanted.reshape(-1).tolist()[:MOST_NUMBERS]}) < FEWEST or not tensors:
        return ""
    for words, way in _ways(function.removesuffix("_"), tensors):
        try:
            given = way()
        except (RuntimeError, TypeError):
            continue
        if given.shape == wanted.shape and _are_near(given, wanted):
            return words
    return ""


def _ways(name: str, takes: Sequence[Tensor]) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    a = takes[0]
    if name in ("softmax", "log_softmax", "cumsum", "cumprod"):
        for dim in range(a.dim()):
            yield f"over dimension {dim}", partial(getattr(torch, name), a, dim)
    if len(takes) != 2:
        return
    b = takes[1]
    if name in ("matmul", "mm", "bmm"):
        yield "with its two arguments the other way round", lambda: b @ a
        yield "with the first of them transposed", lambda: a.mT @ b
        yield "with the second of them transposed", lambda: a @ b.mT
    if name in ("sub", "div"):
        yield "with its two arguments the other way round", partial(getattr(torch, name), b, a)
    for other in {"mul": ("div",), "div": ("mul",), "maximum": ("minimum", "add"),
                  "minimum": ("maximum", "add"), "add": ("mul",)}.get(name, ()):  # fmt: skip
        yield f"with `{other}` in its place", partial(getattr(torch, other), a, b)


def _is_given(name: str, takes: Arguments, gave: Tensor) -> bool:
    """Whether the function is what its name says: there may be options, or a dimension."""
    a, b = takes[0], takes[1] if len(takes) > 1 else None
    try:
        match name:
            case "matmul" | "mm" | "bmm" if isinstance(a, Tensor) and isinstance(b, Tensor):
                given = a @ b
            case "linear" if isinstance(a, Tensor) and isinstance(b, Tensor):
                given = a @ b.mT
                if len(takes) > 2 and isinstance(takes[2], Tensor):
                    given = given + takes[2]
            case "softmax" if isinstance(a, Tensor):
                given = a.softmax(-1)
            case "rsub" | "rdiv" if a is not None and b is not None:
                by = torch.as_tensor(b, dtype=torch.float64)
                given = by - a if name == "rsub" else by / a
            case "maximum" | "minimum" if isinstance(a, Tensor) and isinstance(b, Tensor):
                given = getattr(torch, name)(a, b)
            case "add" | "sub" | "mul" | "div" if None not in (a, b):
                given = getattr(torch, name)(torch.as_tensor(a, dtype=torch.float64), b)
            case "pow" if isinstance(a, Tensor) and isinstance(b, float) and bool((a > 0).all()):
                given = a**b
            case "log" | "exp" | "neg" | "tanh" | "sqrt" if isinstance(a, Tensor):
                given = getattr(torch, name)(a)
            case _:
                return False
    except (RuntimeError, TypeError):
        return False
    return given.shape == gave.shape and _are_near(given, gave)


def _are_near(a: Tensor, b: Tensor) -> bool:
    finite = b[b.isfinite()].abs()
    near = ROUNDINGS * float(finite.max()) if len(finite) else 0.0
    return bool(((a == b) | ((a - b).abs() <= near) | (a.isnan() & b.isnan())).all())


class Unread:
    """What stands there is no number, slice or tuple of these."""


def literal(words: str) -> Any:
    """What an argument that is no tensor was, as its words say it."""
    try:
        return _read(ast.parse(words, mode="eval").body)
    except (SyntaxError, ValueError):
        return Unread()


def _read(node: ast.expr) -> Any:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "slice":
        return slice(*map(_read, node.args))
    if isinstance(node, ast.Name) and node.id == "Ellipsis":
        return ...
    if isinstance(node, ast.Tuple | ast.List):
        return tuple(map(_read, node.elts))
    return ast.literal_eval(node)


def _moved_by_value(own: Tensor, gave: Tensor, wanted: Tensor) -> Needed | None:
    """By where its numbers stand in what was given; None where equal ones do not tell."""
    flat, numbers = gave.reshape(-1).sort()
    mine = own.reshape(-1)
    at, end = torch.searchsorted(flat, mine), torch.searchsorted(flat, mine, right=True)
    if bool((end - at > 1).any()):
        return None
    there = end > at
    value = torch.full_like(mine, torch.nan)
    value[there] = wanted.reshape(-1)[numbers[at[there]]]
    return Needed(value=value.reshape(own.shape), spare=0)


def _gathered(solved: Tensor, shape: torch.Size) -> Needed | None:
    """Of an argument that is broadcast: where its copies have to be one number, that one."""
    if solved.shape == shape:
        return Needed(value=solved, spare=0)
    more = solved.dim() - len(shape)
    dims = [i for i, n in enumerate(solved.shape) if i < more or shape[i - more] == 1 < n]
    if not dims:
        return None
    known = ~solved.isnan()
    least = torch.where(known, solved, torch.inf).amin(dims, keepdim=True)
    most = torch.where(known, solved, -torch.inf).amax(dims, keepdim=True)
    num = known.sum(dims, keepdim=True)
    scale = float(solved[known].abs().max()) if bool(known.any()) else 0.0
    if bool((num > 0).any()) and bool(((most - least)[num > 0] > ROUNDINGS * scale).any()):
        return None
    value = torch.where(num > 0, (least + most) / 2, torch.nan).reshape(shape)
    return Needed(value=value, spare=int((num - 1).clamp(min=0).sum()))


def _divided(by: Tensor | float, what: Tensor) -> Tensor:
    by = torch.as_tensor(by, dtype=what.dtype)
    tells = by.abs() > SMALL * by.abs().nan_to_num().max()
    return torch.where(tells, what / torch.where(tells, by, 1.0), torch.nan)


def _of_softmax(own: Tensor, wanted: Tensor) -> Needed | None:
    """Over the last dimension: what is needed beside what it is, where most of a row stays."""
    given = own.softmax(-1)
    if given.shape != wanted.shape or bool((wanted < -CLOSE).any()):
        return None
    if bool(((wanted.sum(-1) - 1).abs() > ROUNDINGS).any()):
        return None
    wanted = torch.where(wanted.abs() <= ROUNDINGS, 0.0, wanted)
    more = (wanted / given).log()
    usual = torch.where(more.isfinite(), more, torch.nan).nanmedian(-1, keepdim=True).values
    return Needed(value=own + more - usual, spare=0)


def _of_product(name: str, takes: Arguments, at: int, wanted: Tensor) -> Needed | None:
    first, second = takes[0], takes[1]
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        return None
    if at > 1:
        bias = takes[2]
        if name != "linear" or not isinstance(bias, Tensor):
            return None
        return _gathered(wanted - first @ second.mT, bias.shape)
    if len(takes) > 2:
        if name != "linear" or not isinstance(takes[2], Tensor):
            return None
        wanted = wanted - takes[2]
    if min(first.dim(), second.dim()) < 2 or bool(wanted.isnan().any()):
        return None
    right = second.mT if name == "linear" else second
    if at == 0:
        found = _solved(right.mT, wanted.mT)
        solved = None if found is None else found.value.mT
        shape, spare = first.shape, 0 if found is None else found.spare
    else:
        if right.dim() == 2:  # one for all that stands before
            first, wanted = first.reshape(-1, first.shape[-1]), wanted.reshape(-1, wanted.shape[-1])
        found = _solved(first, wanted)
        solved = None if found is None else found.value
        shape, spare = right.shape, 0 if found is None else found.spare
    if solved is None:
        return None
    whole = _gathered(solved, shape)
    if whole is None:
        return None
    value = whole.value.mT if at and name == "linear" else whole.value
    return Needed(value=value, spare=whole.spare + spare)


def _solved(left: Tensor, wanted: Tensor) -> Needed | None:
    """x of left @ x = wanted; NaN for matrices that have more than one, None where any has none."""
    rows, columns = left.shape[-2:]
    if rows < columns:
        return None
    batch = torch.broadcast_shapes(left.shape[:-2], wanted.shape[:-2])
    left, wanted = left.expand(*batch, rows, columns), wanted.expand(*batch, *wanted.shape[-2:])
    told = (torch.linalg.matrix_rank(left, rtol=1e-7) == columns)[..., None, None]
    if not bool(told.any()):
        return None
    x = torch.linalg.lstsq(left, wanted, driver="gelsd").solution
    off = ((left @ x - wanted) * told).abs().max()
    if not bool(off <= ROUNDINGS * wanted.abs().max()):
        return None
    spare = (rows - columns) * x.shape[-1] * int(told.sum())
    return Needed(value=torch.where(told, x, torch.nan), spare=spare)


def _sub(at: int, wanted: Tensor, other: Tensor | float) -> Tensor:
    return other - wanted if at else wanted + other


def _div(at: int, wanted: Tensor, other: Tensor | float) -> Tensor:
    return _divided(wanted, torch.as_tensor(other) + 0 * wanted) if at else wanted * other


def _pow(at: int, wanted: Tensor, other: Tensor | float) -> Tensor | None:
    """Of positive numbers, to a power that is one number."""
    if at or isinstance(other, Tensor) or not other:
        return None
    return torch.where(wanted > 0, wanted, torch.nan) ** (1 / other)


def _minimum(at: int, wanted: Tensor, other: Tensor | float) -> Tensor | None:
    larger = _of_the_larger(-wanted, -other)
    return None if larger is None else -larger


def _of_the_larger(wanted: Tensor, other: Tensor | float) -> Tensor | None:
    """Where the other one is wanted, any smaller number does."""
    other, near = torch.as_tensor(other), CLOSE * wanted.abs().nan_to_num()
    if bool((wanted < other - near).any()):
        return None
    return torch.where(wanted > other + near, wanted, torch.nan)


OF_ONE: dict[str, Callable[[Tensor], Tensor]] = {
    "log": torch.exp,
    "exp": lambda wanted: torch.where(wanted > 0, wanted, torch.nan).log(),
    "neg": torch.neg,
    "tanh": lambda wanted: torch.where(wanted.abs() < 1, wanted, torch.nan).atanh(),
    "sqrt": lambda wanted: torch.where(wanted >= 0, wanted, torch.nan).square(),
}
OF_TWO: dict[str, Callable[[int, Tensor, Any], Tensor | None]] = {
    "add": lambda _, wanted, other: wanted - other,
    "sub": _sub,
    "rsub": lambda at, wanted, other: _sub(1 - at, wanted, other),
    "mul": lambda _, wanted, other: _divided(other, wanted),
    "div": _div,
    "rdiv": lambda at, wanted, other: _div(1 - at, wanted, other),
    "pow": _pow,
    "maximum": lambda _, wanted, other: _of_the_larger(wanted, other),
    "minimum": _minimum,
}
