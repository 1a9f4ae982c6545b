"""Lines of a user's code whose result goes by the hash of a string, which is salted.

Processes that are forked from one share its salt, and with it the order of their sets; those of
torchrun do not. Where there is such a line, ranks are not forked.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterable, Iterator, Sequence, Set
from pathlib import Path
from types import ModuleType
from typing import Any

from sumgrad.base.interpreter import shared_hash_seed
from sumgrad.subjects.users_line import is_of_users_own

MOST_LINES = 5  # one is enough
_SETS = {"set", "frozenset"}
_OF_SETS = {"union", "intersection", "difference", "symmetric_difference"}
_IN_ORDER = {"list", "tuple", "iter", "enumerate", "zip", "map", "filter", "next", "dict"}
_SCOPES = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def is_salted() -> bool:
    """Whether each process that is started anew has a salt of its own."""
    return shared_hash_seed(os.environ) is None


def hashed_lines(modules: Iterable[Any] | None = None) -> tuple[str, ...]:
    """`file.py:12`, of the users' own modules among these; of all that this process has imported
    where none are given. None at all where all processes share one salt."""
    found: list[str] = []
    if not is_salted():
        return ()
    for module in [*sys.modules.values()] if modules is None else modules:
        if (path := _users_file(module)) is None:
            continue
        try:
            text = path.read_text()
            found += [f"{path.name}:{line}" for line in lines_by_hash(text)]
        except (OSError, ValueError, SyntaxError):
            continue
        if len(found) >= MOST_LINES:
            break
    return tuple(found[:MOST_LINES])


def used_by(module: Any) -> list[Any]:
    """A module and the users' own ones whose names stand in it, and in these, and so on."""
    found, left = {id(module): module}, [module]
    while left:
        for held in [*vars(left.pop()).values()]:
            other = sys.modules.get(str(getattr(held, "__module__", None)), held)
            if id(other) not in found and _users_file(other) is not None:
                found[id(other)] = other
                left.append(other)
    return [*found.values()]


def _users_file(module: Any) -> Path | None:
    path = getattr(module, "__file__", None) if isinstance(module, ModuleType) else None
    is_own = isinstance(path, str) and path.endswith(".py") and is_of_users_own(path)
    return Path(path) if is_own and path else None


def lines_by_hash(text: str) -> list[int]:
    """The lines in which a set is gone through in its order, or a hash is asked for."""
    tree = ast.parse(text)
    attributes = {n for n in _Sets([*ast.walk(tree)]).names if "." in n}  # of all methods
    return sorted({*_in_scope(tree, attributes)})


def _in_scope(scope: ast.AST, known: Set[str]) -> Iterator[int]:
    """Of what has names of its own: the file, a class or a function. known: names of sets there."""
    nodes = [*_own(scope)]
    sets = _Sets(nodes, known)
    for node in nodes:
        yield from (one.lineno for one in _gone_through(node) if sets.has(one))
        if _is_hash(node) and not _is_hash_method(scope):
            yield node.lineno  # type: ignore[attr-defined]
        if isinstance(node, _SCOPES):
            yield from _in_scope(node, sets.names)


def _own(scope: ast.AST) -> Iterator[ast.AST]:
    """All below it, but for what is below another that has names of its own."""
    for node in ast.iter_child_nodes(scope):
        yield node
        if not isinstance(node, _SCOPES):
            yield from _own(node)


def _is_hash(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "hash"


def _gone_through(node: ast.AST) -> list[ast.expr]:
    """What a node takes the elements of, one after the other."""
    if isinstance(node, ast.For | ast.comprehension):
        return [node.iter]
    if isinstance(node, ast.Starred):
        return [node.value]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.args if node.func.id in _IN_ORDER else []
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return [node.func.value] if node.func.attr == "pop" and not node.args else []
    return []


class _Sets:
    """Which expressions are sets, as they are written. nodes: of one scope; known: names of sets
    around it."""

    def __init__(self, nodes: Sequence[ast.AST], known: Set[str] = frozenset()) -> None:
        self.names = {*known}
        for _ in range(2):  # a set that is made of one
            for node in nodes:
                if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                    if node.value is not None and self.has(node.value):
                        self.names |= {ast.unparse(target) for target in targets}

    def has(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Set):
            return not all(isinstance(e, ast.Constant) and not isinstance(e.value, str | bytes)
                           for e in node.elts)  # fmt: skip
        if isinstance(node, ast.SetComp):
            return True
        if isinstance(node, ast.BinOp):
            bitwise = isinstance(node.op, ast.BitOr | ast.BitAnd | ast.Sub | ast.BitXor)
            # What is left of one is as that one is.
            of = [node.left] if isinstance(node.op, ast.Sub) else [node.left, node.right]
            return bitwise and any(self.has(e) or _keys(e) for e in of)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            return node.func.id in _SETS and not _is_range(node.args)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            return node.func.attr in _OF_SETS
        return isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node) in self.names


def _keys(node: ast.expr) -> bool:
    called = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    return called and not node.args and node.func.attr == "keys"  # type: ignore[attr-defined]


def _is_range(given: list[ast.expr]) -> bool:
    """Whether a set is made of whole numbers, whose hash is the number."""
    return bool(given) and all(
        isinstance(e, ast.Call) and isinstance(e.func, ast.Name) and e.func.id == "range"
        for e in given
    )


def _is_hash_method(scope: ast.AST) -> bool:
    return isinstance(scope, ast.FunctionDef) and scope.name == "__hash__"
