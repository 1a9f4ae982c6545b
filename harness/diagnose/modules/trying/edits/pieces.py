"""Small edits of a user's code, one of which may make a failing step right: another name of the
same kind, an axis, a condition, a bound, a term or a statement less.

In: a file's source and its functions that ran. Out: edits, those first that say most.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from sumgrad.diagnose.modules.trying.edits.alternatives import (
    added_one_by_one,
    alternatives,
    is_used_up,
    kept_in_full,
    may_be_turned,
)
from sumgrad.diagnose.modules.trying.edits.factors import of_terms, of_what_is_returned
from sumgrad.diagnose.modules.trying.edits.layouts import laid_out_otherwise
from sumgrad.diagnose.modules.trying.edits.left_out import left_out, options_of, shared_by_all
from sumgrad.diagnose.modules.trying.edits.names import (
    cloned,
    kept_as_it_was,
    renamed_throughout,
    two_exchanged,
)
from sumgrad.diagnose.modules.trying.edits.nesting import (
    MODULES,
    brackets_elsewhere,
    otherwise_nested,
)
from sumgrad.diagnose.modules.trying.edits.offsets import begun_after_others
from sumgrad.diagnose.modules.trying.edits.source import (
    SIMPLE,
    Function,
    Source,
    as_one,
    bodies,
    expressions,
    first_made,
    makes_groups,
    may_be_exchanged,
    name_called,
    names_in,
    span,
    unread_names,
    words_in,
)
from sumgrad.diagnose.modules.trying.edits.sums import (
    hands_gradients_on,
    of_functions,
    sums_in,
    sums_of_sizes,
)
from sumgrad.diagnose.modules.trying.edits.written_for import (
    OTHER_FUNCTIONS,
    OTHER_OPERATORS,
    OTHER_WORDS,
)
from sumgrad.record.trial import Edit

KINDS_TO_SWAP = ("tensor ", "parameter ", "int", "float", "bool", "list of", "tuple of")
# Calls that are not left out for what they are given: there it is no such thing, or the same.
NO_WRAPPERS = {"range", "len", "isinstance", "print", "super", "zip", "enumerate", "getattr",
               "append", "extend", "max", "min", "backward", "items", "keys", "values",
               "parameters", "named_parameters", "contiguous", "item", "tolist", "group",
               "split", "tensor_split", "chunk", "unbind", "size", "new_group"}  # fmt: skip
GRADIENT = "grad"  # which may be None
PLAIN = {"bool", "int", "float", "str", "NoneType"}
SHAPES_ONLY = {"keepdim", "dtype", "device", "memory_format"}  # another of these is no other number
OF_RANKS = r"rank|coord|stage|first|last|peer|axes|group"
OWN_RANK = r"rank|coord"
FIRST, NEXT, LATER, LAST = 0, 3, 4, 6  # how soon
MOST_LISTED = 4  # of which one may be too much
Found = tuple[int, Edit]


@dataclass(frozen=True, slots=True)
class _Names:
    """Of a function: of what kind is what stands under each, where that is first, and which of them
    nothing reads."""

    kinds: Mapping[str, str]
    made: Mapping[str, int] = field(default_factory=dict)
    unread: frozenset[str] = frozenset()

    def at(self, line: int) -> Iterator[tuple[str, str]]:
        """Those that are there at a line, and their kinds."""
        for name, kind in self.kinds.items():
            if "." in name or self.made.get(name, 0) < line:
                yield name, kind


class Edits:
    """Of one file. axes: their names. left_alone: names of functions that are."""

    def __init__(
        self, file: str, text: str, axes: Sequence[str], left_alone: Set[str] = frozenset()
    ) -> None:
        """SyntaxError where the file is no Python."""
        self._source, self._axes = Source.of(file, text), axes
        self._functions: dict[int, Function] = {}
        tree = ast.parse(text)
        self._of_functions, self._switches = of_functions(tree), options_of(tree)
        self._shared = shared_by_all(tree)
        for node in ast.walk(tree):
            if isinstance(node, Function):
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                self._functions[first] = node
        self._left_alone = left_alone

    def lines_of(self, first_line: int) -> range:
        """Of the function that begins in this line; empty where none does."""
        function = self._functions.get(first_line)
        last = None if function is None else function.end_lineno
        return range(first_line, (last or first_line - 1) + 1)

    def called_in(self, first_line: int) -> set[str]:
        """Names that stand in the function that begins in this line."""
        function = self._functions.get(first_line)
        return set() if function is None else words_in(function)

    def calls_in(self, first_line: int) -> set[str]:
        """Names that are called in it."""
        function = self._functions.get(first_line)
        every = () if function is None else ast.walk(function)
        return {name_called(one) for one in every if isinstance(one, ast.Call)}

    def first_lines(self) -> Mapping[int, str]:
        """Where each function begins, and its name."""
        return {line: function.name for line, function in self._functions.items()}

    def in_function(self, first_line: int, kinds: Mapping[str, str]) -> Iterator[Found]:
        """Edits of the function that begins in this line, each with how soon it is to be tried.
        kinds: of what kind is what stands under each name in it."""
        function = self._functions.get(first_line)
        if function is None or function.name in self._left_alone:
            return
        of_a_backward = function in self._of_functions or hands_gradients_on(function)
        sums = sums_in(function, self._source, kinds, self._axes) if of_a_backward else ()
        sizes = sums_of_sizes(function, self._source, self._axes)
        yield from ((FIRST, edit) for edit in (*sums, *sizes))
        names = _Names(kinds, first_made(function), frozenset(unread_names(function)))
        renamed = renamed_throughout(function, self._source, dict(kinds), names.made)
        yield from ((LAST, edit) for edit in renamed)
        yield from self._of_its_own(function)
        yield from ((NEXT, edit) for edit in kept_as_it_was(function, self._source))
        may_be = lambda node: self._may_be_tensor(node, names)  # noqa: E731
        for node, new in left_out(function, self._source.of_node, self._switches, may_be):
            yield from self._instead(FIRST, node, new)
        text = self._source.of_node
        returned = of_what_is_returned(function, text, kinds) if of_a_backward else ()
        for node, new in (*returned, *of_terms(function, text)):
            yield from self._instead(LATER, node, new, sure=False)
        for body in bodies(function):
            for at, statement in enumerate(body):
                if makes_groups(statement):
                    continue
                yield from self._of_statement(statement, names)
                given = statement.value if isinstance(statement, ast.Assign | ast.Return) else None
                if given is not None and is_used_up(given):
                    kept = kept_in_full(given, self._source.of_node)
                    yield from self._instead(NEXT, given, kept)
                if at + 1 < len(body):
                    yield from self._exchanged(statement, body[at + 1])
                of_shapes = _of_shapes(statement)
                beside = names_in(statement)
                for node in expressions(statement):
                    if id(node) in of_shapes:
                        continue
                    # Of a call that is a statement, its first argument is as good as nothing.
                    if not (isinstance(statement, ast.Expr) and node is statement.value):
                        yield from self._of_expression(node, names, beside)
                    elif isinstance(node, ast.Call):
                        yield from self._without_each(node)
                exchanged = two_exchanged(statement, self._source, kinds, self._axes)
                yield from ((NEXT, edit) for edit in exchanged)
                soon = FIRST if isinstance(statement, ast.Expr) else NEXT
                yield from ((soon, edit) for edit in cloned(statement, self._source, kinds))

    def _of_its_own(self, function: Function) -> Iterator[Found]:
        """What all share, made anew at its beginning."""
        text = self._source.of_node
        body = [
            one for one in function.body if not isinstance(getattr(one, "value", 0), ast.Constant)
        ]
        if body and isinstance(body[0], SIMPLE):
            for name, value in self._shared.get(function, ()):
                made = f"{name} = {text(value)}; {text(body[0])}"
                yield from self._instead(FIRST, body[0], made)

    def _between(
        self,
        soon: int,
        start: tuple[int, int],
        end: tuple[int, int],
        new: str,
        *,
        sure: bool = True,
        expression: bool = True,
    ) -> Iterator[Found]:
        """None where it changes nothing."""
        old = self._source.piece(start, end)
        lacking = old.count("\n") - new.count("\n")
        if lacking:
            new = f"({new}{chr(10) * lacking})" if expression else new + "\n" * lacking
        if old != new and lacking >= 0:
            file = self._source.file
            yield soon, Edit(file=file, start=start, end=end, old=old, new=new, sure=sure)

    def _instead(
        self, soon: int, node: ast.expr | ast.stmt, new: str, *, sure: bool = True
    ) -> Iterator[Found]:
        expression = isinstance(node, ast.expr)
        yield from self._between(soon, *span(node), new, sure=sure, expression=expression)

    def _of_statement(self, statement: ast.stmt, names: _Names) -> Iterator[Found]:
        text = self._source.of_node
        if isinstance(statement, ast.Expr):
            if not isinstance(statement.value, ast.Constant):
                yield from self._instead(NEXT, statement, "pass", sure=False)
        elif isinstance(statement, ast.Assign):
            target, nothing = statement.targets[0], isinstance(statement.value, ast.Constant)
            again = isinstance(target, ast.Name) and target.id in names_in(statement.value)
            if again or isinstance(target, ast.Subscript | ast.Attribute):
                yield from self._instead(NEXT, statement, "pass", sure=False)
                added = self._added_to(target, statement.value)
                yield from () if nothing else self._instead(NEXT, statement, added, sure=False)
            elif isinstance(target, ast.Name) and names.made.get(target.id, 0) < target.lineno:
                added = f"{target.id} = {target.id} + ({text(statement.value)})"
                yield from self._instead(NEXT, statement, added, sure=False)
        elif isinstance(statement, ast.AugAssign):
            yield from self._instead(NEXT, statement, "pass", sure=False)
            put = f"{text(statement.target)} = {text(statement.value)}"
            yield from self._instead(NEXT, statement, put, sure=False)
            if type(statement.op) in OTHER_OPERATORS:
                other = f"{text(statement.target)} {OTHER_OPERATORS[type(statement.op)]}= "
                yield from self._instead(LAST, statement, other + text(statement.value), sure=False)
        elif isinstance(statement, ast.If):
            for told in ("True", "False"):
                yield from self._instead(self._of_a_test(statement.test), statement.test, told)
        elif isinstance(statement, ast.Continue | ast.Break):
            yield from self._instead(NEXT, statement, "pass")
        elif isinstance(statement, ast.For):
            yield from self._out_of_a_loop(statement)
            yield from self._within_the_other(statement)
            if may_be_turned(statement.iter):
                turned = f"reversed(list({text(statement.iter)}))"
                yield from self._instead(NEXT, statement.iter, turned)

    def _added_to(self, target: ast.expr, value: ast.expr) -> str:
        """To a gradient that may be none."""
        own, given = self._source.of_node(target), self._source.of_node(value)
        if not isinstance(target, ast.Attribute) or target.attr != GRADIENT:
            return f"{own} += {given}"
        return f"{own} = {given} if {own} is None else {own} + {self._as_one(value)}"

    def _out_of_a_loop(self, loop: ast.For) -> Iterator[Found]:
        """The last statement of a loop once, after it."""
        last = loop.body[-1]
        if len(loop.body) > 1 and isinstance(last, SIMPLE) and last.lineno == last.end_lineno:
            (line, _), end = span(last)
            indent = self._source.lines[loop.lineno - 1][: loop.col_offset].decode()
            new = indent + self._source.of_node(last)
            yield from self._between(NEXT, (line, 0), end, new, sure=False, expression=False)

    def _within_the_other(self, loop: ast.For) -> Iterator[Found]:
        """The inner of two loops as the outer one."""
        inner = loop.body[0]
        if len(loop.body) > 1 or not isinstance(inner, ast.For):
            return
        if not names_in(loop.target) & names_in(inner.iter):
            (first, one), (then, last) = span(loop.target), span(loop.iter)
            (start, two), (begin, end) = span(inner.target), span(inner.iter)
            piece = self._source.piece
            other = piece(start, two) + piece(one, then) + piece(begin, end)
            own = piece(first, one) + piece(two, begin) + piece(then, last)
            new = other + piece(last, start) + own
            yield from self._between(NEXT, first, end, new, expression=False)

    def _exchanged(self, one: ast.stmt, other: ast.stmt) -> Iterator[Found]:
        """Two statements the other way round."""
        if may_be_exchanged(one, other):
            (start, end), (then, last) = span(one), span(other)
            between = self._source.piece(end, then)
            new = self._source.of_node(other) + between + self._source.of_node(one)
            yield from self._between(NEXT, start, last, new, expression=False)

    def _of_expression(self, node: ast.expr, names: _Names, beside: Set[str]) -> Iterator[Found]:
        """beside: names that stand in the same statement."""
        text = self._source.of_node
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            yield from self._other_names(node, names, beside)
        elif isinstance(node, ast.Constant):
            yield from self._other_constants(node)
        elif isinstance(node, ast.BinOp):
            yield from self._of_two(node)
        elif isinstance(node, ast.Compare) and len(node.ops) == 1:
            other = OTHER_OPERATORS.get(type(node.ops[0]))
            if other is not None:
                end, start = span(node.left)[1], span(node.comparators[0])[0]
                yield from self._between(self._of_a_test(node), end, start, f" {other} ")
        elif isinstance(node, ast.BoolOp):
            word = " or " if isinstance(node.op, ast.And) else " and "
            yield from self._instead(NEXT, node, word.join(map(text, node.values)))
        elif isinstance(node, ast.UnaryOp):
            sure = isinstance(node.op, ast.Not)
            yield from self._instead(NEXT, node, text(node.operand), sure=sure)
        elif isinstance(node, ast.IfExp):
            yield from self._instead(self._of_a_test(node.test), node, text(node.body))
            yield from self._instead(self._of_a_test(node.test), node, text(node.orelse))
        elif isinstance(node, ast.Call):
            yield from self._of_a_call(node, names)
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            yield from self._instead(NEXT, node, text(node.value))
        if isinstance(getattr(node, "ctx", ast.Load()), ast.Load):
            yield from self._meant_to_be(node, names)

    def _meant_to_be(self, node: ast.expr, names: _Names) -> Iterator[Found]:
        text = self._source.of_node

        def is_of(*kinds: str) -> Callable[[ast.expr], bool]:
            return lambda one: names.kinds.get(text(one), "").startswith(kinds)

        nested = otherwise_nested(
            node, text, is_of("tensor ", "parameter "), lambda one: self._may_be_tensor(one, names)
        )
        others = alternatives(node, text, self._axes, is_of("tensor int"))
        # Of a function in which nothing of torch's runs the kinds are not known.
        is_several = is_of("tuple of", "list of") if names.kinds else lambda _: True
        for new in added_one_by_one(node, text, is_several):
            yield from self._instead(FIRST, node, new)
        for new in (*nested, *others, *laid_out_otherwise(node, text)):
            yield from self._instead(NEXT, node, new)
        later = NEXT if isinstance(node, ast.Subscript) else FIRST
        for one in begun_after_others(node, text, self._axes):
            for soon, edit in self._instead(later, node, one.new):
                yield soon, replace(edit, over=one.axis, before=one.size)
        if isinstance(node, ast.List) and len(node.elts) <= MOST_LISTED:
            for left_out in node.elts:
                kept = ", ".join(text(one) for one in node.elts if one is not left_out)
                yield from self._instead(LATER, node, f"[{kept}]", sure=False)

    def _other_names(
        self, node: ast.Name | ast.Attribute, names: _Names, beside: Set[str]
    ) -> Iterator[Found]:
        own = self._source.of_node(node)
        kind = names.kinds.get(own)
        if kind is None or not (kind.startswith(KINDS_TO_SWAP) or " " in kind):
            return
        for other, its_kind in names.at(node.lineno):
            soon = FIRST if other in names.unread else LAST if other in beside else NEXT
            if other != own and its_kind == kind:
                yield from self._instead(soon, node, other)
            elif other != own and alike_but_for_size(kind, its_kind):
                yield from self._instead(max(soon, NEXT), node, other)

    def _other_constants(self, node: ast.Constant) -> Iterator[Found]:
        value = node.value
        if isinstance(value, bool):
            yield from self._instead(FIRST, node, str(not value))
        elif value in OTHER_WORDS and value not in self._axes:
            yield from self._instead(NEXT, node, f'"{OTHER_WORDS[value]}"')
        elif isinstance(value, str) and value in self._axes:
            for other in self._axes:  # ranks may wait for each other then
                yield from self._instead(LAST, node, repr(other).replace("'", '"'))
        elif type(value) is int and 0 <= value <= 2:
            for number in (value + 1, value - 1):
                yield from self._instead(LATER, node, str(number), sure=False)

    def _of_a_test(self, test: ast.expr) -> int:
        """How soon: where it is of a rank, others wait for ever for what it does no more."""
        return LAST if re.search(OF_RANKS, self._source.of_node(test)) else NEXT

    def _of_two(self, node: ast.BinOp) -> Iterator[Found]:
        text = self._source.of_node
        other = OTHER_OPERATORS.get(type(node.op))
        if other is None:
            return
        soon = NEXT if other == "-" and re.search(OWN_RANK, text(node.right)) else LATER
        yield from self._instead(soon, node, text(node.left), sure=False)
        if isinstance(node.op, ast.Add | ast.Mult):
            yield from self._instead(LATER, node, text(node.right), sure=False)
        else:
            turned = f"{self._as_one(node.right)} - {self._as_one(node.left)}"
            if other == "+":
                yield from self._instead(LAST, node, turned, sure=False)
        for new in brackets_elsewhere(node, text):
            yield from self._instead(NEXT, node, new)
        between = span(node.left)[1], span(node.right)[0]
        if self._source.piece(*between).strip() in ("+", "-", "*", "/"):  # and no bracket
            yield from self._between(LATER, *between, f" {other} ", sure=False)

    def _of_a_call(self, node: ast.Call, names: _Names) -> Iterator[Found]:
        text, function = self._source.of_node, node.func
        name = name_called(node)
        taken = node.args[0] if node.args else None
        if name in NO_WRAPPERS or isinstance(taken, ast.Starred | ast.GeneratorExp):
            return
        of_a_module = isinstance(function, ast.Attribute) and text(function.value) in MODULES
        if isinstance(function, ast.Attribute) and not of_a_module and name != "apply":
            if self._may_be_tensor(function.value, names):
                yield from self._instead(NEXT, node, text(function.value), sure=False)
        elif taken is not None and self._may_be_tensor(taken, names):
            yield from self._instead(NEXT, node, text(taken), sure=False)
        yield from self._without_each(node)
        yield from self._turned_or_left_out(node, names)
        for other in OTHER_FUNCTIONS.get(name, ()):
            called = span(function)[1]
            start = called[0], called[1] - len(name.encode())
            yield from self._between(NEXT, start, called, other)

    def _may_be_tensor(self, node: ast.expr, names: _Names) -> bool:
        if isinstance(node, ast.Constant | ast.Lambda | ast.Dict):
            return False
        unknown = "" if isinstance(node, ast.Name) else "tensor"
        kind = names.kinds.get(self._source.of_node(node), unknown)
        return kind.startswith(("tensor", "list", "tuple", "float", "int"))

    def _turned_or_left_out(self, node: ast.Call, names: _Names) -> Iterator[Found]:
        """Switches that it is given by their places, the other way; its last argument, where that
        is a number or a switch, not given."""
        text = self._source.of_node
        kinds = [names.kinds.get(text(one), "") for one in node.args]
        for one, kind in zip(node.args, kinds, strict=True):
            if kind == "bool":
                yield from self._instead(NEXT, one, f"not {self._as_one(one)}")
        if len(node.args) > 1 and (kinds[-1] in PLAIN or isinstance(node.args[-1], ast.Constant)):
            given = ", ".join([*map(text, node.args[:-1]), *map(text, node.keywords)])
            yield from self._instead(LATER, node, f"{text(node.func)}({given})", sure=False)

    def _without_each(self, node: ast.Call) -> Iterator[Found]:
        for keyword in node.keywords:
            if keyword.arg in SHAPES_ONLY:
                continue
            yield from self._without(node, keyword)

    def _without(self, node: ast.Call, keyword: ast.keyword) -> Iterator[Found]:
        """The call without what it is given by this name."""
        text = self._source.of_node
        others = [*map(text, node.args), *(text(one) for one in node.keywords if one != keyword)]
        given = ", ".join(others)
        if keyword.arg is not None:
            yield from self._instead(NEXT, node, f"{self._source.of_node(node.func)}({given})")

    def _as_one(self, node: ast.expr) -> str:
        return as_one(node, self._source.of_node)


def _of_shapes(statement: ast.stmt) -> set[int]:
    """Expressions that say of what shape or dtype something is."""
    calls = [one for one in expressions(statement) if isinstance(one, ast.Call)]
    return {id(k.value) for call in calls for k in call.keywords if k.arg in SHAPES_ONLY}


def alike_but_for_size(one: str, other: str) -> bool:
    """Of two kinds of tensors, whether they have as many dimensions, and the same dtype."""
    of_tensors = one.startswith("tensor ") and other.startswith("tensor ")
    first, second = one.split(" "), other.split(" ")
    return of_tensors and first[1] == second[1] and first[2].count("x") == second[2].count("x")
