"""Lines that may want what all ranks have together, where each gives them its own part."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Set

from sumgrad.diagnose.modules.in_code.calls_at import CallsAt
from sumgrad.diagnose.modules.in_code.lines import Lines
from sumgrad.diagnose.modules.in_code.made_by import SHAPING
from sumgrad.diagnose.modules.wanted.inverses import OF_PRODUCTS, PARTS_JOINED
from sumgrad.record.computed import MODULE, Computation
from sumgrad.record.trial import Change, Way

# What gives each number, or each vector, by itself: of the whole it gives the same. What a product
# sums up is a sum.
BY_ITSELF = {
    "add", "sub", "rsub", "mul", "div", "rdiv", "neg", "pow", "rpow", "exp", "expm1", "log",
    "log1p", "log2", "log10", "sqrt", "rsqrt", "square", "abs", "sign", "sin", "cos", "tan", "tanh",
    "atan", "atan2", "asin", "acos", "sigmoid", "logsigmoid", "relu", "relu6", "gelu", "silu",
    "elu", "celu", "selu", "leaky_relu", "softplus", "hardtanh", "mish", "erf", "clamp",
    "clamp_min", "clamp_max", "clip", "where", "masked_fill", "maximum", "minimum", "eq", "ne",
    "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "and", "or", "invert",
    "xor", "remainder", "fmod", "floor", "ceil", "round", "trunc", "reciprocal", "lerp", "addcmul",
    "floor_divide", "floordiv", "mod", "dropout", "sum", "embedding", "dot", "addmm", "baddbmm",
    "outer", "isnan", "isfinite", "type_as", "view_as", "expand_as", "repeat", "broadcast_to",
    "tile", "numel", "size", "dim", "item", "tolist", "len", "bool", "int", "type", "half",
    "bfloat16", "index_put", "setitem", "copy", "add_", "zeros_like", "ones_like", "empty_like",
    "full_like", "new_zeros", "new_ones", "new_full", "new_empty", "all_reduce", "all_gather",
    *SHAPING, *PARTS_JOINED, *OF_PRODUCTS,
}  # fmt: skip
BY_ITSELF_MODULES = {
    "Linear", "Embedding", "Dropout", "ReLU", "GELU", "SiLU", "Tanh", "Sigmoid", "Identity",
    "LeakyReLU", "ELU", "Softplus", "Flatten",
}  # fmt: skip
LATER = 2  # than what is known to be a part of what the single process has
MOST_DIMS = 3
BOTH: tuple[Way, ...] = ("whole_both", "whole")


class Wholes:
    """kinds: of torch's own modules, by name."""

    def __init__(
        self, lines: Lines, calls: CallsAt, axes: list[str], kinds: Mapping[str, str]
    ) -> None:
        self._lines, self._calls, self._axes, self._kinds = lines, calls, axes, kinds
        self._there: dict[str, set[tuple[int, ...]]] = {}
        for c in lines.single.computations:
            first = next((t for t in c.takes if isinstance(t, int)), None)
            if first is not None:
                shape = tuple(lines.single.values[first].shape)
                self._there.setdefault(c.function, set()).add(shape)

    def at(self, c: Computation) -> Iterator[tuple[int, Change]]:
        """Each with how much later than what is known to be a part it is to be tried."""
        kind = self._kinds.get(c.function.removeprefix(MODULE), "")
        first = next((i for i, t in enumerate(c.takes) if isinstance(t, int)), None)
        if c.function.strip("_") in BY_ITSELF or kind in BY_ITSELF_MODULES or first is None:
            return
        others = () if c.function.startswith(MODULE) else range(first + 1, len(c.takes))
        for axis in self._axes:
            dims = {dim: self._is_known(axis, c, first, dim)
                    for dim in self._calls.dims(axis, c, first)}  # fmt: skip
            for nth, dim in enumerate(sorted(dims, key=lambda dim: not dims[dim])[:MOST_DIMS]):
                ats = (first, *(at for at in others if self._is_cut_so(axis, c, first, at, dim)))
                later = 0 if dims[dim] or len(dims) == 1 else LATER + nth
                for way in BOTH:
                    yield later, Change(site=c.site, function=c.function, way=way, axis=axis,
                                        ats=ats, dim=dim)  # fmt: skip

    def _is_known(self, axis: str, c: Computation, first: int, dim: int) -> bool:
        """Whether the single process has such a whole there, or it looks along the dimension."""
        shapes = self._calls.whole_shapes(axis, c, first, dim)
        seen = not shapes.isdisjoint(self._there.get(c.function, ()))
        return seen or _is_along(c, dim, {len(shape) for shape in shapes})

    def _is_cut_so(self, axis: str, c: Computation, first: int, at: int, dim: int) -> bool:
        """Whether an argument is cut along the dimension as the first one is."""
        if dim not in self._calls.dims(axis, c, at):
            return False
        size = {shape[dim] for shape in self._calls.whole_shapes(axis, c, at, dim)}
        return size == {shape[dim] for shape in self._calls.whole_shapes(axis, c, first, dim)}


def _is_along(c: Computation, dim: int, ndims: Set[int]) -> bool:
    """Whether it is said to look along the dimension, as in `x.mean(1)`, `x.flip((-1,))`."""
    said = next((t for t in c.takes if isinstance(t, str)), "")
    found = re.fullmatch(r"(?:dims?=)?[\[(]?(-?\d+),?[\])]?", said)
    return found is not None and int(found[1]) in {one for n in ndims for one in (dim, dim - n)}
