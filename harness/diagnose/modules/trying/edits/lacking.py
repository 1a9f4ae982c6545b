"""What an expression may lack: a one more or less, the rest to one, a not, a factor that nothing
reads, an option that is given elsewhere, a loop's own value in a function that is called later.

In: an expression, or a function, of a user's code. Out: what it may have been meant to be.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from sumgrad.diagnose.modules.trying.edits.source import (
    Function,
    Source,
    Text,
    as_one,
    name_called,
    names_in,
    names_made,
    parts_of,
    span,
    with_part,
)
from sumgrad.diagnose.modules.trying.edits.written_for import COMPARES
from sumgrad.record.trial import Edit

OF_RANKS = r"rank|coord|stage|peer|axes|group|world"  # one more of these, and ranks wait for ever
MASK = "tensor bool"
SCALARS = ("float", "tensor float64 ", "tensor float32 ", "int")  # the likeliest first
MOST_FACTORS, MOST_OPTIONS = 3, 3
COUNTED = {"range", "arange", "narrow", "tril", "triu", "diagonal", "roll", "one_hot"}
Kind = Callable[[ast.expr], str]
Options = Mapping[str, Mapping[str, ast.expr]]


def one_more_or_less(node: ast.expr, text: Text, kind: Kind) -> Iterator[str]:
    """Of numbers that are counted, and of a whole number with a name where something is counted,
    compared or cut by it: as a factor one more may be any other number by chance."""

    def others(part: ast.expr | None) -> list[str]:
        named = isinstance(part, ast.Name | ast.Attribute) and kind(part) == "int"
        if part is None or not named or re.search(OF_RANKS, text(part)):
            return []
        return [f"{text(part)} - 1", f"{text(part)} + 1"]

    if isinstance(node, ast.Call) and name_called(node) in COUNTED:
        if name_called(node) == "arange":
            yield from (f"({text(node)} - 1)", f"({text(node)} + 1)")
        given = [*map(text, node.args), *map(text, node.keywords)]
        for at, one in enumerate(node.args):
            for other in others(one):
                yield f"{text(node.func)}({', '.join([*given[:at], other, *given[at + 1 :]])})"
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        sign, right = COMPARES.get(type(node.ops[0])), node.comparators[0]
        if sign is not None:
            yield from (f"{text(node.left)} {sign} {other}" for other in others(right))
            yield from (f"{other} {sign} {text(right)}" for other in others(node.left))
    elif isinstance(node, ast.Subscript):
        for num, part in enumerate(parts_of(node)):
            if isinstance(part, ast.Slice) and part.step is None:
                lower, upper = ("" if b is None else text(b) for b in (part.lower, part.upper))
                for other in others(part.lower):
                    yield with_part(node, num, f"{other}:{upper}", text)
                for other in others(part.upper):
                    yield with_part(node, num, f"{lower}:{other}", text)


def the_rest(node: ast.expr, text: Text, kind: Kind) -> Iterator[str]:
    """Of a share what is left to one; of a mask what it leaves out."""
    if isinstance(node, ast.Constant):
        if isinstance(node.value, float) and 0 < node.value < 1:
            yield f"(1 - {text(node)})"
    elif isinstance(node, ast.Name | ast.Attribute):
        if kind(node) == "float":
            yield f"(1 - {text(node)})"
        elif kind(node).startswith("tensor bool"):
            yield f"~{text(node)}"


def with_what_is_not_read(node: ast.expr, text: Text, unread: Mapping[str, str]) -> Iterator[str]:
    """Times, and by, numbers that the function is given, or makes, and that nothing reads; times
    masks, and what they leave out. unread: their kinds."""
    if isinstance(node, ast.BinOp | ast.Call):
        factors = [name for scalar in SCALARS for name, kind in unread.items() if kind == scalar]
        for name in factors[:MOST_FACTORS]:
            yield from (f"({as_one(node, text)} * {name})", f"({as_one(node, text)} / {name})")
        masks = [name for name, kind in unread.items() if kind.startswith(MASK)]
        for name in masks[:MOST_FACTORS]:
            yield from (f"({as_one(node, text)} * {name})", f"({as_one(node, text)} * ~{name})")


def options_given(functions: Sequence[ast.AST]) -> Options:
    """By name of what these functions call: the options that it is given somewhere, and as what,
    where that is a name, an attribute or a constant."""
    found: dict[str, dict[str, ast.expr]] = {}
    every = (one for function in functions for one in ast.walk(function))
    for call in (one for one in every if isinstance(one, ast.Call)):
        for option in call.keywords:
            if option.arg and isinstance(option.value, ast.Constant | ast.Name | ast.Attribute):
                found.setdefault(name_called(call), {}).setdefault(option.arg, option.value)
    return found


def with_an_option(
    node: ast.Call, text: Text, given: Options, is_there: Callable[[str], bool]
) -> Iterator[str]:
    """As it is called elsewhere. is_there: whether a name is."""
    own = {option.arg for option in node.keywords}
    if None in own or any(isinstance(one, ast.Starred) for one in node.args):
        return
    options = [
        f"{name}={text(value)}"
        for name, value in given.get(name_called(node), {}).items()
        if name not in own and all(map(is_there, names_in(value)))
    ]
    for option in options[:MOST_OPTIONS]:
        every = [*map(text, node.args), *map(text, node.keywords), option]
        yield f"{text(node.func)}({', '.join(every)})"


def bound_at_once(function: Function, source: Source) -> Iterator[Edit]:
    """What a function that is made in a loop reads of each turn, as its own: called later, it finds
    what the last turn left."""
    for loop in ast.walk(function):
        if not isinstance(loop, ast.For):
            continue
        made = {name for one in ast.walk(loop) if isinstance(one, ast.stmt)
                for name in names_made(one)}  # fmt: skip
        for inner in ast.walk(loop):
            if not isinstance(inner, ast.Lambda | ast.FunctionDef):
                continue
            given = inner.args
            every = [*given.posonlyargs, *given.args, *given.kwonlyargs]
            own = {one.arg for one in every}
            read = sorted((_read_in(inner) & made) - own)
            if not read or not given.args or given.vararg or given.kwonlyargs or given.kwarg:
                continue
            start, end = span(given.defaults[-1] if given.defaults else given.args[-1])
            old, bound = source.piece(start, end), "".join(f", {name}={name}" for name in read)
            yield Edit(file=source.file, start=start, end=end, old=old, new=old + bound)


def _read_in(inner: ast.Lambda | ast.FunctionDef) -> set[str]:
    body = [inner.body] if isinstance(inner, ast.Lambda) else inner.body
    every = [one for part in body for one in ast.walk(part) if isinstance(one, ast.Name)]
    made = {one.id for one in every if isinstance(one.ctx, ast.Store)}
    return {one.id for one in every if isinstance(one.ctx, ast.Load)} - made
