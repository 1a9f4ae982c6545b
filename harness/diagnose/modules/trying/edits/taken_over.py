"""What the single process computes, in place of what ranks alone run: a formula that was written
again by hand, with another count, another index, or before something it takes was made anew.

In: a function of the ranks, expressions of functions that the single process runs. Out: what an
expression may have been meant to be.
"""

from __future__ import annotations

import ast
import builtins
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from sumgrad.diagnose.modules.trying.edits.source import (
    FIRST,
    NEXT,
    OUTSIDE,
    Function,
    Source,
    bodies,
    expressions,
    made_once,
    makes_groups,
    names_in,
    names_made,
    spelt_out,
    unread_names,
    words_in,
)

NAMED = (ast.Name, ast.Attribute, ast.Subscript)
COMPUTES = (ast.BinOp, ast.Call, ast.Compare, ast.Subscript, ast.BoolOp, ast.UnaryOp, ast.IfExp)
HARDLY = (ast.Lambda, ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr, ast.Starred)
MOST_WORDS, MOST_EACH, MOST_OF_ALL, MOST_LACKING = 24, 3, 40, 12
MOST_FIRST, MOST_KNOWN, MOST_LOOKING_S = 6, 500, 0.3  # the last of one function
ALIKE, ALIKE_BY_NAME, CLOSE = 0.6, 0.4, 0.75  # of their words, as many are those of both
OF_A_WHOLE = 0.15  # sooner where it is all that is returned, or put under a name
READS_MORE = 0.4  # where it reads what the function is given and nothing in it reads
IN_WORDS = re.compile(r"\w+")
SELF = "self"


@dataclass(frozen=True)
class Known:
    """An expression of a function that the single process runs. of_class: the class of that."""

    node: ast.expr
    within: Function
    of_class: str = ""

    @cached_property
    def words(self) -> Counter[str]:
        return _words(self.node)


def known_in(function: Function, of_class: str) -> Iterator[Known]:
    """Its expressions, as they stand, and with what stands for the names that it makes once."""
    made = made_once(function)
    for statement in (one for body in bodies(function) for one in body):
        for node in expressions(statement):
            if isinstance(node, COMPUTES) and _is_said_again(node):
                yield Known(node, function, of_class)
                spelt = spelt_out(node, {n: v for n, v in made.items() if v is not node})
                if ast.dump(spelt) != ast.dump(node):
                    yield Known(spelt, function, of_class)


def told_once(known: Iterable[Known]) -> list[Known]:
    """Without those that say the same in functions of one class, as many as are looked at."""
    each = {(ast.unparse(one.node), one.of_class): one for one in known}
    return [*each.values()][:MOST_KNOWN]


def _is_said_again(node: ast.expr) -> bool:
    every = [*ast.walk(node)]
    reaches = OUTSIDE & words_in(node)
    return not reaches and not any(isinstance(one, HARDLY) for one in every)


@dataclass(frozen=True, slots=True)
class Names:
    """What there is in a function: of what kind by name; by name the line where it is made first;
    those of its file; the class that it is in."""

    kinds: Mapping[str, str]
    made: Mapping[str, int]
    of_file: Set[str]
    of_class: str

    def has(self, name: str, line: int) -> bool:
        if name in self.made:
            return self.made[name] < line
        return name in self.kinds or name in self.of_file or hasattr(builtins, name)


def taken_over(
    function: Function, source: Source, known: Sequence[Known], names: Names
) -> Iterator[tuple[int, ast.expr, str]]:
    """Expressions of the function, with what each may be meant to be, and how soon that is tried:
    those first that say nearly the same."""
    unread, until = unread_names(function), time.monotonic() + MOST_LOOKING_S
    others = [one for one in known if one.within is not function]
    found: list[tuple[float, int, ast.expr, str]] = []
    for statement in (one for body in bodies(function) for one in body):
        if makes_groups(statement) or time.monotonic() > until:
            continue
        for node in expressions(statement):
            own = _words(node)
            if isinstance(node, COMPUTES) and own.total() <= MOST_WORDS:
                told = _told(node, own, others, names, unread)
                best = sorted(told, key=lambda one: -one[0])[:MOST_EACH]
                more = OF_A_WHOLE if node is getattr(statement, "value", None) else 0
                found += [(-alike - more, len(found), node, new) for alike, new in best]
    ordered = sorted(found, key=lambda one: one[:2])[:MOST_OF_ALL]
    for num, (alike, _, node, new) in enumerate(ordered):
        yield FIRST if num < MOST_FIRST and -alike >= CLOSE else NEXT, node, new


