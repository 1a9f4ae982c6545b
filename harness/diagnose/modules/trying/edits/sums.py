"""Sums over ranks put into a user's code: into a Function's forward and backward, and what these
call, of which no line is seen, so that none is known to lack one; and of how much of something a
rank has.

In: a function of the user's. Out: edits that have a value of it summed over the ranks of an axis.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence

from sumgrad.diagnose.modules.trying.edits.source import (
    Function,
    Source,
    bodies,
    expressions,
    makes_groups,
    span,
    words_in,
)
from sumgrad.record.trial import SUMMED, Edit

OF_TORCH = "Function"  # torch.autograd's
ITS_OWN = ("forward", "backward", "setup_context", "apply")  # a name that others have, too


def of_functions(tree: ast.Module) -> set[Function]:
    """Methods of the Functions in a file, and what they call there, by its name."""
    classes = {one.name: one for one in ast.walk(tree) if isinstance(one, ast.ClassDef)}
    derived = {OF_TORCH}
    while more := {n for n, c in classes.items() if _bases(c) & derived} - derived:
        derived |= more
    found = {
        one
        for name in derived & {*classes}
        for one in classes[name].body
        if isinstance(one, Function)
    }
    others = [one for one in ast.walk(tree) if isinstance(one, Function)]
    others = [one for one in others if one.name not in ITS_OWN]
    while called := {f for f in others if any(f.name in words_in(one) for one in found)} - found:
        found |= called
    return found


def hands_gradients_on(function: Function) -> bool:
    """Whether it has gradients under names, as one that computes them by hand."""
    names = [one.id for one in ast.walk(function) if isinstance(one, ast.Name)]
    return any("grad" in name.lower() for name in names)


def _bases(of_class: ast.ClassDef) -> set[str]:
    return {ast.unparse(base).rpartition(".")[2] for base in of_class.bases}


def sums_in(
    function: Function, source: Source, kinds: Mapping[str, str], axes: Sequence[str]
) -> Iterator[Edit]:
    """Of what it puts under a name, and of each value that it returns."""
    for statement in _statements(function):
        for node in _values(statement, kinds):
            yield from _each(node, source, axes)


def sums_of_sizes(function: Function, source: Source, axes: Sequence[str]) -> Iterator[Edit]:
    """Of what it asks for how much of something this rank has."""
    for statement in _statements(function):
        for node in expressions(statement):
            if _is_size(node):
                yield from _each(node, source, axes)


def _statements(function: Function) -> Iterator[ast.stmt]:
    for body in bodies(function):
        yield from (statement for statement in body if not makes_groups(statement))


def _each(node: ast.expr, source: Source, axes: Sequence[str]) -> Iterator[Edit]:
    for axis in axes:
        old, (start, end) = source.of_node(node), span(node)
        new = f'{SUMMED}({old}, "{axis}")'
        yield Edit(file=source.file, start=start, end=end, old=old, new=new, over=axis)


def _is_size(node: ast.expr) -> bool:
    if isinstance(node, ast.Subscript):
        of_shape = isinstance(node.value, ast.Attribute) and node.value.attr == "shape"
        return of_shape and not isinstance(node.slice, ast.Slice)
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Name):
        return node.func.id == "len"
    method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    return method == "numel" or (method == "size" and len(node.args) == 1)


def _values(statement: ast.stmt, kinds: Mapping[str, str]) -> Iterator[ast.expr]:
    if isinstance(statement, ast.Assign | ast.AugAssign):
        one = isinstance(statement, ast.AugAssign) or len(statement.targets) == 1
        target = statement.target if isinstance(statement, ast.AugAssign) else statement.targets[0]
        if one and isinstance(target, ast.Name) and _is_tensor(kinds.get(target.id, "")):
            yield statement.value
    elif isinstance(statement, ast.Return) and statement.value is not None:
        given = statement.value
        for node in given.elts if isinstance(given, ast.Tuple) else (given,):
            known = not isinstance(node, ast.Name | ast.Attribute | ast.Constant)
            if known or (isinstance(node, ast.Name) and _is_tensor(kinds.get(node.id, ""))):
                yield node


def _is_tensor(kind: str) -> bool:
    return kind.startswith("tensor float")
