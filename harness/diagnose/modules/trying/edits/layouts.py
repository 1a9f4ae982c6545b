"""How numbers lie, put otherwise into a user's code: parts one after the other or in turn, copies
of all or of each, two dimensions the other way round, the other end.

In: an expression. Out: what it may have been meant to be.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from itertools import combinations

from sumgrad.diagnose.modules.trying.edits.source import (
    Text,
    as_one,
    name_called,
    names_in,
    parts_of,
)

CHUNKS = ("chunk", "tensor_split")
SHAPES = ("view", "reshape")
ORDERS = ("permute", "movedim")
SIZES = (".shape", ".size()")
JOINS = ("cat", "concat", "stack")
ALONG_ONE = {"sum", "mean", "prod", "amax", "amin", "unbind", "logsumexp", "softmax", "cumsum",
             "argmax", "norm", "std", "var", "any", "all", "select"}  # fmt: skip
NO_TENSORS = (ast.Constant, ast.Lambda, ast.Starred, ast.GeneratorExp)
# Functions of torch's and methods whose two arguments may stand the other way round; of those that
# are called by a plain name all but these.
TWO_ALIKE = {"apply", "matmul", "mm", "bmm", "kl_div", "cdist"}
NO_TWO = {"max", "min", "zip", "isinstance", "getattr", "hasattr", "range", "divmod", "pow"}


def laid_out_otherwise(node: ast.expr, text: Text) -> Iterator[str]:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        yield from _of_a_method(node, node.func, text)
        yield from _along_the_other(node, node.func, text)
        yield from _copied(node, text)
        yield from _padded_elsewhere(node, text)
    if isinstance(node, ast.Call):
        yield from _the_other_way_round(node, text)
    if isinstance(node, ast.Call) and name_called(node) == "range" and len(node.args) == 3:
        first, end, step = (as_one(one, text) for one in node.args)
        each = f"({end} // {step})"
        yield f"range({first} * {each}, ({first} + 1) * {each})"
    elif isinstance(node, ast.Tuple | ast.List):
        yield from _in_turn(node, text)
    elif isinstance(node, ast.ListComp) and len(node.generators) == 2:
        yield from _loops_exchanged(node, text)
    elif isinstance(node, ast.Subscript):
        yield from _one_in_turn(node, text)
        of_sizes = text(node.value).endswith(SIZES)
        if of_sizes and isinstance(node.slice, ast.Slice) and node.slice.step is None:
            yield f"{text(node)}[::-1]"


def _loops_exchanged(node: ast.ListComp, text: Text) -> Iterator[str]:
    """`[x * s for x in xs for s in ss]` as `[x * s for s in ss for x in xs]`."""
    one, two = node.generators
    if not names_in(one.target) & names_in(two.iter) and not (one.ifs or two.ifs):
        loops = (f"for {text(each.target)} in {text(each.iter)}" for each in (two, one))
        yield f"[{text(node.elt)} {' '.join(loops)}]"


def other_ends(part: ast.expr, text: Text) -> Iterator[str]:
    """Of what stands in an index: the first for the last, a piece at the other end, the next."""
    if isinstance(part, ast.UnaryOp) and text(part) == "-1":
        yield "0"
    if not isinstance(part, ast.Slice) or part.step is not None:
        return
    lower, upper = part.lower, part.upper
    bound = upper if lower is None else lower
    if bound is None or (lower is not None and upper is not None):
        return
    from_the_end = isinstance(bound, ast.UnaryOp) and isinstance(bound.op, ast.USub)
    size = as_one(bound.operand if isinstance(bound, ast.UnaryOp) else bound, text)
    if from_the_end:
        yield f":{size}" if lower is not None else f"{size}:"
    else:
        yield f":-{size}" if lower is not None else f"-{size}:"
        if upper is not None:
            yield f"{size}:2 * {size}"


def _the_other_way_round(node: ast.Call, text: Text) -> Iterator[str]:
    """Two things that a function is given, and what is put together."""
    name, given, function = name_called(node).rpartition(".")[2], node.args, node.func
    rest = [text(one) for one in node.keywords]
    if isinstance(function, ast.Name) or text(function).startswith("self."):
        may_be = name not in NO_TWO
    else:
        may_be = name in TWO_ALIKE
    plain = not any(isinstance(one, NO_TENSORS) for one in given)
    if may_be and plain and len(given) == 2 and text(given[0]) != text(given[1]):
        yield f"{text(function)}({', '.join([text(given[1]), text(given[0]), *rest])})"
    if name in JOINS and given and not isinstance(given[0], ast.BinOp | ast.Starred):
        turned = f"list({text(given[0])})[::-1]"
        yield f"{text(function)}({', '.join([turned, *map(text, given[1:]), *rest])})"


def _padded_elsewhere(node: ast.Call, text: Text) -> Iterator[str]:
    """On the other side."""
    if name_called(node).rpartition(".")[2] != "pad" or len(node.args) < 2:
        return
    ends = node.args[1].elts if isinstance(node.args[1], ast.Tuple) else []
    if len(ends) >= 2:
        first, then, *others = map(text, ends)
        given = [text(node.args[0]), f"({', '.join([then, first, *others])})"]
        given += [*map(text, node.args[2:]), *map(text, node.keywords)]
        yield f"{text(node.func)}({', '.join(given)})"


def _of_a_method(node: ast.Call, function: ast.Attribute, text: Text) -> Iterator[str]:
    of, given, name = text(function.value), node.args, function.attr
    if text(function.value) == "torch" and given:
        of, given = text(given[0]), given[1:]
    if not given or any(isinstance(one, ast.Starred) for one in given):
        return
    words, first = [*map(text, given)], _number(given[0])
    dim = _dim(node, given[1:2])
    if name in CHUNKS and dim is not None:
        parts = dim if dim < 0 else dim + 1
        yield f"{of}.unflatten({dim}, (-1, {words[0]})).unbind({parts})"
    sizes = given[1].elts if len(given) > 1 and isinstance(given[1], ast.Tuple) else []
    if name == "unflatten" and len(sizes) == 2 and first is not None:
        both = (first, first + 1) if first >= 0 else (first - 1, first)
        turned = f"({text(sizes[1])}, {text(sizes[0])})"
        yield f"{of}.unflatten({first}, {turned}).transpose{both}"
    if name in SHAPES:
        yield from _turned(of, name, words)
    if name in ORDERS:
        yield from (f"{of}.{name}({', '.join(other)})" for other in _two_exchanged(words))
    last = _number(given[1]) if name == "flatten" and len(given) == 2 else None
    if last is not None and first is not None and last == first + 1:
        yield f"{of}.transpose({first}, {last}).flatten({first}, {last})"


def _along_the_other(node: ast.Call, function: ast.Attribute, text: Text) -> Iterator[str]:
    """`x.view(n, a, b).sum(-1)` as `x.view(n, b, a).sum(-2)`: of what lies in turn, or not."""
    of = function.value
    if function.attr not in ALONG_ONE or not node.args or not isinstance(of, ast.Call):
        return
    dim, name = _number(node.args[0]), name_called(of)
    if dim not in (-1, -2) or not isinstance(of.func, ast.Attribute) or len(of.args) < 2:
        return
    *before, one, two = map(text, of.args)
    sizes = of.args[1].elts if isinstance(of.args[1], ast.Tuple) else []
    if name in SHAPES:
        shaped = ", ".join([*before, two, one])
    elif name == "unflatten" and len(sizes) == 2 and text(of.args[0]) == "-1":
        shaped = f"-1, ({text(sizes[1])}, {text(sizes[0])})"
    else:
        return
    rest = [*map(text, node.args[1:]), *map(text, node.keywords)]
    given = ", ".join([str(-3 - dim), *rest])
    yield f"{text(of.func)}({shaped}).{function.attr}({given})"


def _two_exchanged(words: Sequence[str]) -> Iterator[list[str]]:
    for one, other in combinations(range(len(words)), 2):
        exchanged = [*words]
        exchanged[one], exchanged[other] = words[other], words[one]
        yield exchanged


def _turned(of: str, name: str, sizes: Sequence[str]) -> Iterator[str]:
    """Two sizes beside each other the other way round, and turned back."""
    for at in range(len(sizes) - 1):
        one, other = sizes[at : at + 2]
        if one != other and "1" not in (one, other):
            turned = [*sizes[:at], other, one, *sizes[at + 2 :]]
            yield f"{of}.{name}({', '.join(turned)}).transpose({at}, {at + 1})"


def _copied(node: ast.Call, text: Text) -> Iterator[str]:
    """Copies of each for copies of all, and the other way round."""
    assert isinstance(node.func, ast.Attribute)
    of, given, name = text(node.func.value), node.args, node.func.attr
    dim = _dim(node, given[1:2], usual=None)
    if name == "repeat_interleave" and given and dim is not None:
        yield f"torch.cat([{of}] * {as_one(given[0], text)}, {dim})"
    if name in ("repeat", "tile") and given and not node.keywords:
        several = [(at, one) for at, one in enumerate(given) if text(one) != "1"]
        each = "".join(f".repeat_interleave({text(times)}, {at})" for at, times in several)
        yield f"{of}{each}"
    joined = given[0] if name in ("cat", "concat") and given else None
    if isinstance(joined, ast.BinOp) and isinstance(joined.left, ast.List):
        held, dim = joined.left.elts, _dim(node, given[1:2])
        if isinstance(joined.op, ast.Mult) and len(held) == 1 and dim is not None:
            yield f"{as_one(held[0], text)}.repeat_interleave({text(joined.right)}, {dim})"


def _in_turn(node: ast.Tuple | ast.List, text: Text) -> Iterator[str]:
    """`(x[..., ::2], x[..., 1::2])` as the two halves of x."""
    several = [one for one in node.elts if isinstance(one, ast.Subscript)]
    if len(several) < 2 or len(several) != len(node.elts):
        return
    bases, found = {text(one.value) for one in several}, [_every(one) for one in several]
    told = [one for one in found if one is not None]
    if len(bases) > 1 or len(told) < len(several):
        return
    firsts, steps, dims = zip(*told, strict=True)
    if len({*steps}) == len({*dims}) == 1 and [*firsts] == [*range(steps[0])]:
        yield f"{bases.pop()}.chunk({steps[0]}, {dims[0]})"


def _every(node: ast.Subscript) -> tuple[int, int, int] | None:
    """Of `x[..., 1::2]` the 1, the 2 and the dimension."""
    parts = parts_of(node)
    for num, part in enumerate(parts):
        if isinstance(part, ast.Slice) and part.step is not None and part.upper is None:
            first = 0 if part.lower is None else _number(part.lower)
            step = _number(part.step)
            if first is not None and step is not None:
                return first, step, _dim_of(num, parts)
    return None


def _one_in_turn(node: ast.Subscript, text: Text) -> Iterator[str]:
    """`x.chunk(n)[i]` as `x[i::n]`, and this as that."""
    call, at = node.value, node.slice
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
        dim = _dim(call, call.args[1:2])
        is_one = not isinstance(at, ast.Slice | ast.Tuple)
        if call.func.attr in CHUNKS and call.args and dim is not None and dim >= -1 and is_one:
            before = "..., " if dim == -1 else ":, " * dim
            every = f"{text(at)}::{as_one(call.args[0], text)}"
            yield f"{text(call.func.value)}[{before}{every}]"
    parts = parts_of(node)
    for num, part in enumerate(parts):
        if not isinstance(part, ast.Slice) or part.upper is not None:
            continue
        whole = all(text(p) in (":", "...") for i, p in enumerate(parts) if i != num)
        if part.lower is not None and part.step is not None and whole:
            split = f"tensor_split({text(part.step)}, {_dim_of(num, parts)})"
            yield f"{as_one(node.value, text)}.{split}[{text(part.lower)}]"


def _dim_of(num: int, parts: Sequence[ast.expr]) -> int:
    """Of part `num` of an index; counted from behind, where there is an ellipsis."""
    behind = any(isinstance(p, ast.Constant) and p.value is Ellipsis for p in parts)
    return num - len(parts) if behind else num


def _dim(node: ast.Call, given: Sequence[ast.expr], usual: int | None = 0) -> int | None:
    """None where it is no number."""
    named = [one.value for one in node.keywords if one.arg in ("dim", "axis")]
    told = [*given, *named]
    return _number(told[0]) if told else usual


def _number(node: ast.expr) -> int | None:
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return None
    return value if type(value) is int else None
