"""What an expression may have been meant to be: another size or rank, the other end of a queue, a
slice elsewhere, an order the other way round, a division that rounds otherwise.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence

from sumgrad.diagnose.modules.trying.edits.layouts import other_ends
from sumgrad.diagnose.modules.trying.edits.source import (
    Text,
    as_one,
    name_called,
    parts_of,
    with_part,
)

OF_ALL = {"world_size": "axes", "rank": "coords"}  # of all ranks, of those along an axis


def alternatives(
    node: ast.expr, text: Text, axes: Sequence[str], is_index: Callable[[ast.expr], bool]
) -> Iterator[str]:
    if isinstance(node, ast.Attribute) and node.attr in OF_ALL:
        yield from (f'{text(node.value)}.{OF_ALL[node.attr]}["{axis}"]' for axis in axes)
    elif isinstance(node, ast.Subscript):
        yield from _of_an_index(node, text, is_index)
    elif isinstance(node, ast.BinOp):
        yield from _of_a_division(node, text)
        repeated = node.left.elts if isinstance(node.left, ast.List) else []
        if isinstance(node.op, ast.Mult) and len(repeated) == 1:
            yield f"[{text(repeated[0])} for _ in range({text(node.right)})]"
    elif isinstance(node, ast.Call):
        yield from _of_a_call(node, text)


def _of_a_division(node: ast.BinOp, text: Text) -> Iterator[str]:
    one, two = as_one(node.left, text), as_one(node.right, text)
    if isinstance(node.op, ast.FloorDiv):
        yield from (f"-(-{one} // {two})", f"{one} / {two}", f"{one} % {two}")
    elif isinstance(node.op, ast.Mod):
        yield f"{one} // {two}"


def _of_a_call(node: ast.Call, text: Text) -> Iterator[str]:
    name = name_called(node)
    if name == "pop" and len(node.args) < 2 and not node.keywords:
        yield f"{text(node.func)}({'' if node.args else '0'})"
    if name == "zip" and len(node.args) == 2 and all(map(may_be_turned, node.args)):
        one, two = map(text, node.args)
        rest = "".join(f", {text(keyword)}" for keyword in node.keywords)
        yield f"zip(reversed(list({one})), {two}{rest})"
        yield f"zip({one}, reversed(list({two})){rest})"


def may_be_turned(node: ast.expr) -> bool:
    """Whether it can hardly go on for ever, as what some calls give."""
    finite = ("range", "enumerate", "zip", "items", "values", "keys", "list", "sorted", "chunk",
              "split", "tensor_split", "unbind", "parameters", "modules", "reversed")  # fmt: skip
    if isinstance(node, ast.Call):
        return name_called(node) in finite and all(may_be_turned(one) for one in node.args)
    return True


def _of_an_index(
    node: ast.Subscript, text: Text, is_index: Callable[[ast.expr], bool]
) -> Iterator[str]:
    base, at = text(node.value), node.slice
    of_axis = isinstance(node.value, ast.Attribute) and node.value.attr in OF_ALL.values()
    if of_axis and isinstance(node.value, ast.Attribute):
        whole = next(name for name, of in OF_ALL.items() if of == node.value.attr)
        yield f"{text(node.value.value)}.{whole}"
        return
    if isinstance(at, ast.Name) and is_index(at):
        yield f"{base}[{text(at)}.argsort()]"
    for num, part in enumerate(parts_of(node)):
        plain = isinstance(part, ast.Slice) and part.step is None
        others = _other_slices(part, text) if isinstance(part, ast.Slice) and plain else ()
        for other in (*others, *other_ends(part, text)):
            yield with_part(node, num, other, text)


def _other_slices(part: ast.Slice, text: Text) -> Iterator[str]:
    lower, upper = part.lower, part.upper
    if lower is not None and upper is not None:
        one, two = text(lower), text(upper)
        yield from (f"{one} + 1:{two} + 1", f"{one} - 1:{two} - 1", f":{two}", f"{one}:",
                    f":{two} - ({one})")  # fmt: skip
    elif isinstance(upper, ast.BinOp) and isinstance(upper.op, ast.Sub):
        yield f"{text(upper.right)}:{text(upper.left)}"
    bound = upper if lower is None else lower
    if bound is not None and (lower is None or upper is None):
        own = text(bound)
        yield ":"
        yield f":{own}" if lower is not None else f"{own}:"
