"""A factor that may have been left out: of what a backward returns, of one term of a sum.

In: a function of a user's file, and of what kind is what stands under each name in it. Out:
expressions in it, and each of them times something.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from itertools import permutations

from sumgrad.diagnose.modules.trying.edits.source import (
    Function,
    Text,
    as_one,
    bodies,
    expressions,
    names_in,
)

MOST_NAMES = 8  # of one function, by which something in it is multiplied
TENSOR, NUMBER = ("tensor float", "parameter float"), "float"
MOST_FACTORS, PLAIN = 3, ("float", "int")
MOST_BESIDE = 3
COMPUTED = (ast.BinOp, ast.Call, ast.Subscript)
TWICE = "2"  # each pair is counted from both sides
Meant = tuple[ast.expr, str]


def of_what_is_returned(
    function: Function, text: Text, kinds: Mapping[str, str]
) -> Iterator[Meant]:
    """Times, and by, what has a name in it: a number or its difference from one, or a tensor whose
    shape fits."""
    read = names_in(function)
    names = [name for name, kind in kinds.items()
             if name.partition(".")[0] in read and kind.startswith((*TENSOR, NUMBER))]  # fmt: skip
    for node in _returned(function):
        its = kinds.get(text(node), "")
        for name in names[:MOST_NAMES]:
            kind, known = kinds[name], text(node)
            if name == known or not _fits(kind, its):
                continue
            own = as_one(node, text)
            yield node, f"{own} * {name}"
            if kind == NUMBER:
                yield node, f"{own} * (1 - {name})"
            yield node, f"{own} / {name}"


def of_terms(function: Function, text: Text) -> Iterator[Meant]:
    """Twice one of two terms."""
    for body in bodies(function):
        for statement in body:
            for node in expressions(statement):
                if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
                    for term in (node.right, node.left):
                        if _may_be_twice(term):
                            yield term, f"{TWICE} * {as_one(term, text)}"


def of_terms_by_name(function: Function, text: Text, kinds: Mapping[str, str]) -> Iterator[Meant]:
    """One of two terms times, or by, a number that has a name."""
    read = names_in(function)
    names = [name for name, kind in kinds.items()
             if kind == NUMBER and name.partition(".")[0] in read][:MOST_FACTORS]  # fmt: skip
    for body in bodies(function):
        for node in (one for statement in body for one in expressions(statement)):
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
                for term in (node.right, node.left):
                    if isinstance(term, ast.Constant) or kinds.get(text(term)) in PLAIN:
                        continue
                    for name in [one for one in names if one not in names_in(term)]:
                        own = as_one(term, text)
                        yield from ((term, f"{own} * {name}"), (term, f"{own} / {name}"))


def of_one_beside_another(
    function: Function, text: Text, kinds: Mapping[str, str]
) -> Iterator[Meant]:
    """One of two or three that are returned less, more, or times another of them."""
    for body in bodies(function):
        for given in (one.value for one in body if isinstance(one, ast.Return)):
            several = given.elts if isinstance(given, ast.Tuple) else []
            if not 1 < len(several) <= MOST_BESIDE:
                continue
            for one, other in permutations(several, 2):
                both = [kinds.get(text(e), "tensor" if isinstance(e, COMPUTED) else "")
                        for e in (one, other)]  # fmt: skip
                if all(kind.startswith("tensor") for kind in both):
                    own, beside = as_one(one, text), as_one(other, text)
                    yield from ((one, f"{own} {sign} {beside}") for sign in "-+*")


def _may_be_twice(term: ast.expr) -> bool:
    """No number, which is a place or a size, and no sum, each of whose terms may be."""
    if isinstance(term, ast.BinOp):
        return isinstance(term.op, ast.Mult | ast.Div | ast.MatMult)
    return isinstance(term, ast.Call)


def _returned(function: Function) -> Iterator[ast.expr]:
    for body in bodies(function):
        for statement in body:
            if isinstance(statement, ast.Return) and statement.value is not None:
                given = statement.value
                several = given.elts if isinstance(given, ast.Tuple) else [given]
                yield from (one for one in several if not isinstance(one, ast.Constant))


def _fits(kind: str, its: str) -> bool:
    """Whether what is of the one kind can multiply what is of the other without another shape."""
    if kind == NUMBER or not its:
        return True
    if not its.startswith(TENSOR):
        return False
    sizes, others = (one.split(" ")[2].split("x") for one in (kind, its))
    if sizes == [""]:
        return True
    pairs = zip(reversed(sizes), reversed(others), strict=False)
    return len(sizes) <= len(others) and all(one in ("1", other) for one, other in pairs)
