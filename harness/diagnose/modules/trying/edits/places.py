"""Where a number stands, and which: halves or every second one, an order, a place that is counted
from zero, a sign, a bound.

In: an expression of a user's code. Out: what it may have been meant to be.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping

from sumgrad.diagnose.modules.trying.edits.source import Text, as_one, name_called, parts_of

Kind = Callable[[ast.expr], str]
MOST_ORDERS, MOST_PLACES = 2, 3
INVERSES = {"inv", "pinv", "cholesky", "inverse"}
RUNNING = {"cumsum", "cumprod", "logcumsumexp"}
ORDER = "tensor int64 "


def elsewhere(node: ast.expr, text: Text, kind: Kind, kinds: Mapping[str, str]) -> Iterator[str]:
    """kinds: of what kind is what there is under each name."""
    if isinstance(node, ast.Call):
        yield from _every_second(node, text)
        yield from _from_the_front(node, text)
        yield from _begun_at(node, text, kinds)
        yield from _the_other_sign(node, text, kind)
        if name_called(node).rpartition(".")[2] in INVERSES:
            yield f"{text(node)}.mT"
    elif isinstance(node, ast.Subscript):
        for num, part in enumerate(parts_of(node)):
            if num == 0 and isinstance(part, ast.Slice):
                yield from _by_its_numbers(node, part, text)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        yield f"({text(node)}).clamp(max=1.0)"
    elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq):
        right = node.comparators[0]
        if isinstance(right, ast.BinOp) and text(right).startswith("len("):
            yield f"{text(node.left)} == 0"
    if isinstance(node, ast.Name) and kind(node).startswith("tensor"):
        yield from _in_an_order(node, kind, kinds)


def _every_second(node: ast.Call, text: Text) -> Iterator[str]:
    """`x.chunk(2, -1)` as `(x[..., 0::2], x[..., 1::2])`."""
    function = node.func
    if not isinstance(function, ast.Attribute) or function.attr != "chunk" or not node.args:
        return
    dims = [*node.args[1:], *(one.value for one in node.keywords if one.arg == "dim")]
    before = {"0": "", "-1": "..., ", "1": ":, ", "2": ":, :, "}
    dim = text(dims[0]) if dims else "0"
    if text(node.args[0]) == "2" and dim in before:
        of = as_one(function.value, text)
        yield f"({of}[{before[dim]}0::2], {of}[{before[dim]}1::2])"


def _from_the_front(node: ast.Call, text: Text) -> Iterator[str]:
    """`x.flip(1).cumsum(1).flip(1)` as `x.cumsum(1)`; the other way round it is looked for, too."""
    running = node.func.value if isinstance(node.func, ast.Attribute) else None
    if name_called(node) != "flip" or not isinstance(running, ast.Call):
        return
    turned = running.func.value if isinstance(running.func, ast.Attribute) else None
    if name_called(running) not in RUNNING or not isinstance(turned, ast.Call):
        return
    if name_called(turned) == "flip" and isinstance(turned.func, ast.Attribute):
        given = [*map(text, running.args), *map(text, running.keywords)]
        yield f"{text(turned.func.value)}.{name_called(running)}({', '.join(given)})"


def _begun_at(node: ast.Call, text: Text, kinds: Mapping[str, str]) -> Iterator[str]:
    """A call that is given a zero: a whole number with a name in its place."""
    if isinstance(node.func, ast.Attribute) and text(node.func.value) not in ("torch", "self"):
        return  # of a tensor it is a dimension
    given = [*map(text, node.args), *map(text, node.keywords)]
    names = [name for name, kind in kinds.items() if kind == "int" and name not in given]
    for at, one in enumerate(node.args):
        if isinstance(one, ast.Constant) and type(one.value) is int and one.value == 0:
            for name in names[:MOST_PLACES]:
                yield f"{text(node.func)}({', '.join([*given[:at], name, *given[at + 1 :]])})"


def _the_other_sign(node: ast.Call, text: Text, kind: Kind) -> Iterator[str]:
    """All whole numbers that it is given under a name."""
    whole = [isinstance(one, ast.Name) and kind(one) == "int" for one in node.args]
    if any(whole) and not isinstance(node.func, ast.Attribute) and name_called(node) != "range":
        turned = [f"-{text(one)}" if is_one else text(one)
                  for one, is_one in zip(node.args, whole, strict=True)]  # fmt: skip
        yield f"{text(node.func)}({', '.join([*turned, *map(text, node.keywords)])})"


def _by_its_numbers(node: ast.Subscript, part: ast.Slice, text: Text) -> Iterator[str]:
    """`x[a : a + len(i)]` as `x[i]`."""
    added = part.upper if part.step is None and part.lower is not None else None
    if isinstance(added, ast.BinOp) and isinstance(added.op, ast.Add):
        size = added.right
        if isinstance(size, ast.Call) and name_called(size) == "len" and len(parts_of(node)) == 1:
            yield f"{text(node.value)}[{text(size.args[0])}]"


def _in_an_order(node: ast.Name, kind: Kind, kinds: Mapping[str, str]) -> Iterator[str]:
    """Of as many rows as an order that there is."""
    rows = kind(node).split(" ")[2].partition("x")[0] if kind(node).count(" ") > 1 else ""
    orders = [name for name, its in kinds.items()
              if rows and name != node.id and its == f"{ORDER}{rows}"]  # fmt: skip
    for order in orders[:MOST_ORDERS]:
        yield from (f"{node.id}[{order}]", f"{node.id}[{order}.argsort()]")
