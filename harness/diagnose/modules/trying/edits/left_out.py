"""What a function may have left out, or done once too often: a factor that another term of a sum
has, an option that stays at its default, a function of what is what it gives already, a list of its
own in place of one that all calls or all objects of a class share.

In: a function of a user's file. Out: expressions in it, and what each may have been meant to be.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence

from sumgrad.diagnose.modules.trying.edits.source import (
    SIMPLE,
    Function,
    Text,
    as_one,
    bodies,
    expressions,
    name_called,
)
from sumgrad.diagnose.modules.trying.edits.written_for import SIGNS

# Of torch's functions: what they take besides, the other way than by default.
OPTIONS = {"scatter_reduce": "include_self=False", "scatter_reduce_": "include_self=False",
           "index_reduce": "include_self=False", "zero_grad": "set_to_none=False",
           "std": "unbiased=False", "var": "unbiased=False", "std_mean": "unbiased=False",
           "var_mean": "unbiased=False", "scaled_dot_product_attention": "is_causal=True",
           "interpolate": "align_corners=True", "grid_sample": "align_corners=True",
           "affine_grid": "align_corners=True", "bucketize": "right=True",
           "searchsorted": "right=True", "kl_div": "log_target=True", "gelu": 'approximate="tanh"',
           "poisson_nll_loss": "log_input=False",
           "embedding_bag": "include_last_offset=True", "stft": "center=False",
           "avg_pool1d": "count_include_pad=False", "avg_pool2d": "count_include_pad=False",
           "solve_triangular": "unitriangular=True",
           "triplet_margin_loss": "swap=True", "register_forward_hook": "prepend=True",
           "register_forward_pre_hook": "prepend=True",
           "register_full_backward_hook": "prepend=True"}  # fmt: skip
Meant = tuple[ast.expr, str]
MUTABLE = (ast.List, ast.Dict, ast.Set)
MAKES_MUTABLE = {"list", "dict", "set", "defaultdict", "deque", "OrderedDict", "Counter"}


def options_of(tree: ast.AST) -> Mapping[str, Mapping[str, bool]]:
    """By name of a file's functions: the switches that each takes, and how they are by default."""
    found: dict[str, dict[str, bool]] = {}
    for one in ast.walk(tree):
        if isinstance(one, Function):
            of = one.args
            by_place = [*of.posonlyargs, *of.args]
            every = [
                *zip(reversed(by_place), reversed(of.defaults), strict=False),
                *zip(of.kwonlyargs, of.kw_defaults, strict=True),
            ]
            switches = {
                arg.arg: value.value
                for arg, value in every
                if isinstance(value, ast.Constant) and isinstance(value.value, bool)
            }
            if switches:
                found.setdefault(one.name, {}).update(switches)
    return found


def shared_by_all(tree: ast.AST) -> Mapping[Function, Sequence[tuple[str, ast.expr]]]:
    """By function what may be put under a name first in it, so that it is no other's: of an
    `__init__` what stands in its class, of others what an argument is by default."""
    found: dict[Function, list[tuple[str, ast.expr]]] = {}
    for one in ast.walk(tree):
        if isinstance(one, ast.ClassDef):
            held = [(f"self.{name}", value) for name, value in map(_put, one.body)
                    if value is not None and _is_mutable(value)]  # fmt: skip
            for function in one.body if held else ():
                if isinstance(function, Function) and function.name == "__init__":
                    found.setdefault(function, []).extend(held)
        elif isinstance(one, Function):
            by_place = [*one.args.posonlyargs, *one.args.args]
            pairs = [
                *zip(reversed(by_place), reversed(one.args.defaults), strict=False),
                *zip(one.args.kwonlyargs, one.args.kw_defaults, strict=True),
            ]
            own = [(arg.arg, value) for arg, value in pairs
                   if value is not None and _is_mutable(value)]  # fmt: skip
            if own:
                found.setdefault(one, []).extend(own)
    return found


