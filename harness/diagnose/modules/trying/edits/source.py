"""A file of a user's code: pieces of it as text, its functions, and the names in them."""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from sumgrad.record.trial import Edit

Function = ast.FunctionDef | ast.AsyncFunctionDef
Text = Callable[[ast.expr | ast.keyword], str]
Found = tuple[int, Edit]  # how soon it is to be tried
FIRST, NEXT, LATER, LAST = 0, 3, 4, 6  # how soon
COMPOUND = (ast.BinOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.Lambda, ast.UnaryOp)
SIMPLE = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr)
# What reaches out of the process: a function that has one of these is left alone.
OUTSIDE = {"os", "shutil", "subprocess", "open", "Path", "unlink", "rmtree", "remove", "rmdir",
           "save", "dump", "write", "write_text", "write_bytes", "mkdir", "makedirs", "rename",
           "touch", "system", "socket", "requests", "exec", "eval", "send_signal", "kill",
           "exit", "savez", "savez_compressed", "savetxt", "tofile", "to_csv", "to_json",
           "to_pickle", "to_parquet", "savefig", "save_pretrained", "push_to_hub", "add_scalar",
           "Popen", "check_call", "check_output", "copytree", "copyfile", "move", "urlopen",
           "urlretrieve"}  # fmt: skip
OUTSIDE_BEGINS = ("save_", "write_", "dump_")
OF_MODULES = {"os", "shutil", "subprocess", "socket", "pathlib", "tempfile", "requests", "urllib",
           "http", "pickle", "sqlite3", "wandb", "tensorboard"}  # fmt: skip
INSIDE = {"save_for_backward", "save_for_forward", "save_on_cpu"}
# What ranks make together over a store, where one may wait for others for ever.
MADE_TOGETHER = {"new_group", "new_subgroups", "split_group", "init_device_mesh", "DeviceMesh"}


@dataclass(frozen=True, slots=True)
class Source:
    """A file, by line as bytes: ast counts columns so."""

    file: str
    lines: Sequence[bytes]

    @classmethod
    def of(cls, file: str, text: str) -> Source:
        return cls(file, text.encode().splitlines(keepends=True))

    def piece(self, start: tuple[int, int], end: tuple[int, int]) -> str:
        (first, column), (last, stop) = start, end
        if first == last:
            return self.lines[first - 1][column:stop].decode()
        inner = self.lines[first : last - 1]
        parts = (self.lines[first - 1][column:], *inner, self.lines[last - 1][:stop])
        return b"".join(parts).decode()

    def of_node(self, node: ast.expr | ast.stmt | ast.keyword) -> str:
        return self.piece(*span(node))

    def between(
        self,
        soon: int,
        start: tuple[int, int],
        end: tuple[int, int],
        new: str,
        *,
        sure: bool = True,
        expression: bool = True,
    ) -> Iterator[Found]:
        """An edit of what stands there, with how soon; none where it changes nothing."""
        old = self.piece(start, end)
        lacking = old.count("\n") - new.count("\n")
        if lacking:
            new = f"({new}{chr(10) * lacking})" if expression else new + "\n" * lacking
        if old != new and lacking >= 0:
            yield soon, Edit(file=self.file, start=start, end=end, old=old, new=new, sure=sure)

    def instead(
        self, soon: int, node: ast.expr | ast.stmt, new: str, *, sure: bool = True
    ) -> Iterator[Found]:
        expression = isinstance(node, ast.expr)
        yield from self.between(soon, *span(node), new, sure=sure, expression=expression)


def span(
    node: ast.expr | ast.stmt | ast.keyword | ast.arg,
) -> tuple[tuple[int, int], tuple[int, int]]:
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


def name_called(node: ast.Call) -> str:
    """Of a method its own name alone."""
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) else ast.unparse(function)


def as_one(node: ast.expr, text: Text) -> str:
    """As an operand: in brackets where it has operators of its own."""
    return f"({text(node)})" if isinstance(node, COMPOUND) else text(node)


def parts_of(index: ast.Subscript) -> list[ast.expr]:
    """`:` and `1` of `x[:, 1]`."""
    return index.slice.elts if isinstance(index.slice, ast.Tuple) else [index.slice]


def with_part(index: ast.Subscript, num: int, part: str, text: Text) -> str:
    """The same with another part `num`."""
    shown = [part if i == num else text(one) for i, one in enumerate(parts_of(index))]
    return f"{text(index.value)}[{', '.join(shown)}]"


def bodies(function: Function) -> Iterator[Sequence[ast.stmt]]:
    """Of a function, and of what stands in it, but not of functions and classes in it."""
    waiting: list[Sequence[ast.stmt]] = [function.body]
    while waiting:
        body = waiting.pop(0)
        yield body
        for statement in body:
            # One in a `while` may make it go on for ever.
            if not isinstance(statement, Function | ast.ClassDef | ast.While):
                held = [getattr(statement, name, None) or [] for name in ("body", "orelse",
                                                                         "finalbody")]  # fmt: skip
                waiting += [own for own in held if own]


def expressions(statement: ast.stmt) -> Iterator[ast.expr]:
    """Of a statement, those in them too, but not those of statements in it, of text that is put
    together, nor of annotations."""
    if isinstance(statement, Function | ast.ClassDef | ast.While):
        return
    waiting: list[ast.AST] = [
        child for child in ast.iter_child_nodes(statement) if not isinstance(child, ast.stmt)
    ]
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.expr):
            yield node
        if not isinstance(node, ast.JoinedStr | ast.stmt):
            waiting += ast.iter_child_nodes(node)


