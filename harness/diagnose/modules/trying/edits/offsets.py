"""Where a rank's part begins, put into a user's code that numbers, cuts or multiplies as if it were
the first, or as if all parts were as large.

In: an expression. Out: what it may have been meant to be, with the sum of a size over the ranks
before this one.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sumgrad.diagnose.modules.trying.edits.source import (
    Text,
    as_one,
    name_called,
    parts_of,
    with_part,
)
from sumgrad.record.trial import BEFORE

OWN_RANK = r"rank|coord|stage"
NUMBERS = ("arange", "range")


@dataclass(frozen=True, slots=True)
class Offset:
    """An expression in place of another. size: of what it has the sum over the ranks of an axis."""

    new: str
    size: str
    axis: str


def begun_after_others(node: ast.expr, text: Text, axes: Sequence[str]) -> Iterator[Offset]:
    """Of an expression that gives numbers, an offset, or a piece of something."""
    for axis in axes:
        if isinstance(node, ast.Call):
            yield from _numbered(node, text, axis)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            size = _times_the_rank(node, text)
            if size is not None:
                yield Offset(_before(text(size), axis), text(size), axis)
        elif isinstance(node, ast.Subscript):
            yield from _cut(node, text, axis)


def _numbered(node: ast.Call, text: Text, axis: str) -> Iterator[Offset]:
    """What is numbered from zero, or from as many times its own number as it has ranks before."""
    name, given = name_called(node).rpartition(".")[2], node.args
    if any(isinstance(one, ast.Starred) for one in given):
        return
    rest = "".join(f", {text(keyword)}" for keyword in node.keywords)
    if name == "enumerate" and len(given) == 1 and not rest and _has_a_size(given[0]):
        size = f"len({text(given[0])})"
        yield Offset(f"enumerate({text(given[0])}, {_before(size, axis)})", size, axis)
    if name == "pad" and len(given) > 1:
        yield from _padded(node, text, axis)
    if name not in NUMBERS:
        return
    own = given[0] if len(given) == 1 and not isinstance(given[0], ast.Constant) else None
    own = _of_equal_parts(*given, text=text) if len(given) == 2 else own
    if own is not None:
        size, first = as_one(own, text), _before(text(own), axis)
        yield Offset(f"{text(node.func)}({first}, {first} + {size}{rest})", text(own), axis)


def _padded(node: ast.Call, text: Text, axis: str) -> Iterator[Offset]:
    """What is made a multiple of something, so that it can be grouped: the first group of a rank
    may be the rest of the last one before."""
    ends = node.args[1].elts if isinstance(node.args[1], ast.Tuple) else []
    zeros = [isinstance(end, ast.Constant) and end.value == 0 for end in ends]
    rests = [one for one in ast.walk(node.args[1]) if isinstance(one, ast.BinOp)
             and isinstance(one.op, ast.Mod)]  # fmt: skip
    if len(ends) != 2 or sum(zeros) != 1 or len(rests) != 1:
        return
    (rest,) = rests
    size = rest.left.operand if isinstance(rest.left, ast.UnaryOp) else rest.left
    own, each = as_one(size, text), as_one(rest.right, text)
    first = f"{_before(text(size), axis)} % {each}"
    given = [text(node.args[0]), f"({first}, -({first} + {own}) % {each})"]
    given += [*map(text, node.args[2:]), *map(text, node.keywords)]
    yield Offset(f"{text(node.func)}({', '.join(given)})", text(size), axis)


def _cut(node: ast.Subscript, text: Text, axis: str) -> Iterator[Offset]:
    """A piece from the beginning, or from as many times its length as it has ranks before."""
    for num, part in enumerate(parts_of(node)):
        if not isinstance(part, ast.Slice) or part.upper is None or part.step is not None:
            continue
        own = part.upper
        if part.lower is not None:
            equal = _of_equal_parts(part.lower, part.upper, text=text)
            if equal is None:
                continue
            own = equal
        elif isinstance(own, ast.Constant | ast.UnaryOp):
            continue
        first = _before(text(own), axis)
        piece = f"{first}:{first} + {as_one(own, text)}"
        yield Offset(with_part(node, num, piece, text), text(own), axis)


def _of_equal_parts(lower: ast.expr, upper: ast.expr, *, text: Text) -> ast.expr | None:
    """The size of the parts, of `rank * size` and `(rank + 1) * size`."""
    one, other = (_times_the_rank(end, text) for end in (lower, upper))
    return one if one is not None and other is not None and text(one) == text(other) else None


def _times_the_rank(node: ast.expr, text: Text) -> ast.expr | None:
    """The other factor."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult):
        return None
    for rank, size in ((node.left, node.right), (node.right, node.left)):
        if _is_a_rank(rank, text) and not isinstance(size, ast.Constant):
            return None if _is_a_rank(size, text) else size
    return None


def _is_a_rank(node: ast.expr, text: Text) -> bool:
    """By its name: `rank`, `ctx.coords["tp"]`, `(rank + 1)`; not what is indexed by one."""
    if isinstance(node, ast.BinOp) and isinstance(node.right, ast.Constant):
        return _is_a_rank(node.left, text)
    of = node.value if isinstance(node, ast.Subscript) else node
    return re.search(OWN_RANK, text(of)) is not None


def _has_a_size(node: ast.expr) -> bool:
    return isinstance(node, ast.Name | ast.Attribute | ast.Subscript)


def _before(size: str, axis: str) -> str:
    return f'{BEFORE}({size}, "{axis}")'
