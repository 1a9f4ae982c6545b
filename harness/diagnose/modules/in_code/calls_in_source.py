"""Which functions of a file one of them calls, as they stand in its source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MOST_DEEP = 3  # calls within calls
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True, kw_only=True)
class Called:
    """line: `PATH:12`, of the `def`. unread: arguments that it never reads."""

    name: str
    line: str
    unread: tuple[str, ...] = ()


def called_from(line: str) -> list[Called]:
    """Functions of the same file that the one in which `PATH:12` is calls, and those that they
    call: the nearest first. Nothing where the file cannot be read."""
    path, _, number = line.rpartition(":")
    try:
        source = _Source(ast.parse(Path(path).read_text()))
        begin = source.around(int(number))
    except (OSError, ValueError, SyntaxError):
        return []
    if begin is None:
        return []
    found: dict[Function, None] = {}
    todo = [begin]
    for _ in range(MOST_DEEP):
        todo = [one for of in todo for one in source.calls(*of) if one[0] not in found]
        found |= {function: None for function, _ in todo}
    found.pop(begin[0], None)
    return [Called(name=one.name, line=f"{path}:{one.lineno}", unread=_unread(one))
            for one in found]  # fmt: skip


class _Source:
    """Of one file: its functions and classes by name, and the methods of these."""

    def __init__(self, tree: ast.Module) -> None:
        self._functions = {one.name: one for one in tree.body if isinstance(one, FUNCTION)}
        classes = [one for one in ast.walk(tree) if isinstance(one, ast.ClassDef)]
        self._classes = {one.name: one for one in classes}
        self._within = [(one, None) for one in self._functions.values()] + [
            (method, of.name)
            for of in classes
            for method in of.body
            if isinstance(method, FUNCTION)
        ]

    def around(self, line: int) -> tuple[Function, str | None] | None:
        """The function in which a line is, and the class whose it is."""
        for function, of in self._within:
            first = min([function.lineno, *(d.lineno for d in function.decorator_list)])
            if first <= line <= (function.end_lineno or first):
                return function, of
        return None

    def calls(self, function: Function, of: str | None) -> Iterator[tuple[Function, str | None]]:
        """Those that it calls. of: the class that `self` and `cls` are in it."""
        for node in ast.walk(function):
            if not isinstance(node, ast.Call):
                continue
            called = node.func
            if isinstance(called, ast.Name):
                own = self._functions.get(called.id)
                if own is not None:
                    yield own, None
            elif isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name):
                base = called.value.id
                whose = of if base in ("self", "cls") else base
                method = self._method(whose, called.attr) if whose in self._classes else None
                if method is not None:
                    yield method, whose

    def _method(self, of: str | None, name: str) -> Function | None:
        """Of a class, or of the first of its bases that has it."""
        own = self._classes.get(of or "")
        for one in own.body if own is not None else ():
            if isinstance(one, FUNCTION) and one.name == name:
                return one
        for base in own.bases if own is not None else ():
            found = self._method(base.id, name) if isinstance(base, ast.Name) else None
            if found is not None:
                return found
        return None


def _unread(function: Function) -> tuple[str, ...]:
    """Of its arguments those that no line reads; not such that are called so, as `_`."""
    of = function.args
    read = {node.id for node in ast.walk(function)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}  # fmt: skip
    names = [one.arg for one in (*of.posonlyargs, *of.args, *of.kwonlyargs)]
    given = ("self", "cls", "ctx")
    return tuple(n for n in names if n not in read and n not in given and not n.startswith("_"))
