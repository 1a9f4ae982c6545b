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
)
from sumgrad.diagnose.modules.trying.edits.directions import the_other_way
from sumgrad.diagnose.modules.trying.edits.factors import (
    of_one_beside_another,
    of_terms,
    of_terms_by_name,
    of_what_is_returned,
)
from sumgrad.diagnose.modules.trying.edits.lacking import (
    bound_at_once,
    one_more_or_less,
    options_given,
    the_rest,
    with_an_option,
    with_what_is_not_read,
)
from sumgrad.diagnose.modules.trying.edits.layouts import laid_out_otherwise
from sumgrad.diagnose.modules.trying.edits.left_out import left_out, options_of, shared_by_all
from sumgrad.diagnose.modules.trying.edits.names import (
    cloned,
    kept_as_it_was,
    renamed_throughout,
    through_the_same,
    two_exchanged,
)
from sumgrad.diagnose.modules.trying.edits.nesting import (
    MODULES,
    brackets_elsewhere,
    otherwise_nested,
)
from sumgrad.diagnose.modules.trying.edits.of_ranks import over_other_ranks, summed_by_all
from sumgrad.diagnose.modules.trying.edits.offsets import begun_after_others
from sumgrad.diagnose.modules.trying.edits.places import elsewhere
from sumgrad.diagnose.modules.trying.edits.source import (
    FIRST,
    LAST,
    LATER,
    NEXT,
    SIMPLE,
    Found,
    Function,
    Source,
    as_one,
    bodies,
    expressions,
    first_made,
    makes_groups,
    name_called,
    names_in,
    names_made_by,
    span,
    unread_names,
    words_in,
)
from sumgrad.diagnose.modules.trying.edits.statements import (
    of_each_turn,
    of_statement,
    past_what_is_made_anew,
    soon_of_a_test,
    turned_round,
)
from sumgrad.diagnose.modules.trying.edits.sums import (
    hands_gradients_on,
    of_functions,
    sums_in,
    sums_of_sizes,
)
from sumgrad.diagnose.modules.trying.edits.taken_over import (
    Known,
    Names,
    known_in,
    lines_lacking,
    taken_over,
)
from sumgrad.diagnose.modules.trying.edits.undone import keys_of, not_done, under_another_key
from sumgrad.diagnose.modules.trying.edits.written_for import (
    OTHER_COMPARISONS,
    OTHER_FUNCTIONS,
    OTHER_OPERATORS,
    OTHER_WORDS,
)

KINDS_TO_SWAP = ("tensor ", "parameter ", "int", "float", "bool", "list of", "tuple of")
# Calls that are not left out for what they are given: there it is no such thing, or the same.
NO_WRAPPERS = {"range", "len", "isinstance", "print", "super", "zip", "enumerate", "getattr",
               "append", "extend", "max", "min", "backward", "items", "keys", "values",
               "parameters", "named_parameters", "contiguous", "item", "tolist", "group",
               "split", "tensor_split", "chunk", "unbind", "size", "new_group"}  # fmt: skip
