"""Two operations the other way round: `f(g(x))` and `g(f(x))`, `f(a + b)` and `f(a) + b`,
`f(a * b)` and `f(a) * f(b)`, `f(a) ** n` and `f(a ** n)`, `a == b | c`, which is `a == (b | c)`,
and `(a == b) | c`. A reduction that comes too early or too late is such a one.

In: an expression. Out: the expressions that it may have been meant to be.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sumgrad.diagnose.modules.trying.edits.source import Text, as_one, name_called
from sumgrad.diagnose.modules.trying.edits.written_for import BITS, COMPARES, SIGNS

MODULES = ("torch", "F", "dist", "nn", "nn.functional", "torch.nn.functional", "self")
# What gives no tensor, or is no operation on one.
NO_STEPS = {"range", "len", "isinstance", "print", "super", "zip", "enumerate", "getattr", "append",
            "item", "tolist", "size", "numel", "backward", "items", "keys", "values", "parameters",
            "group", "dim", "list", "tuple", "dict", "set", "int", "float", "str", "next", "iter",
            "reversed", "sorted", "new_group", "wait",
            # What only shapes, or copies: before something else or after it, it is the same, or no
            # such thing.
            "contiguous", "clone", "detach", "to", "double", "view", "reshape", "flatten",
            "unflatten", "transpose", "t", "permute", "squeeze", "unsqueeze", "expand", "expand_as",
            "view_as", "chunk", "split", "tensor_split", "unbind"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Step:
    """What is done to something: `before(x, after` of a call, `x.after` of a method or an index."""

    inner: ast.expr
    before: str
    after: str

    def to(self, text: str) -> str:
        return f"{self.before}{text}{self.after}"


def otherwise_nested(
    node: ast.expr,
    text: Text,
    is_tensor: Callable[[ast.expr], bool],
    may_be_tensor: Callable[[ast.expr], bool],
) -> Iterator[str]:
    """is_tensor, may_be_tensor: what is known of an expression."""
    outer = _step(node, text, is_tensor)
    if outer is not None:
        inner = _step(outer.inner, text, is_tensor)
        if inner is not None:
            yield inner.to(outer.to(as_one(inner.inner, text)))
        yield from _without_the_last_term(outer, text)
        yield from _of_both_and_within(outer, text, is_tensor)
    if isinstance(node, ast.Call):
        yield from _factor_outside(node, text)
        if len(node.args) > 1 and all(_multiplies(one) for one in node.args[:2]):
            yield from _with_one_factor(node, text)
    elif isinstance(node, ast.Compare):
        yield from _compared_first(node, text)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        step = _step(node.left, text, is_tensor)
        if step is not None and may_be_tensor(step.inner):
            power = f"{as_one(step.inner, text)} ** {as_one(node.right, text)}"
            yield step.to(power if step.before else f"({power})")
    elif isinstance(node, ast.BinOp) and isinstance(
        node.op, ast.Add | ast.Sub | ast.Mult | ast.Div
    ):
        sign = SIGNS[type(node.op)]
        for own, other in ((node.left, node.right), (node.right, node.left)):
            step = _step(own, text, is_tensor)
            if step is not None and may_be_tensor(step.inner):
                pair = (as_one(step.inner, text), as_one(other, text))
                one, two = pair if own is node.left else pair[::-1]
                yield step.to(f"{one} {sign} {two}" if step.before else f"({one} {sign} {two})")


def _factor_outside(node: ast.Call, text: Text) -> Iterator[str]:
    """`f(a, b * c)` as `f(a, b) * c`, of what is linear."""
    if name_called(node) in NO_STEPS:
        return
    given = [*map(text, node.args), *map(text, node.keywords)]
    for at, one in enumerate(node.args):
        if isinstance(one, ast.BinOp) and isinstance(one.op, ast.Mult | ast.Div):
            pairs = [(one.left, one.right)]
            pairs += [(one.right, one.left)] if isinstance(one.op, ast.Mult) else []
            for kept, by in pairs:
                others = ", ".join([*given[:at], text(kept), *given[at + 1 :]])
                sign = SIGNS[type(one.op)]
                yield f"({text(node.func)}({others}) {sign} {as_one(by, text)})"


def _with_one_factor(node: ast.Call, text: Text) -> Iterator[str]:
    """`f(a * w, b * w)` as `f(a, b) * w`: a weight of what is compared, and not of each."""
    first, second, *rest = node.args
    if not isinstance(first, ast.BinOp) or not isinstance(second, ast.BinOp):
        return
    for one, by in ((first.left, first.right), (first.right, first.left)):
        for two, also in ((second.left, second.right), (second.right, second.left)):
            if text(by) == text(also):
                given = [text(one), text(two), *map(text, rest), *map(text, node.keywords)]
                yield f"({text(node.func)}({', '.join(given)}) * {as_one(by, text)})"


def brackets_elsewhere(node: ast.BinOp, text: Text) -> Iterator[str]:
    """`(a - b) * c` as `a * c - b` and as `a - b * c`, and these as that."""
    left, right = node.left, node.right
    if isinstance(node.op, ast.Mult | ast.Div) and _adds(left):
        assert isinstance(left, ast.BinOp)
        sign, by = SIGNS[type(left.op)], f"{SIGNS[type(node.op)]} {as_one(right, text)}"
        one, other = as_one(left.left, text), as_one(left.right, text)
        yield from (f"({one} {by} {sign} {other})", f"({one} {sign} {other} {by})")
    if isinstance(node.op, ast.Mult) and _adds(right):
        assert isinstance(right, ast.BinOp)
        by, sign = text(left), SIGNS[type(right.op)]
        one, other = as_one(right.left, text), as_one(right.right, text)
        yield from (f"({by} * {one} {sign} {other})", f"({one} {sign} {by} * {other})")
    if _adds(node):
        sign = SIGNS[type(node.op)]
        for term, own in ((left, 0), (right, 1)):
            if isinstance(term, ast.BinOp) and isinstance(term.op, ast.Mult | ast.Div):
                by = f"{SIGNS[type(term.op)]} {as_one(term.right, text)}"
                terms = [text(left), as_one(right, text)]
                terms[own] = as_one(term.left, text)
                yield f"({terms[0]} {sign} {terms[1]}) {by}"


def _multiplies(node: ast.expr) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)


def _adds(node: ast.expr) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub)


def _compared_first(node: ast.Compare, text: Text) -> Iterator[str]:
    """Before what stands between bits on one side of it."""
    left, right = node.left, node.comparators[0]
    sign = COMPARES.get(type(node.ops[0])) if len(node.ops) == 1 else None
    if sign is None:
        return
    if isinstance(right, ast.BinOp) and type(right.op) in BITS:
        first = f"({as_one(left, text)} {sign} {as_one(right.left, text)})"
        yield f"({first} {BITS[type(right.op)]} {as_one(right.right, text)})"
    if isinstance(left, ast.BinOp) and type(left.op) in BITS:
        last = f"({as_one(left.right, text)} {sign} {as_one(right, text)})"
        yield f"({as_one(left.left, text)} {BITS[type(left.op)]} {last})"


def _without_the_last_term(outer: _Step, text: Text) -> Iterator[str]:
    within = outer.inner
    if not isinstance(within, ast.BinOp) or type(within.op) not in SIGNS:
        return
    sign, (one, two) = (
        SIGNS[type(within.op)],
        (as_one(within.left, text), as_one(within.right, text)),
    )
    yield f"({outer.to(one)} {sign} {two})"
    if sign in ("*", "/"):
        yield f"({outer.to(one)} {sign} {outer.to(two)})"
    if sign in ("+", "*"):
        yield f"({one} {sign} {outer.to(two)})"


def _of_both_and_within(
    outer: _Step, text: Text, is_tensor: Callable[[ast.expr], bool]
) -> Iterator[str]:
    """`f(a / g(b))` as `f(a) / g(f(b))`: a quotient of sums, and what keeps it from zero after."""
    within = outer.inner
    if isinstance(within, ast.BinOp) and isinstance(within.op, ast.Mult | ast.Div):
        step = _step(within.right, text, is_tensor)
        if step is not None:
            one, two = outer.to(as_one(within.left, text)), outer.to(as_one(step.inner, text))
            yield f"({one} {SIGNS[type(within.op)]} {step.to(two)})"


def _step(node: ast.expr, text: Text, is_tensor: Callable[[ast.expr], bool]) -> _Step | None:
    if isinstance(node, ast.Subscript):
        key = isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str)
        of_shape = isinstance(node.value, ast.Attribute)
        return None if key or of_shape else _Step(node.value, "", f"[{text(node.slice)}]")
    if not isinstance(node, ast.Call):
        return None
    function = node.func
    name = name_called(node)
    if name in NO_STEPS or any(isinstance(a, ast.Starred | ast.GeneratorExp) for a in node.args):
        return None
    keywords = [text(one) for one in node.keywords]
    if isinstance(function, ast.Attribute) and _is_method(function, text, is_tensor):
        given = ", ".join([*map(text, node.args), *keywords])
        return _Step(function.value, "", f".{function.attr}({given})")
    if not node.args:
        return None
    rest = ", ".join([*map(text, node.args[1:]), *keywords])
    return _Step(node.args[0], f"{text(function)}(", f", {rest})" if rest else ")")


def _is_method(function: ast.Attribute, text: Text, is_tensor: Callable[[ast.expr], bool]) -> bool:
    """Of what is known to be a tensor, or of what is no name, which may be one."""
    receiver = function.value
    if function.attr == "apply" or text(receiver) in MODULES:
        return False
    return is_tensor(receiver) or not isinstance(receiver, ast.Name | ast.Attribute)