def names_in(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def unread_names(function: Function) -> set[str]:
    """Arguments, and what is put under a name, that nothing reads."""
    every = [one for one in ast.walk(function) if isinstance(one, ast.Name)]
    read = {one.id for one in every if isinstance(one.ctx, ast.Load)}
    made = {one.id for one in every if isinstance(one.ctx, ast.Store)}
    given = function.args
    made |= {one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)}
    return made - read


def reaching_outside(trees: Sequence[ast.Module]) -> set[str]:
    """Names of those functions of these files that do something that is not undone, as with files,
    or that call one that does: by the names that stand in them."""
    functions = [one for tree in trees for one in ast.walk(tree) if isinstance(one, Function)]
    called = {function: words_in(function) for function in functions}
    every = {word for words in called.values() for word in words} | {f.name for f in functions}
    outside = OUTSIDE | {name for tree in trees for name in _imported(tree)}
    outside |= {word for word in every - INSIDE if word.startswith(OUTSIDE_BEGINS)}
    while reached := {f.name for f, words in called.items() if words & outside} - outside:
        outside |= reached
    return {f.name for f in functions} & outside


def _imported(tree: ast.Module) -> Iterator[str]:
    """Names of what comes from modules that reach outside."""
    for one in ast.walk(tree):
        if isinstance(one, ast.ImportFrom) and (one.module or "").partition(".")[0] in OF_MODULES:
            yield from (name.asname or name.name for name in one.names)


def words_in(node: ast.AST) -> set[str]:
    """Names in it, and those of attributes."""
    attributes = {one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute)}
    return names_in(node) | attributes


def names_made(statement: ast.stmt) -> set[str]:
    """What it puts something under."""
    every = [one for one in ast.walk(statement) if isinstance(one, ast.Name)]
    return {one.id for one in every if isinstance(one.ctx, ast.Store)}


def names_made_by(tree: ast.Module) -> set[str]:
    """What stands in a file: its functions, classes, imports, and what it puts under a name."""
    found = {one.name for one in tree.body if isinstance(one, Function | ast.ClassDef)}
    for one in tree.body:
        if isinstance(one, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name.partition(".")[0] for alias in one.names}
        elif not hasattr(one, "body"):
            found |= names_made(one)
    return found


def makes_groups(statement: ast.stmt) -> bool:
    """Whether a statement that has no others in it makes something for which ranks wait."""
    return not hasattr(statement, "body") and not MADE_TOGETHER.isdisjoint(words_in(statement))


def first_made(function: Function) -> dict[str, int]:
    """By name the line where something is put under it first: its own of an argument's."""
    given = function.args
    of_arguments = (*given.posonlyargs, *given.args, *given.kwonlyargs)
    found = {one.arg: function.lineno for one in of_arguments}
    for one in ast.walk(function):
        if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
            found[one.id] = min(found.get(one.id, one.lineno), one.lineno)
    return found


def may_be_exchanged(one: ast.stmt, other: ast.stmt) -> bool:
    """Whether the second may come before the first, and does something else there."""
    if not (isinstance(one, SIMPLE) and isinstance(other, SIMPLE)):
        return False
    if makes_groups(one) or makes_groups(other):
        return False
    made, read = names_made(one), names_in(other)
    if one.col_offset != other.col_offset or one.lineno == other.lineno:
        return False
    if (made & read) - names_read(one):
        return False  # it is not there before
    calls = isinstance(one, ast.Expr) or isinstance(other, ast.Expr)
    together = (names_read(one) | made) & (read | names_made(other))
    return bool(made & read or names_made(other) & names_read(one) or (calls and together))


def names_read(statement: ast.stmt) -> set[str]:
    every = [one for one in ast.walk(statement) if isinstance(one, ast.Name)]
    return {one.id for one in every if isinstance(one.ctx, ast.Load)}


def spelt_out(node: ast.expr, made: Mapping[str, ast.expr]) -> ast.expr:
    """With what stands for names in their place."""
    spelt = _Spelt(made).visit(copy.deepcopy(node))
    assert isinstance(spelt, ast.expr)
    return spelt


class _Spelt(ast.NodeTransformer):
    def __init__(self, made: Mapping[str, ast.expr]) -> None:
        self._made = made

    def visit_Name(self, node: ast.Name) -> ast.expr:
        held = self._made.get(node.id)
        is_read = isinstance(node.ctx, ast.Load)
        return node if held is None or not is_read else copy.deepcopy(held)


def made_once(function: Function) -> dict[str, ast.expr]:
    """What stands under a name, where one statement alone puts it there."""
    pairs: list[tuple[ast.expr, ast.expr]] = []
    often = Counter[str]()
    for one in ast.walk(function):
        if isinstance(one, ast.stmt) and not hasattr(one, "body"):
            often.update(names_made(one))
        if isinstance(one, ast.Assign) and len(one.targets) == 1:
            target, value = one.targets[0], one.value
            pairs.append((target, value))
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                pairs += zip(target.elts, value.elts, strict=False)
    return {one.id: value for one, value in pairs
            if isinstance(one, ast.Name) and often[one.id] == 1
            and one.id not in names_in(value)}  # fmt: skip
