"""Edits of names in a user's code: two of a kind exchanged, one for another throughout, a copy of
what stands under one.

In: a statement or a function, and of what kind is what stands under each name. Out: edits.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from sumgrad.diagnose.modules.trying.edits.source import (
    MADE_TOGETHER,
    SIMPLE,
    Function,
    Source,
    Text,
    bodies,
    expressions,
    makes_groups,
    name_called,
    names_in,
    span,
    words_in,
)
from sumgrad.record.trial import Edit

MOST_USES = 6  # of a name, in a function in which it is another throughout
KEPT_BY = {"append", "appendleft", "put", "setdefault", "insert", "add"}
VIEWS = {"detach", "view", "view_as", "t", "transpose", "permute", "flatten", "squeeze",
         "unsqueeze", "narrow", "select", "unflatten", "contiguous", "reshape"}  # fmt: skip
MOST_THROUGH = 12  # of one function
# What is called of a name, and makes no other tensor of it.
NO_FUNCTIONS = {"range", "len", "print", "list", "tuple", "set", "dict", "sum", "float", "int",
                "enumerate", "zip", "reversed", "sorted", "isinstance", "all_reduce", "broadcast",
                "append", "extend", "next", "iter", "max", "min", "backward", "str",
                "get_rank", "get_world_size", "send", "recv", "isend", "irecv"}  # fmt: skip
Places = Mapping[str, Sequence[ast.expr]]


def two_exchanged(
    statement: ast.stmt, source: Source, kinds: Mapping[str, str], axes: Sequence[str]
) -> Iterator[Edit]:
    """Two names of one kind, or two axes, each where the other is, in all of a statement."""
    if not isinstance(statement, (*SIMPLE, ast.Return)):
        return
    places: dict[str, list[ast.expr]] = {}
    for node in expressions(statement):
        own = source.of_node(node)
        of_axis = isinstance(node, ast.Constant) and node.value in axes
        if of_axis or (own in kinds and _is_read(node)):
            places.setdefault(own, []).append(node)
    for one, its in places.items():
        for other, others in places.items():
            if one < other and kinds.get(one, "an axis") == kinds.get(other, "an axis"):
                exchanged = {one: other, other: one}
                yield _with_others((*its, *others), source, exchanged, statement)


def renamed_throughout(
    function: Function, source: Source, kinds: Mapping[str, str], made: Mapping[str, int]
) -> Iterator[Edit]:
    """Another name of the same kind and size wherever one is read, where that is several times."""
    reads: dict[str, list[ast.Name]] = {}
    for node in ast.walk(function) if MADE_TOGETHER.isdisjoint(words_in(function)) else ():
        if isinstance(node, ast.Name) and _is_read(node):
            reads.setdefault(node.id, []).append(node)
    for one, nodes in reads.items():
        kind = kinds.get(one, "")
        if not 1 < len(nodes) <= MOST_USES or not kind.startswith(("tensor ", "parameter ")):
            continue
        first = min(node.lineno for node in nodes)
        for other, its in kinds.items():
            if other != one and its == kind and made.get(other, first) < first:
                yield replace(_with_others(nodes, source, {one: other}), sure=False)


def through_the_same(
    function: Function, text: Text, made: Mapping[str, int]
) -> Iterator[tuple[ast.expr, str]]:
    """What goes through a function elsewhere, as `x` where `self.norm(x)` is there, too."""
    every = [one for body in bodies(function) for statement in body
             if not makes_groups(statement) for one in expressions(statement)]  # fmt: skip
    calls: dict[str, dict[str, ast.Call]] = {}
    for one in every:
        if isinstance(one, ast.Call) and len(one.args) == 1 and not one.keywords:
            given, called = one.args[0], name_called(one).rpartition(".")[2]
            if isinstance(given, ast.Name) and called not in NO_FUNCTIONS:
                calls.setdefault(given.id, {})[text(one)] = one
    found = 0
    for node in every:
        if not isinstance(node, ast.Name) or not isinstance(node.ctx, ast.Load):
            continue
        for shown, call in calls.get(node.id, {}).items():
            there = all(made.get(name, 0) < node.lineno for name in names_in(call))
            if node is not call.args[0] and there and found < MOST_THROUGH:
                found += 1
                yield node, shown


def cloned(statement: ast.stmt, source: Source, kinds: Mapping[str, str]) -> Iterator[Edit]:
    """A copy of what is kept for later, or handed on, which may be written into meanwhile."""
    text = source.of_node
    kept = [one for one in _kept(statement)
            if kinds.get(text(one), "tensor").startswith(("tensor", "parameter"))]  # fmt: skip
    for nodes in ([kept] if len(kept) > 1 else []) + [[one] for one in kept]:
        start, end = span(nodes[0])[0], span(nodes[-1])[1]
        ends = [span(one)[1] for one in nodes]
        between = [source.piece(e, span(one)[0]) for e, one in zip(ends, nodes[1:], strict=False)]
        each = zip(nodes, [*between, ""], strict=True)
        new = "".join(f"{text(one)}.clone(){then}" for one, then in each)
        old = source.piece(start, end)
        yield Edit(file=source.file, start=start, end=end, old=old, new=new)


def _kept(statement: ast.stmt) -> Iterator[ast.expr]:
    value: ast.expr | None = None
    if isinstance(statement, ast.Assign):
        target, given = statement.targets[0], statement.value
        held = isinstance(given, ast.Name | ast.Attribute | ast.Call | ast.ListComp)
        named = isinstance(target, ast.Name) and held
        kept = named or isinstance(target, ast.Attribute | ast.Subscript)
        value = given if kept else None
    elif isinstance(statement, ast.Return):
        value = statement.value
    elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        function = statement.value.func
        if isinstance(function, ast.Attribute) and function.attr in KEPT_BY:
            value = statement.value.args[-1] if statement.value.args else None
    value = value.elt if isinstance(value, ast.ListComp) else value
    several = value.elts if isinstance(value, ast.Tuple | ast.List) else [value]
    yield from (one for one in several if one is not None and _may_share_memory(one))


def _may_share_memory(node: ast.expr) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr in VIEWS and _may_share_memory(node.func.value)
    return isinstance(node, ast.Name | ast.Attribute | ast.Subscript)


def kept_as_it_was(function: Function, source: Source) -> Iterator[Edit]:
    """What stands under an attribute and is written into, a copy of it in its place throughout."""
    places: dict[str, list[ast.Attribute]] = {}
    written = {source.of_node(one) for one in _written_into(function)}
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and _is_read(node):
            places.setdefault(source.of_node(node), []).append(node)
    for own, nodes in places.items():
        first = min(nodes, key=lambda node: span(node)[0])
        statements = (one for body in bodies(function) for one in body if isinstance(one, SIMPLE))
        within = [one for one in statements if first in ast.walk(one)]
        if own not in written or len(nodes) < 2 or not within:
            continue
        name = f"own_{own.rpartition('.')[2]}"
        last = max(nodes, key=lambda node: span(node)[1])
        edit = _with_others(nodes, source, {own: name})
        start, end = span(within[0])[0], span(last)[1]
        new = f"{name} = {own}.clone(); {source.piece(start, edit.start)}{edit.new}"
        yield Edit(file=source.file, start=start, end=end, old=source.piece(start, end), new=new)


def _written_into(function: Function) -> Iterator[ast.expr]:
    """What a method that ends in `_` is called of, what something is added to, or put into."""
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            called = node.func
            while isinstance(called.value, ast.Call):
                if not isinstance(called.value.func, ast.Attribute):
                    break
                called = called.value.func
            if called.attr.endswith("_") and not called.attr.startswith("_"):
                yield called.value
        elif isinstance(node, ast.AugAssign):
            yield node.target
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            yield node.value


def _is_read(node: ast.expr) -> bool:
    return isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load)


def _with_others(
    nodes: Sequence[ast.expr],
    source: Source,
    others: Mapping[str, str],
    within: ast.stmt | None = None,
) -> Edit:
    """What stands from the first of these to the last, or a statement, with others in place of
    them."""
    ordered = sorted(nodes, key=lambda node: span(node)[0])
    start, end = span(within) if within else (span(ordered[0])[0], span(ordered[-1])[1])
    new, at = "", start
    for node in ordered:
        first, last = span(node)
        new += source.piece(at, first) + others[source.of_node(node)]
        at = last
    new += source.piece(at, end)
    return Edit(file=source.file, start=start, end=end, old=source.piece(start, end), new=new)
