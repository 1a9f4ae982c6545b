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

ONCE = {"reversed", "map", "filter", "zip", "iter", "enumerate", "parameters", "named_parameters"}
TAKES_ALL = {"list", "tuple", "set", "dict", "sorted", "sum", "max", "min", "any", "all", "zip",
             "enumerate", "map", "filter", "join", "extend", "next"}  # fmt: skip
# What gives one of its arguments: from which on.
OF_SEVERAL = {"min": 0, "max": 0, "minimum": 0, "maximum": 0, "fmin": 0, "fmax": 0, "where": 1}
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
    if name == "groupby" and node.args:  # of what is not sorted, one group may come again
        by = [*map(text, node.args[1:]), *map(text, node.keywords)]
        key = ", ".join(one if one.startswith("key=") else f"key={one}" for one in by)
        in_order = f"sorted({text(node.args[0])}{', ' if key else ''}{key})"
        yield f"{text(node.func)}({', '.join([in_order, *by])})"
    for given in node.args if name not in TAKES_ALL else ():
        if is_used_up(given):
            every = [kept_in_full(a, text) if a is given else text(a) for a in node.args]
            yield f"{text(node.func)}({', '.join([*every, *map(text, node.keywords)])})"
    if name == "argsort":  # of each its place in order, and not which one is at each
        of_torch = isinstance(node.func, ast.Attribute) and text(node.func.value) == "torch"
        named = [one.value for one in node.keywords if one.arg == "dim"]
        yield f"{text(node)}.argsort({', '.join(map(text, [*node.args[of_torch:], *named][:1]))})"
    if name == "sorted" and len(node.args) == 1 and not node.keywords:
        yield f"list({text(node.args[0])})"
    if name in OF_SEVERAL and len(node.args) > OF_SEVERAL[name] + 1 and not node.keywords:
        yield from map(text, node.args[OF_SEVERAL[name] :])
    if name == "pop" and len(node.args) < 2 and not node.keywords:
        yield f"{text(node.func)}({'' if node.args else '0'})"
    if name == "zip" and len(node.args) == 2 and all(map(may_be_turned, node.args)):
        one, two = map(text, node.args)
        rest = "".join(f", {text(keyword)}" for keyword in node.keywords)
        yield f"zip(reversed(list({one})), {two}{rest})"
        yield f"zip({one}, reversed(list({two})){rest})"


def added_one_by_one(
    node: ast.expr, text: Text, is_several: Callable[[ast.expr], bool]
) -> Iterator[str]:
    """Two lists, or tuples, of tensors, of which `+` makes a longer one. The first may be empty."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        one, two = as_one(node.left, text), as_one(node.right, text)
        if is_several(node.left) and is_several(node.right):
            yield f"([a + b for a, b in zip({one}, {two})] if {one} else {two})"


def is_used_up(node: ast.expr) -> bool:
    """Whether what it gives is gone after one loop over it."""
    return isinstance(node, ast.GeneratorExp) or (
        isinstance(node, ast.Call) and name_called(node) in ONCE
    )


def kept_in_full(node: ast.expr, text: Text) -> str:
    """The same for any number of loops."""
    own = text(node)
    in_brackets = isinstance(node, ast.GeneratorExp) and not own.startswith("(")
    return f"list(({own}))" if in_brackets else f"list({own})"


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
    elif isinstance(at, ast.Name | ast.Attribute):
        yield from (f"{base}[{text(at)} + 1]", f"{base}[{text(at)} - 1]")
    parts = parts_of(node)
    cut = [isinstance(part, ast.Constant) and part.value is ... for part in parts]
    for num, part in enumerate(parts):
        plain = isinstance(part, ast.Slice) and part.step is None
        dim = num - len(parts) if any(cut[:num]) else num
        others = _other_slices(part, text) if isinstance(part, ast.Slice) and plain else ()
        counted = _counted_from_the_front(part, base, dim, text) if plain else ()
        for other in (*counted, *others, *other_ends(part, text)):
            yield with_part(node, num, other, text)


def _counted_from_the_front(part: ast.expr, base: str, dim: int, text: Text) -> Iterator[str]:
    """`x[-n:]` as `x[len(x) - n:]`, and `x[:-n]` so: where n is zero the one is all, the other
    nothing."""
    if not isinstance(part, ast.Slice) or (part.lower is None) == (part.upper is None):
        return
    bound = part.upper if part.lower is None else part.lower
    if isinstance(bound, ast.UnaryOp) and isinstance(bound.op, ast.USub):
        if isinstance(bound.operand, ast.Constant):
            return
        size = f"{base}.shape[{dim}]" if dim else f"len({base})"
        at = f"{size} - {as_one(bound.operand, text)}"
        yield f":{at}" if part.lower is None else f"{at}:"


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
