"""What may be done that should not be: a transpose, a power, a way that is cut, another of what is
taken by its name.

In: an expression or a statement of a user's code. Out: what it may have been meant to be.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence

from sumgrad.diagnose.modules.trying.edits.source import Text, as_one, name_called

TURNED = ("T", "mT", "H", "mH", "data")
CUTS = ("no_grad", "inference_mode")
POWERS: Mapping[float, Sequence[str]] = {0.5: ("1",), 1: ("0.5", "2"), 2: ("0.5",)}
MOST_KEYS = 6


def not_done(node: ast.expr, text: Text) -> Iterator[str]:
    if isinstance(node, ast.Attribute) and node.attr in TURNED:
        yield text(node.value)
    elif isinstance(node, ast.Call) and name_called(node) == "item" and not node.args:
        if isinstance(node.func, ast.Attribute):
            yield text(node.func.value)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        yield as_one(node.left, text)
        negative = isinstance(node.right, ast.UnaryOp) and isinstance(node.right.op, ast.USub)
        power = node.right.operand if isinstance(node.right, ast.UnaryOp) else node.right
        if isinstance(power, ast.Constant) and isinstance(power.value, int | float):
            for other in POWERS.get(power.value, ()):
                yield f"{as_one(node.left, text)} ** {'-' * negative}{other}"


def keys_of(functions: Sequence[ast.AST]) -> Mapping[str, Sequence[str]]:
    """By what is indexed with words in these functions: the words."""
    found: dict[str, dict[str, None]] = {}
    every = (one for function in functions for one in ast.walk(function))
    for index in (one for one in every if isinstance(one, ast.Subscript)):
        at = index.slice
        if isinstance(at, ast.Constant) and isinstance(at.value, str):
            found.setdefault(ast.unparse(index.value), {})[at.value] = None
    return {of: [*its] for of, its in found.items()}


def under_another_key(
    node: ast.Subscript, text: Text, keys: Mapping[str, Sequence[str]], but: Sequence[str]
) -> Iterator[str]:
    """but: words that are none of these, as axes are."""
    at = node.slice
    if not isinstance(at, ast.Constant) or not isinstance(at.value, str) or at.value in but:
        return
    others = [key for key in keys.get(ast.unparse(node.value), ()) if key != at.value]
    for other in others[:MOST_KEYS]:
        yield f'{text(node.value)}["{other}"]'


def not_cut(statement: ast.With) -> Iterator[tuple[ast.expr, str]]:
    """With gradients, in place of without."""
    for item in statement.items:
        made = item.context_expr
        if isinstance(made, ast.Call) and name_called(made).rpartition(".")[2] in CUTS:
            yield made, "torch.enable_grad()"
