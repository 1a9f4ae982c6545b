"""Edits of a statement: left out, added to what is there, after its loop, exchanged with the next,
past one further off that makes anew what it reads.

In: a statement of a user's code. Out: edits, each with how soon it is to be tried.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence

from sumgrad.diagnose.modules.trying.edits.alternatives import may_be_turned
from sumgrad.diagnose.modules.trying.edits.source import (
    COMPOUND,
    LAST,
    LATER,
    NEXT,
    SIMPLE,
    Found,
    Function,
    Source,
    as_one,
    bodies,
    made_once,
    makes_groups,
    may_be_exchanged,
    name_called,
    names_in,
    names_made,
    names_read,
    span,
    spelt_out,
)
from sumgrad.diagnose.modules.trying.edits.undone import not_cut
from sumgrad.diagnose.modules.trying.edits.written_for import OTHER_OPERATORS

GRADIENT = "grad"  # which may be None
OF_RANKS = r"rank|coord|stage|first|last|peer|axes|group"


def of_statement(statement: ast.stmt, source: Source, made: Mapping[str, int]) -> Iterator[Found]:
    text = source.of_node
    if isinstance(statement, ast.Expr):
        if not isinstance(statement.value, ast.Constant):
            yield from source.instead(NEXT, statement, "pass", sure=False)
    elif isinstance(statement, ast.Assign):
        yield from _of_an_assignment(statement, source, made)
        yield from _added_where_written_twice(statement, source)
    elif isinstance(statement, ast.AugAssign):
        yield from _in_place(statement, source)
        yield from _added_where_written_twice(statement, source)
    elif isinstance(statement, ast.If):
        for told in ("True", "False"):
            yield from source.instead(soon_of_a_test(statement.test, source), statement.test, told)
    elif isinstance(statement, ast.With):
        for context, new in not_cut(statement):
            yield from source.instead(NEXT, context, new)
    elif isinstance(statement, ast.Continue | ast.Break):
        yield from source.instead(NEXT, statement, "pass")
    elif isinstance(statement, ast.For):
        yield from _out_of_a_loop(statement, source)
        yield from _within_the_other(statement, source)
        if may_be_turned(statement.iter):
            turned = f"reversed(list({text(statement.iter)}))"
            yield from source.instead(NEXT, statement.iter, turned)


def _of_an_assignment(
    statement: ast.Assign, source: Source, made: Mapping[str, int]
) -> Iterator[Found]:
    text = source.of_node
    target, nothing = statement.targets[0], isinstance(statement.value, ast.Constant)
    again = isinstance(target, ast.Name) and target.id in names_in(statement.value)
    if again or isinstance(target, ast.Subscript | ast.Attribute):
        yield from source.instead(NEXT, statement, "pass", sure=False)
        added = _added_to(target, statement.value, source)
        yield from () if nothing else source.instead(NEXT, statement, added, sure=False)
    elif isinstance(target, ast.Name) and made.get(target.id, 0) < target.lineno:
        added = f"{target.id} = {target.id} + ({text(statement.value)})"
        yield from source.instead(NEXT, statement, added, sure=False)


def _in_place(statement: ast.AugAssign, source: Source) -> Iterator[Found]:
    text = source.of_node
    yield from source.instead(NEXT, statement, "pass", sure=False)
    put = f"{text(statement.target)} = {text(statement.value)}"
    yield from source.instead(NEXT, statement, put, sure=False)
    if type(statement.op) in OTHER_OPERATORS:
        other = f"{text(statement.target)} {OTHER_OPERATORS[type(statement.op)]}= "
        yield from source.instead(LAST, statement, other + text(statement.value), sure=False)


def _added_where_written_twice(
    statement: ast.Assign | ast.AugAssign, source: Source
) -> Iterator[Found]:
    """`total[ids] = rows`, of which the last one of each place is kept, as a sum of all."""
    text, value = source.of_node, statement.value
    puts = isinstance(statement, ast.Assign)
    target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
    if not (puts or isinstance(getattr(statement, "op", None), ast.Add)):
        return
    if isinstance(target, ast.Subscript) and not isinstance(value, ast.Constant):
        put = f"({text(target.slice)},), {text(value)}, accumulate=True"
        new = f"{text(target.value)}.index_put_({put})"
        if isinstance(target.slice, ast.Name):
            yield from source.instead(LATER, statement, new, sure=False)


def of_each_turn(function: Function, source: Source) -> Iterator[Found]:
    """What is made before a loop of all that it goes over, made in it of each."""
    made = made_once(function)
    loops = [one for body in bodies(function) for one in body if isinstance(one, ast.For)]
    for loop in loops:
        each = _each_of(loop)
        held = {name: value for name, value in made.items()
                if each.keys() & names_in(value) and value.lineno < loop.lineno}  # fmt: skip
        for node in (one for body in loop.body for one in ast.walk(body)):
            if isinstance(node, ast.Name) and node.id in held:
                text = ast.unparse(spelt_out(held[node.id], each))
                new = f"({text})" if isinstance(held[node.id], COMPOUND) else text
                yield from source.instead(NEXT, node, new, sure=False)


def _each_of(loop: ast.For) -> dict[str, ast.expr]:
    """By the names of what a loop goes over, the name of each."""
    over, targets = loop.iter, loop.target
    several = targets.elts if isinstance(targets, ast.Tuple) else [targets]
    called = name_called(over) if isinstance(over, ast.Call) else ""
    if isinstance(over, ast.Call) and called == "enumerate" and len(several) == 2:
        pairs = [(over.args[0], several[1])]
    elif isinstance(over, ast.Call) and called == "zip":
        pairs = [*zip(over.args, several, strict=False)]
    else:
        pairs = [(over, targets)]
    return {of.id: ast.Name(one.id, ast.Load()) for of, one in pairs
            if isinstance(of, ast.Name) and isinstance(one, ast.Name)}  # fmt: skip


def _added_to(target: ast.expr, value: ast.expr, source: Source) -> str:
    """To a gradient that may be none."""
    own, given = source.of_node(target), source.of_node(value)
    if not isinstance(target, ast.Attribute) or target.attr != GRADIENT:
        return f"{own} += {given}"
    return f"{own} = {given} if {own} is None else {own} + {as_one(value, source.of_node)}"


def _out_of_a_loop(loop: ast.For, source: Source) -> Iterator[Found]:
    """The last statement of a loop once, after it."""
    last = loop.body[-1]
    if len(loop.body) > 1 and isinstance(last, SIMPLE) and last.lineno == last.end_lineno:
        (line, _), end = span(last)
        indent = source.lines[loop.lineno - 1][: loop.col_offset].decode()
        new = indent + source.of_node(last)
        yield from source.between(NEXT, (line, 0), end, new, sure=False, expression=False)


def _within_the_other(loop: ast.For, source: Source) -> Iterator[Found]:
    """The inner of two loops as the outer one."""
    inner = loop.body[0]
    if len(loop.body) > 1 or not isinstance(inner, ast.For):
        return
    if not names_in(loop.target) & names_in(inner.iter):
        (first, one), (then, last) = span(loop.target), span(loop.iter)
        (start, two), (begin, end) = span(inner.target), span(inner.iter)
        piece = source.piece
        other = piece(start, two) + piece(one, then) + piece(begin, end)
        own = piece(first, one) + piece(two, begin) + piece(then, last)
        new = other + piece(last, start) + own
        yield from source.between(NEXT, first, end, new, expression=False)


def turned_round(one: ast.stmt, other: ast.stmt, source: Source) -> Iterator[Found]:
    """Two statements the other way round."""
    if may_be_exchanged(one, other):
        (start, end), (then, last) = span(one), span(other)
        between = source.piece(end, then)
        new = source.of_node(other) + between + source.of_node(one)
        yield from source.between(NEXT, start, last, new, expression=False)


def past_what_is_made_anew(body: Sequence[ast.stmt], source: Source) -> Iterator[Found]:
    """A statement before, or behind, one further off that makes anew what it reads."""
    for at, anew in enumerate(body):
        if not (isinstance(anew, SIMPLE) and names_made(anew) & names_read(anew)):
            continue
        made = names_made(anew) & names_read(anew)
        for num, other in enumerate(body):
            between = body[at:num] if num > at else body[num + 1 : at + 1]
            one_line = isinstance(other, SIMPLE) and other.lineno == other.end_lineno
            if len(between) > 1 and one_line and names_read(other) & made:
                yield from _moved(other, between, source, up=num > at)


def _moved(
    one: ast.stmt, others: Sequence[ast.stmt], source: Source, *, up: bool
) -> Iterator[Found]:
    """In front of others that come before it, or behind those that follow."""
    made = {name for other in others for name in names_made(other)}
    read = {name for other in others for name in names_read(other)}
    if any(makes_groups(other) for other in (one, *others)) or names_made(one) & (made | read):
        return  # they need what it makes
    here = {name for other in others for name in names_made(other) - names_read(other)}
    if up and names_read(one) & here:
        return  # it is not there before
    first, last = others[0], others[-1]
    if any(other.col_offset != one.col_offset for other in (first, last)):
        return
    indent = source.lines[one.lineno - 1][: one.col_offset].decode()
    own, rest = source.of_node(one), source.piece(span(first)[0], span(last)[1])
    new = f"{own}\n{indent}{rest}" if up else f"{rest}\n{indent}{own}"
    start, end = (span(first)[0], span(one)[1]) if up else (span(one)[0], span(last)[1])
    yield from source.between(NEXT, start, end, new, sure=False, expression=False)


def soon_of_a_test(test: ast.expr, source: Source) -> int:
    """How soon: where it is of a rank, others wait for ever for what it does no more."""
    return LAST if re.search(OF_RANKS, source.of_node(test)) else NEXT
