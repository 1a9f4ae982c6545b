"""What may go the other way: a product from the left or the right, transposed or not, a shift, a
running sum, the letters of an einsum, the place of a new dimension, what is chosen and what else.

In: an expression of a user's code. Out: what it may have been meant to be.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from itertools import combinations

from sumgrad.diagnose.modules.trying.edits.source import Text, as_one, name_called, parts_of

RUNNING = {"cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"}
MOST_LETTERS = 6  # pairs of one operand
OTHER_END = {"min": "max", "max": "min"}  # of a clamp
REDUCE_OPS = ("ReduceOp.SUM", "ReduceOp.AVG", "ReduceOp.MAX", "ReduceOp.MIN")
Kind = Callable[[ast.expr], str]


def the_other_way(node: ast.expr, text: Text, kind: Kind) -> Iterator[str]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        yield from _of_a_product(node, text, kind)
    elif isinstance(node, ast.Call):
        name = name_called(node).rpartition(".")[2]
        if name == "roll":
            yield from _shifted_back(node, text)
        elif name in RUNNING:
            yield from _running(node, name, text)
        elif name == "einsum":
            yield from _other_letters(node, text)
        elif name in ("where", "lerp"):
            yield from _of_two_kinds(node, name, text)
        elif name in ("clamp", "clip", "clamp_"):
            yield from _at_the_other_end(node, text)
    elif isinstance(node, ast.Subscript):
        yield from _dimension_elsewhere(node, text)
    elif isinstance(node, ast.Tuple) and isinstance(node.ctx, ast.Load):
        yield from _in_another_order(node, text)
    elif isinstance(node, ast.Attribute) and text(node).endswith(REDUCE_OPS):
        others = [one.partition(".")[2] for one in REDUCE_OPS]
        yield from (f"{text(node.value)}.{one}" for one in others if one != node.attr)


def _of_a_product(node: ast.BinOp, text: Text, kind: Kind) -> Iterator[str]:
    one, two = as_one(node.left, text), as_one(node.right, text)
    yield f"{two} @ {one}"
    for of, transposed in ((node.left, f"{one}.mT @ {two}"), (node.right, f"{one} @ {two}.mT")):
        if _may_be_square(kind(of)):
            yield transposed


def _may_be_square(kind: str) -> bool:
    """Or is not known."""
    words = kind.split(" ")
    sizes = words[2].split("x") if len(words) > 2 else []
    return not kind or (len(sizes) > 1 and sizes[-1] == sizes[-2])


def _given(node: ast.Call, text: Text) -> tuple[str, list[ast.expr]]:
    """Of what it is called, and the other arguments: `x` of `x.roll(1)` and `torch.roll(x, 1)`."""
    function = node.func
    of_torch = not isinstance(function, ast.Attribute) or text(function.value) in ("torch", "F")
    if of_torch:
        return (as_one(node.args[0], text) if node.args else ""), node.args[1:]
    assert isinstance(function, ast.Attribute)
    return as_one(function.value, text), node.args


def _shifted_back(node: ast.Call, text: Text) -> Iterator[str]:
    of, given = _given(node, text)
    shift = given[0] if given else next((k.value for k in node.keywords if k.arg == "shifts"), None)
    if not of or shift is None or isinstance(shift, ast.Tuple | ast.List):
        return
    back = shift.operand if isinstance(shift, ast.UnaryOp) else None
    shown = f"-{as_one(shift, text)}" if back is None else text(back)
    rest = [*map(text, given[1:]), *(text(k) for k in node.keywords if k.arg != "shifts")]
    yield f"{of}.roll({', '.join([shown, *rest])})"


def _running(node: ast.Call, name: str, text: Text) -> Iterator[str]:
    """From the other end; without what stands at each place itself."""
    of, given = _given(node, text)
    named = [k.value for k in node.keywords if k.arg == "dim"]
    if not of or len([*given, *named]) != 1:
        return
    dim = text([*given, *named][0])
    if name == "cumsum":
        yield f"({text(node)} - {of})"
    yield f"{of}.flip({dim}).{name}({dim}).flip({dim})"


def _other_letters(node: ast.Call, text: Text) -> Iterator[str]:
    """Two of one operand the other way round."""
    first = node.args[0] if node.args else None
    if not isinstance(first, ast.Constant) or not isinstance(first.value, str):
        return
    rest = [*map(text, node.args[1:]), *map(text, node.keywords)]
    ways, arrow, gives = first.value.replace(" ", "").partition("->")
    parts = [*ways.split(","), gives] if arrow else ways.split(",")
    for num, part in enumerate(parts):
        for i, j in [*combinations(range(len(part)), 2)][:MOST_LETTERS]:
            turned = [*part]
            turned[i], turned[j] = turned[j], turned[i]
            others = [*parts[:num], "".join(turned), *parts[num + 1 :]]
            inputs = others[:-1] if arrow else others
            spec = ",".join(inputs) + (f"->{others[-1]}" if arrow else "")
            yield f"{text(node.func)}({', '.join([repr(spec).replace(chr(39), chr(34)), *rest])})"


def _of_two_kinds(node: ast.Call, name: str, text: Text) -> Iterator[str]:
    """What is taken where it is so, and what is taken elsewhere."""
    function = node.func
    if node.keywords or any(isinstance(one, ast.Starred) for one in node.args):
        return
    of_torch = not isinstance(function, ast.Attribute) or text(function.value) == "torch"
    given = [*map(text, node.args)]
    if of_torch and len(given) == 3:
        order = (0, 2, 1) if name == "where" else (1, 0, 2)
        yield f"{text(function)}({', '.join(given[i] for i in order)})"
    elif isinstance(function, ast.Attribute) and not of_torch and len(given) == 2:
        own, other = as_one(function.value, text), node.args[0 if name == "lerp" else 1]
        turned = [own, given[1]] if name == "lerp" else [given[0], own]
        yield f"{as_one(other, text)}.{name}({', '.join(turned)})"


def _at_the_other_end(node: ast.Call, text: Text) -> Iterator[str]:
    if len(node.keywords) == 1 and node.keywords[0].arg in OTHER_END:
        option = node.keywords[0]
        turned = f"{OTHER_END[str(option.arg)]}={text(option.value)}"
        yield f"{text(node.func)}({', '.join([*map(text, node.args), turned])})"


def _dimension_elsewhere(node: ast.Subscript, text: Text) -> Iterator[str]:
    """`x[None]` for `x[:, None]`, where it is one dimension more that says nothing else."""
    parts = parts_of(node)
    new = [
        num for num, one in enumerate(parts) if isinstance(one, ast.Constant) and one.value is None
    ]
    plain = all(isinstance(one, ast.Slice | ast.Constant) for one in parts)
    if len(new) != 1 or not plain:
        return
    rest = [text(one) for num, one in enumerate(parts) if num != new[0]]
    rest = rest or [":"]
    for at in range(len(rest) + 1):
        yield f"{text(node.value)}[{', '.join([*rest[:at], 'None', *rest[at:]])}]"


def _in_another_order(node: ast.Tuple, text: Text) -> Iterator[str]:
    """Two that stand beside each other, which are no numbers."""
    own = [text(one) for one in node.elts]
    if any(isinstance(one, ast.Constant | ast.Slice | ast.Starred) for one in node.elts):
        return
    for i in range(len(own) - 1):
        turned = [*own[:i], own[i + 1], own[i], *own[i + 2 :]]
        yield f"({', '.join(turned)})"