def _told(
    node: ast.expr, own: Counter[str], known: Sequence[Known], names: Names, unread: Set[str]
) -> Iterator[tuple[float, str]]:
    plain, seen = ast.unparse(node), set[str]()
    called = _called(node)
    for one in known:
        more = unread & one.words.keys()
        least = ALIKE_BY_NAME if called and called == _called(one.node) else ALIKE
        alike = _alike(own, one.words) + (READS_MORE if more else 0)
        if alike < least or one.words.total() > MOST_WORDS:
            continue
        meant = _with_what_is_there(one, node, names)
        text = plain if meant is None else ast.unparse(meant)
        if text != plain and text not in seen:
            seen.add(text)
            yield alike, text


def _with_what_is_there(known: Known, node: ast.expr, names: Names) -> ast.expr | None:
    """The known one, with what stands in the node at the same place for each name that is not
    there; None where nothing does that may be meant by it."""
    line, foreign = node.lineno, names.of_class != known.of_class

    def put(one: Any, own: Any, *, called: bool = False) -> Any:
        if isinstance(one, ast.Attribute) and ast.unparse(one) in names.kinds:
            return one
        if isinstance(one, ast.Name):
            own_self = foreign and one.id == SELF
            if names.has(one.id, line) and not own_self:
                return one
            if own_self or called or not isinstance(own, NAMED):
                raise LookupError(one.id)
            return own
        if isinstance(one, list):
            beside = own if isinstance(own, list) else []
            return [put(each, beside[i] if i < len(beside) else None)
                    for i, each in enumerate(one)]  # fmt: skip
        if not isinstance(one, ast.AST):
            return one
        alike = type(one) is type(own)
        fields = {
            name: put(value, getattr(own, name, None) if alike else None, called=name == "func")
            for name, value in ast.iter_fields(one)
        }
        return type(one)(**fields)

    try:
        made = put(known.node, node)
    except LookupError:
        return None
    assert isinstance(made, ast.expr)
    return made


def _called(node: ast.expr) -> str:
    return ast.unparse(node.func) if isinstance(node, ast.Call) else ""


def _words(node: ast.expr) -> Counter[str]:
    return Counter(IN_WORDS.findall(ast.unparse(node)))


def _alike(one: Counter[str], other: Counter[str]) -> float:
    return 2 * (one & other).total() / max(one.total() + other.total(), 1)


def lines_lacking(
    function: Function, source: Source, others: Sequence[Function], names: Names
) -> Iterator[tuple[ast.stmt, str]]:
    """Statements of the function, each with a line behind it that the single process runs in others
    to make anew what it has under a name, where this function has no such line."""
    own = {ast.dump(one) for one in ast.walk(function) if isinstance(one, ast.stmt)}
    made = [one for body in bodies(function) for one in body
            if isinstance(one, ast.Assign) and one.lineno == one.end_lineno]  # fmt: skip
    found = 0
    for line in (one for other in others if other is not function
                 for body in bodies(other) for one in body):  # fmt: skip
        anew = _made_anew(line)
        if not anew or ast.dump(line) in own or not OUTSIDE.isdisjoint(words_in(line)):
            continue
        for one in made:
            is_there = all(names.has(name, one.lineno + 1) for name in names_in(line))
            if anew in names_made(one) and is_there and SELF not in names_in(line):
                found += 1
                yield one, f"{source.of_node(one)}; {ast.unparse(line)}"
            if found >= MOST_LACKING:
                return


def _made_anew(line: ast.stmt) -> str:
    """The name of what a statement makes of what stands under it; none of others."""
    if isinstance(line, ast.AugAssign) and isinstance(line.target, ast.Name):
        return line.target.id
    target = line.targets[0] if isinstance(line, ast.Assign) and len(line.targets) == 1 else None
    if isinstance(line, ast.Assign) and isinstance(target, ast.Name):
        return target.id if target.id in names_in(line.value) else ""
    return ""
