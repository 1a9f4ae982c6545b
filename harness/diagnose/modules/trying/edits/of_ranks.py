"""What may be of other ranks than meant: a size or a place along one axis or two, the group of two
axes, what one rank has in place of what all have, padding that a gather leaves in between.

In: an expression of a user's code. Out: what it may have been meant to be.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from sumgrad.diagnose.modules.trying.edits.source import Text, as_one, name_called, parts_of

SIZES, PLACES, GROUP = "axes", "coords", "group"
FROM_ONE = {"broadcast": "all_reduce", "reduce": "all_reduce"}
JOINS = ("cat", "concat")
LARGEST = ("max", "min")


def over_other_ranks(node: ast.expr, text: Text, axes: Sequence[str]) -> Iterator[str]:
    if isinstance(node, ast.Subscript):
        yield from _along_two(node, text, axes)
        yield from _without_padding(node, text)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        yield from _of_those_before(node.left, node.right, text)
        yield from _of_those_before(node.right, node.left, text)
    elif isinstance(node, ast.Call):
        yield from _of_other_groups(node, text, axes)
        added = node.args[0] if name_called(node) == "sum" and len(node.args) == 1 else None
        if isinstance(node.func, ast.Name) and isinstance(added, ast.Name | ast.Attribute):
            yield f"{text(added)}[0]"


def summed_by_all(node: ast.Call, text: Text) -> Iterator[str]:
    """A collective from one rank, or to one, as a sum, or the largest, of all."""
    function = node.func
    if not isinstance(function, ast.Attribute) or function.attr not in FROM_ONE or not node.args:
        return
    of_groups = [text(one) for one in node.keywords if one.arg in ("group", "async_op")]
    called = f"{text(function.value)}.{FROM_ONE[function.attr]}"
    for op in ("", f"op={text(function.value)}.ReduceOp.MAX"):
        given = [text(node.args[0]), *([op] if op else []), *of_groups]
        yield f"{called}({', '.join(given)})"


def _axis_of(node: ast.Subscript, axes: Sequence[str]) -> tuple[str, str]:
    """`axes` and `dp` of `ctx.axes["dp"]`; nothing of others."""
    of, at = node.value, node.slice
    told = isinstance(of, ast.Attribute) and of.attr in (SIZES, PLACES)
    if told and isinstance(at, ast.Constant) and at.value in axes:
        assert isinstance(of, ast.Attribute)
        return of.attr, str(at.value)
    return "", ""


def _along_two(node: ast.Subscript, text: Text, axes: Sequence[str]) -> Iterator[str]:
    kind, axis = _axis_of(node, axes)
    if not kind or not isinstance(node.value, ast.Attribute):
        return
    of = text(node.value.value)
    for other in (one for one in axes if one != axis):
        if kind == SIZES:
            yield f'({of}.{SIZES}["{axis}"] * {of}.{SIZES}["{other}"])'
            continue
        for one, two in ((axis, other), (other, axis)):
            size = f'{of}.{SIZES}["{two}"]'
            yield f'({of}.{PLACES}["{one}"] * {size} + {of}.{PLACES}["{two}"])'


def _of_other_groups(node: ast.Call, text: Text, axes: Sequence[str]) -> Iterator[str]:
    """`ctx.group("dp")` with one axis more, or less."""
    own = [str(one.value) for one in node.args if isinstance(one, ast.Constant)]
    is_one = isinstance(node.func, ast.Attribute) and node.func.attr == GROUP and own
    if not is_one or len(own) < len(node.args) or not {*own} <= {*axes}:
        return
    wider = [[one for one in axes if one in own or one == more] for more in axes if more not in own]
    fewer = [[one for one in own if one != less] for less in own] if len(own) > 1 else []
    for names in (*wider, *fewer):
        yield f"{text(node.func)}({', '.join(f'{chr(34)}{name}{chr(34)}' for name in names)})"


def _of_those_before(place: ast.expr, each: ast.expr, text: Text) -> Iterator[str]:
    """`rank * counts[rank]`, or the largest of them so often, as the sum of those before."""
    if not isinstance(place, ast.Name | ast.Attribute | ast.Subscript):
        return
    if isinstance(each, ast.Subscript) and text(each.slice) == text(place):
        yield f"sum({text(each.value)}[:{text(place)}])"
    elif isinstance(each, ast.Call) and name_called(each) in LARGEST and len(each.args) == 1:
        yield f"sum({as_one(each.args[0], text)}[:{text(place)}])"


def _without_padding(node: ast.Subscript, text: Text) -> Iterator[str]:
    """`torch.cat(parts, 1)[:, :sum(sizes)]` with each part cut by its own size."""
    joined, parts = node.value, parts_of(node)
    bound = parts[-1].upper if isinstance(parts[-1], ast.Slice) else None
    if not isinstance(joined, ast.Call) or name_called(joined).rpartition(".")[2] not in JOINS:
        return
    if not isinstance(bound, ast.Call) or name_called(bound) != "sum" or not joined.args:
        return
    before = "".join(f"{text(one)}, " for one in parts[:-1])
    rest = [*map(text, joined.args[1:]), *map(text, joined.keywords)]
    cut = f"[p[{before}:n] for p, n in zip({text(joined.args[0])}, {text(bound.args[0])})]"
    yield f"{text(joined.func)}({', '.join([cut, *rest])})"