def _put(statement: ast.stmt) -> tuple[str, ast.expr | None]:
    """A name and what is put under it; no value where it is anything else."""
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        return statement.target.id, statement.value
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
        return statement.targets[0].id, statement.value
    return "", None


def _is_mutable(node: ast.expr) -> bool:
    made = isinstance(node, ast.Call) and name_called(node) in MAKES_MUTABLE
    return made or isinstance(node, MUTABLE)


def left_out(
    function: Function,
    text: Text,
    switches: Mapping[str, Mapping[str, bool]],
    may_be_tensor: Callable[[ast.expr], bool],
) -> Iterator[Meant]:
    """switches: of `options_of`. may_be_tensor: what is known of an expression."""
    factors: dict[str, str] = {}
    statements = sorted((s for b in bodies(function) for s in b), key=lambda s: s.lineno)
    for statement in statements:
        for node in expressions(statement):
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
                yield from _with_its_neighbours_factor(node, text, factors)
            elif isinstance(node, ast.Call):
                yield from _with_a_switch(node, text, switches)
        yield from _as_it_is(statement, text, may_be_tensor)
        made = _made_with_a_factor(statement, text)
        if made is not None:
            factors[made[0]] = made[1]


def _made_with_a_factor(statement: ast.stmt, text: Text) -> tuple[str, str] | None:
    """`x`, ` * f` of `x = a * f`, of `x *= f`; also of a division."""
    if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
        operation, by, name = statement.op, statement.value, statement.target.id
    elif (
        isinstance(statement, ast.Assign)
        and isinstance(statement.targets[0], ast.Name)
        and isinstance(statement.value, ast.BinOp)
    ):
        operation, by = statement.value.op, statement.value.right
        name = statement.targets[0].id
    else:
        return None
    if not isinstance(operation, ast.Mult | ast.Div):
        return None
    return name, f" {SIGNS[type(operation)]} {as_one(by, text)}"


def _with_its_neighbours_factor(
    node: ast.BinOp, text: Text, factors: Mapping[str, str]
) -> Iterator[Meant]:
    """`x + y` as `x + y * f`, where `x` was multiplied by it, and `y` not."""
    for one, other in ((node.left, node.right), (node.right, node.left)):
        if not isinstance(one, ast.Name) or one.id not in factors:
            continue
        factor = factors[one.id]
        has_it = isinstance(other, ast.Name) and factors.get(other.id) == factor
        if not has_it and not text(other).endswith(factor.strip()):
            yield other, f"{as_one(other, text)}{factor}"


def _with_a_switch(
    node: ast.Call, text: Text, switches: Mapping[str, Mapping[str, bool]]
) -> Iterator[Meant]:
    if any(isinstance(one, ast.Starred) for one in node.args):
        return
    name, given = name_called(node), {k.arg for k in node.keywords}
    options = [f"{key}={not value}" for key, value in switches.get(name, {}).items()]
    options += [OPTIONS[name]] if name in OPTIONS else []
    for option in options:
        if option.split("=")[0] not in given and None not in given:
            all_of_it = [*map(text, node.args), *map(text, node.keywords), option]
            yield node, f"{text(node.func)}({', '.join(all_of_it)})"


def _as_it_is(
    statement: ast.stmt, text: Text, may_be_tensor: Callable[[ast.expr], bool]
) -> Iterator[Meant]:
    """`a, b` instead of `f(a, b)`, of which the function makes two as well."""
    if not isinstance(statement, (*SIMPLE, ast.Return)) or not isinstance(
        statement.value, ast.Call
    ):
        return
    call = statement.value
    if isinstance(statement, ast.Assign):
        target = statement.targets[0]
        fits = isinstance(target, ast.Tuple) and len(target.elts) == len(call.args)
    else:
        fits = isinstance(statement, ast.Return)
    of_torch = ast.unparse(call.func).partition(".")[0] in ("torch", "F", "dist", "nn")
    if (
        fits
        and not of_torch
        and len(call.args) > 1
        and not call.keywords
        and all(map(may_be_tensor, call.args))
    ):
        yield call, f"({', '.join(map(text, call.args))})"