PLAIN = {"bool", "int", "float", "str", "NoneType"}
MOST_NUMBER = 2  # a dimension, a place: larger ones are sizes and factors, right by chance
SHAPES_ONLY = {"keepdim", "dtype", "device", "memory_format"}  # another of these is no other number
OWN_RANK = r"rank|coord"
MOST_LISTED = 4  # of which one may be too much


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
    """Of one file. axes: their names. left_alone: names of functions that are. run: in which lines
    those begin that are run; what others say says nothing of these."""

    def __init__(
        self,
        file: str,
        text: str,
        axes: Sequence[str],
        left_alone: Set[str] = frozenset(),
        run: Set[int] = frozenset(),
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
        run_here = [function for line, function in self._functions.items() if line in run]
        self._keys, self._given = keys_of(run_here), options_given(run_here)
        self._left_alone = left_alone
        self._of_file = names_made_by(tree)
        self._classes = {one: of.name for of in ast.walk(tree) if isinstance(of, ast.ClassDef)
                         for one in of.body if isinstance(one, Function)}  # fmt: skip

    def known_in(self, first_line: int) -> Iterator[Known]:
        """What the function that begins in this line computes."""
        function = self._functions.get(first_line)
        if function is not None:
            yield from known_in(function, self._classes.get(function, ""))

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

    def in_function(
        self, first_line: int, kinds: Mapping[str, str], known: Sequence[Known] = ()
    ) -> Iterator[Found]:
        """Edits of the function that begins in this line, each with how soon it is to be tried.
        kinds: of what kind is what stands under each name in it. known: what the single process
        computes."""
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
        yield from of_each_turn(function, self._source)
        yield from self._of_the_single_process(function, kinds, known)
        yield from ((NEXT, edit) for edit in kept_as_it_was(function, self._source))
        for node, new in through_the_same(function, self._source.of_node, names.made):
            yield from self._source.instead(LATER, node, new, sure=False)
        yield from ((FIRST, edit) for edit in bound_at_once(function, self._source))
        may_be = lambda node: self._may_be_tensor(node, names)  # noqa: E731
        for node, new in left_out(function, self._source.of_node, self._switches, may_be):
            yield from self._source.instead(FIRST, node, new)
        text = self._source.of_node
        returned = of_what_is_returned(function, text, kinds) if of_a_backward else ()
        by_name = of_terms_by_name(function, text, kinds)
        with_others = of_one_beside_another(function, text, kinds)
        for node, new in (*returned, *of_terms(function, text), *by_name, *with_others):
            yield from self._source.instead(LATER, node, new, sure=False)
        for body in bodies(function):
            yield from past_what_is_made_anew(body, self._source)
            yield from self._of_statements(body, names)

    def _of_statements(self, body: Sequence[ast.stmt], names: _Names) -> Iterator[Found]:
        for at, statement in enumerate(body):
            if makes_groups(statement):
                continue
            yield from of_statement(statement, self._source, names.made)
            given = statement.value if isinstance(statement, ast.Assign | ast.Return) else None
            if given is not None and is_used_up(given):
                kept = kept_in_full(given, self._source.of_node)
                yield from self._source.instead(NEXT, given, kept)
            if at + 1 < len(body):
                yield from turned_round(statement, body[at + 1], self._source)
            yield from self._of_its_expressions(statement, names)
            exchanged = two_exchanged(statement, self._source, names.kinds, self._axes)
            yield from ((NEXT, edit) for edit in exchanged)
            soon = FIRST if isinstance(statement, ast.Expr) else NEXT
            yield from ((soon, edit) for edit in cloned(statement, self._source, names.kinds))

    def _of_its_expressions(self, statement: ast.stmt, names: _Names) -> Iterator[Found]:
        of_shapes, beside = _of_shapes(statement), names_in(statement)
        for node in expressions(statement):
            if id(node) in of_shapes:
                continue
            # Of a call that is a statement, its first argument is as good as nothing.
            if not (isinstance(statement, ast.Expr) and node is statement.value):
                yield from self._of_expression(node, names, beside)
            elif isinstance(node, ast.Call):
                yield from self._without_each(node)
                yield from self._other_functions(node)
                for new in summed_by_all(node, self._source.of_node):
                    yield from self._source.instead(LATER, node, new, sure=False)

    def _of_its_own(self, function: Function) -> Iterator[Found]:
        """What all share, made anew at its beginning."""
        text = self._source.of_node
        body = [
            one for one in function.body if not isinstance(getattr(one, "value", 0), ast.Constant)
        ]
        if body and isinstance(body[0], SIMPLE):
            for name, value in self._shared.get(function, ()):
                made = f"{name} = {text(value)}; {text(body[0])}"
                yield from self._source.instead(FIRST, body[0], made)

    def _of_the_single_process(
        self, function: Function, kinds: Mapping[str, str], known: Sequence[Known]
    ) -> Iterator[Found]:
        names = Names(kinds, first_made(function), self._of_file, self._classes.get(function, ""))
        for soon, node, new in taken_over(function, self._source, known, names):
            yield from self._source.instead(soon, node, new, sure=False)
        others = [*dict.fromkeys(one.within for one in known)]
        for statement, new in lines_lacking(function, self._source, others, names):
            yield from self._source.instead(NEXT, statement, new, sure=False)

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
            yield from self._of_a_comparison(node)
        elif isinstance(node, ast.BoolOp):
            word = " or " if isinstance(node.op, ast.And) else " and "
            yield from self._source.instead(NEXT, node, word.join(map(text, node.values)))
        elif isinstance(node, ast.UnaryOp):
            sure = isinstance(node.op, ast.Not)
            yield from self._source.instead(NEXT, node, text(node.operand), sure=sure)
        elif isinstance(node, ast.IfExp):
            soon = soon_of_a_test(node.test, self._source)
            for way in (node.body, node.orelse):
                yield from self._source.instead(soon, node, text(way))
        elif isinstance(node, ast.Call):
            yield from self._of_a_call(node, names)
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            yield from self._source.instead(NEXT, node, text(node.value))
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
            yield from self._source.instead(FIRST, node, new)
        for new in (*nested, *others, *laid_out_otherwise(node, text)):
            yield from self._source.instead(NEXT, node, new)
        for soon, more in self._more(node, names):
            for new in more:
                yield from self._source.instead(soon, node, new, sure=False)
        later = NEXT if isinstance(node, ast.Subscript) else FIRST
        for one in begun_after_others(node, text, self._axes):
            for soon, edit in self._source.instead(later, node, one.new):
                yield soon, replace(edit, over=one.axis, before=one.size)
        if isinstance(node, ast.List) and len(node.elts) <= MOST_LISTED:
            for left_out in node.elts:
                kept = ", ".join(text(one) for one in node.elts if one is not left_out)
                yield from self._source.instead(LATER, node, f"[{kept}]", sure=False)

    def _more(self, node: ast.expr, names: _Names) -> Iterator[tuple[int, Iterator[str]]]:
        text = self._source.of_node

        def kind(of: ast.expr) -> str:
            return names.kinds.get(text(of), "")

        yield NEXT, the_other_way(node, text, kind)
        yield NEXT, not_done(node, text)
        yield LATER, over_other_ranks(node, text, self._axes)
        its = {name: of for name, of in names.at(node.lineno) if "." not in name}
        yield LATER, elsewhere(node, text, kind, its)
        yield LATER, the_rest(node, text, kind)
        unread = {name: of for name, of in names.kinds.items() if name in names.unread}
        yield NEXT, with_what_is_not_read(node, text, unread)
        yield LAST, one_more_or_less(node, text, kind)
        if isinstance(node, ast.Call):
            is_there = {name.partition(".")[0] for name in names.kinds}.__contains__
            yield NEXT, with_an_option(node, text, self._given, is_there)
        elif isinstance(node, ast.Subscript):
            yield LATER, under_another_key(node, text, self._keys, self._axes)

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
                yield from self._source.instead(soon, node, other)
            elif other != own and alike_but_for_size(kind, its_kind):
                yield from self._source.instead(max(soon, NEXT), node, other)

    def _other_constants(self, node: ast.Constant) -> Iterator[Found]:
        value = node.value
        if isinstance(value, bool):
            yield from self._source.instead(FIRST, node, str(not value))
        elif value in OTHER_WORDS and value not in self._axes:
            yield from self._source.instead(NEXT, node, f'"{OTHER_WORDS[value]}"')
        elif isinstance(value, str) and value in self._axes:
            for other in self._axes:  # ranks may wait for each other then
                yield from self._source.instead(LAST, node, repr(other).replace("'", '"'))
        elif type(value) is int and 0 <= value <= MOST_NUMBER:
            for number in (value + 1, value - 1):
                yield from self._source.instead(LATER, node, str(number), sure=False)

    def _of_a_comparison(self, node: ast.Compare) -> Iterator[Found]:
        soon = soon_of_a_test(node, self._source)
        end, start = span(node.left)[1], span(node.comparators[0])[0]
        for num, other in enumerate(OTHER_COMPARISONS.get(type(node.ops[0]), ())):
            yield from self._source.between(soon + (num > 0), end, start, f" {other} ")

    def _of_two(self, node: ast.BinOp) -> Iterator[Found]:
        text = self._source.of_node
        other = OTHER_OPERATORS.get(type(node.op))
        if other is None:
            return
        soon = NEXT if other == "-" and re.search(OWN_RANK, text(node.right)) else LATER
        yield from self._source.instead(soon, node, text(node.left), sure=False)
        if isinstance(node.op, ast.Add | ast.Mult):
            yield from self._source.instead(LATER, node, text(node.right), sure=False)
        else:
            turned = f"{self._as_one(node.right)} - {self._as_one(node.left)}"
            if other == "+":
                yield from self._source.instead(LAST, node, turned, sure=False)
        for new in brackets_elsewhere(node, text):
            yield from self._source.instead(NEXT, node, new)
        between = span(node.left)[1], span(node.right)[0]
        if self._source.piece(*between).strip() in ("+", "-", "*", "/"):  # and no bracket
            yield from self._source.between(LATER, *between, f" {other} ", sure=False)

    def _of_a_call(self, node: ast.Call, names: _Names) -> Iterator[Found]:
        text, function = self._source.of_node, node.func
        name = name_called(node)
        taken = node.args[0] if node.args else None
        if name in NO_WRAPPERS or isinstance(taken, ast.Starred | ast.GeneratorExp):
            return
        of_a_module = isinstance(function, ast.Attribute) and text(function.value) in MODULES
        if isinstance(function, ast.Attribute) and not of_a_module and name != "apply":
            if self._may_be_tensor(function.value, names):
                yield from self._source.instead(NEXT, node, text(function.value), sure=False)
        elif taken is not None and self._may_be_tensor(taken, names):
            yield from self._source.instead(NEXT, node, text(taken), sure=False)
        yield from self._without_each(node)
        yield from self._turned_or_left_out(node, names)
        yield from self._other_functions(node)

    def _other_functions(self, node: ast.Call) -> Iterator[Found]:
        name, called = name_called(node), span(node.func)[1]
        for other in OTHER_FUNCTIONS.get(name, ()):
            start = called[0], called[1] - len(name.encode())
            yield from self._source.between(NEXT, start, called, other)

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
                yield from self._source.instead(NEXT, one, f"not {self._as_one(one)}")
        if len(node.args) > 1 and (kinds[-1] in PLAIN or isinstance(node.args[-1], ast.Constant)):
            given = ", ".join([*map(text, node.args[:-1]), *map(text, node.keywords)])
            yield from self._source.instead(LATER, node, f"{text(node.func)}({given})", sure=False)

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
            yield from self._source.instead(
                NEXT, node, f"{self._source.of_node(node.func)}({given})"
            )

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
