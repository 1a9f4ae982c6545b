"""What may be written for what: operators, functions that take the same, words."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence

OTHER_OPERATORS: Mapping[type, str] = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*",
}  # fmt: skip
# The likeliest first: with the end or without it; the other way round; what it leaves out.
OTHER_COMPARISONS: Mapping[type, Sequence[str]] = {
    ast.Lt: ("<=", ">", ">="), ast.LtE: ("<", ">=", ">"), ast.Gt: (">=", "<", "<="),
    ast.GtE: (">", "<=", "<"), ast.Eq: ("!=",), ast.NotEq: ("==",), ast.Is: ("is not",),
    ast.IsNot: ("is",), ast.In: ("not in",), ast.NotIn: ("in",),
}  # fmt: skip
SIGNS: Mapping[type, str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
COMPARES: Mapping[type, str] = {
    ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
}  # fmt: skip
BITS: Mapping[type, str] = {ast.BitOr: "|", ast.BitAnd: "&", ast.BitXor: "^"}
# Functions that take the same, of which one may be written for the other.
ALIKE = [words.split() for words in (
    "exp exp2 expm1", "log log2 log1p", "sum mean", "amax amin", "max min", "argmax argmin",
    "maximum minimum", "floor ceil round", "sin cos", "softmax log_softmax", "any all",
    "sigmoid logsigmoid tanh", "cumsum cumprod", "tril triu", "sqrt rsqrt square",
    "empty zeros ones", "empty_like zeros_like ones_like", "new_empty new_zeros new_ones",
    "chunk tensor_split", "gelu silu relu", "children modules", "named_children named_modules",
    "fmod remainder", "scatter scatter_add", "scatter_ scatter_add_", "index_copy index_add",
    "index_copy_ index_add_", "copy_ add_", "extend append", "repeat repeat_interleave",
    "gather_for_metrics gather", "norm square", "abs square", "add sub", "add_ sub_", "mul div",
    "mul_ div_", "addcmul addcdiv", "addcmul_ addcdiv_", "clamp_min clamp_max", "std var",
    "logical_and logical_or", "lt le gt ge", "eq ne", "sum amax logsumexp", "mean median",
    "l1_loss mse_loss smooth_l1_loss huber_loss", "nll_loss cross_entropy",
    "log_softmax logsigmoid", "binary_cross_entropy binary_cross_entropy_with_logits",
    "relu leaky_relu elu softplus", "avg_pool1d max_pool1d", "avg_pool2d max_pool2d",
    "layer_norm rms_norm", "tanh atan erf",
    "softmin softmax", "dot cosine_similarity", "cummax cummin", "named_parameters named_buffers",
    "floor trunc", "sinh tanh", "exp sigmoid softplus",
    "to_local full_tensor", "fftshift ifftshift", "fft ifft", "rfft ihfft", "fft2 ifft2",
    "fftn ifftn",
)]  # fmt: skip
OTHER_FUNCTIONS: Mapping[str, Sequence[str]] = {
    one: [*dict.fromkeys(o for alike in ALIKE if one in alike for o in alike if o != one)]
    for alike in ALIKE
    for one in alike
}
OTHER_WORDS = {"mean": "sum", "sum": "mean"}  # as of a loss's reduction
