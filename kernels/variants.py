"""Every kernel as it is launched, for the certificate: arguments, constants, warps, stages.

Sizes are those of a real model: rows of 4096, a vocabulary of 32000, heads of 128. A test reads the
source and fails when a launched kernel is missing here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sumgrad.kernels import runtime
from sumgrad.kernels.attention import back_constants, splits
from sumgrad.kernels.attention import default_tiles as attention_tiles
from sumgrad.kernels.linear import Tiles, turns_weights
from sumgrad.kernels.linear import default_tiles as product_tiles

DTYPES = ("float32", "bfloat16", "float16", "float64")
SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}
ROW, VOCABULARY, HEAD = 4096, 32000, 128
INDEX = "*i64"
LEAF = {"leaf_row": INDEX, "leaf_count": INDEX}
WHOLE_ROW = {"LENGTH": ROW, "BLOCK": ROW}


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One kernel as it is launched. arguments: name -> "*fp32", "i32", ...; constants: constexprs.

    counters: how many integer atomics it may contain.
    """

    name: str
    dtype: str
    arguments: dict[str, str]
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 2
    counters: int = 0
    products: bool = False


def variants(kind: str, dtypes: Sequence[str] = DTYPES) -> list[Variant]:
    """Every kernel of this package. kind: "cuda" or "hip", which choose other tiles."""
    found: list[Variant] = []
    for dtype in dtypes:
        make, given = _Maker(dtype), getattr(torch, dtype)
        found += _norm_variants(make)
        found += _product_variants(make, product_tiles(given, kind=kind))
        found += _attention_variants(make, attention_tiles(given, kind))
        found += _token_variants(make)
        found += _elementwise_variants(make)
    return found


class _Maker:
    """Makes variants of one dtype. x, acc: pointers to inputs, and to what the kernels sum in."""

    def __init__(self, dtype: str) -> None:
        accumulator = runtime.accumulator_dtype(getattr(torch, dtype))
        self.dtype = dtype
        self.x = "*" + SHORT[dtype]
        self.acc = "*" + SHORT[str(accumulator).removeprefix("torch.")]
        self.stages = runtime.stages_of(getattr(torch, dtype))
        self.constant = {"ACC": runtime.TL_DTYPE[accumulator]}

    def __call__(
        self, name: str, arguments: dict[str, str], *, constants: dict[str, Any],
        acc: bool = True, **rest: Any,
    ) -> Variant:  # fmt: skip
        """acc: whether the kernel has the constant ACC."""
        constants = constants | (self.constant if acc else {})
        return Variant(
            name=name, dtype=self.dtype, arguments=arguments, constants=constants, **rest
        )


def _norm_variants(make: _Maker) -> Iterable[Variant]:
    x, acc, row, leaf = make.x, make.acc, WHOLE_ROW, LEAF
    warps: dict[str, Any] = {"num_warps": runtime.warps_for(ROW)}
    rows = dict.fromkeys(("dy", "x", "weight"), x) | {"rstd": acc}
    yield make(
        "rms_norm.rms_norm_fwd",
        {"x": x, "weight": x, "y": x, "rstd": acc, "num_rows": "i32"},
        constants=row | {"EPS": 1e-6, "ROWS": 1}, **warps,
    )  # fmt: skip
    yield make(
        "rms_norm.rms_norm_bwd_leaf", rows | {"dx": x, "leaves": acc} | leaf,
        constants=row | {"ROWS": 1, "STAGES": make.stages}, **warps,
    )  # fmt: skip
    for fused in (True, False):
        yield make(
            "rms_norm.rms_norm_bwd_last_block",
            rows | {"dx": x, "partials": acc, "dweight": acc, "counter": "*i32"}
            | {"num_rows": "i32", "num_blocks": "i32"},
            constants=row | {"FUSED": fused}, counters=int(fused), **warps,
        )  # fmt: skip
    yield make(
        "rms_norm.sum_partials", {"partials": acc, "dweight": acc, "num_blocks": "i32"},
        constants={"LENGTH": ROW, "BLOCK": 256}, acc=False,
    )  # fmt: skip
    stats = {"mean": acc, "low": acc, "rstd": acc}
    yield make(
        "layer_norm.layer_norm_fwd",
        {"x": x, "gamma": x, "beta": x, "y": x} | stats | {"num_rows": "i32"},
        constants=row | {"EPS": 1e-5, "ROWS": 1}, **warps,
    )  # fmt: skip
    yield make(
        "layer_norm.layer_norm_bwd_leaf",
        {"dy": x, "x": x, "gamma": x} | stats
        | {"dx": x, "gamma_leaves": acc, "beta_leaves": acc} | leaf,
        constants=row | {"ROWS": 1, "STAGES": make.stages}, **warps,
    )  # fmt: skip


def _product_variants(make: _Maker, tiles: Tiles) -> Iterable[Variant]:
    x, acc, index, leaf = make.x, make.acc, INDEX, LEAF
    launched: dict[str, Any] = {
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
        "products": True,
    }
    of_weight = tiles.weight or tiles
    tile = {"BM": tiles.rows, "BN": tiles.columns, "BK": tiles.depth, "N": ROW, "K": ROW}
    turned = turns_weights(getattr(torch, make.dtype))
    forward = [(not turned, True), (not turned, False)]
    for transposed, bias in forward if turned else [*forward, (False, False)]:
        yield make(
            "linear.matmul",
            {"a": x, "b": x, "bias": x, "out": x, "num_rows": "i32"},
            constants=tile | {"TRANSPOSED": transposed, "BIAS": bias}, **launched,
        )  # fmt: skip
    yield make(
        "linear.linear_dweight",
        {"dy": x, "x": x, "values": acc, "stacks": acc} | leaf
        | {"node_first": index, "merges": "*i32", "depth": "i32"},
        constants=tile | {"BM": of_weight.rows, "BN": of_weight.columns, "BK": of_weight.depth},
        **launched | {"num_warps": of_weight.num_warps, "num_stages": of_weight.num_stages},
    )  # fmt: skip
    yield make(
        "linear.column_leaf", {"dy": x, "leaves": acc} | leaf,
        constants={"LENGTH": ROW, "BLOCK": 256},
    )  # fmt: skip
    yield make(
        "primitives.fold_stage",
        {"children": acc, "table": "*i32", "out": acc, "num_columns": "i32"},
        constants={"SLOTS": 16, "BLOCK": 256}, acc=False,
    )  # fmt: skip


def _attention_variants(m: _Maker, tiles: Any) -> Iterable[Variant]:
    make, x, acc, index = m, m.x, m.acc, INDEX
    shape = {"SCALE": HEAD**-0.5, "H": 32, "GROUP": 4, "DIM": HEAD, "WIDE": HEAD}
    shape |= {"BQ": tiles.query, "BK": tiles.key, "SPLIT": splits(getattr(torch, m.dtype))}
    inputs = dict.fromkeys("qkv", x)
    rest: dict[str, Any] = {"constants": shape, "num_warps": tiles.num_warps, "products": True}
    staged = rest | {"num_stages": tiles.num_stages}
    grads = {"do": x, "lse": acc, "delta": acc}
    yield make("attention.attention_fwd", inputs | {"o": x, "lse": acc, "work": index}, **staged)
    yield make(
        "attention.attention_delta", {"o": x, "do": x, "delta": acc, "num_rows": "i32"},
        constants={"DIM": HEAD, "WIDE": HEAD, "ROWS": 32},
    )  # fmt: skip
    yield make("attention.attention_dq", inputs | grads | {"dq": x, "work": index}, **staged)
    carried = {"dk": acc, "dv": acc, "work": index}
    back = back_constants(tiles)
    launched = {name: back.pop(name) for name in ("num_warps", "num_stages")}
    yield make(
        "attention.attention_dkv", inputs | grads | carried,
        constants=shape | back, products=True, **launched,
    )  # fmt: skip


def _token_variants(make: _Maker) -> Iterable[Variant]:
    x, acc, index, row = make.x, make.acc, INDEX, WHOLE_ROW
    yield make(
        "embedding.embedding_fwd",
        {"weight": x, "tokens": index, "position": index, "y": x, "num_rows": "i32"},
        constants=row | {"ROWS": 1}, acc=False,
    )  # fmt: skip
    yield make(
        "embedding.embedding_dweight",
        {"dy": x, "values": acc, "stacks": acc, "segment_first": index, "segment_place": index}
        | {"rows": index, "merges": "*i32", "depth": "i32"},
        constants={"LENGTH": ROW, "BLOCK": 256},
    )  # fmt: skip
    block = {"VOCABULARY": VOCABULARY, "ROWS": 2, "BLOCK": 1024}
    yield make(
        "cross_entropy.cross_entropy_fwd",
        {"logits": x, "targets": index, "loss": acc, "lse": acc, "num_rows": "i32"},
        constants=block,
    )  # fmt: skip
    yield make(
        "cross_entropy.cross_entropy_bwd",
        {"logits": x, "targets": index, "lse": acc, "seed": acc, "dlogits": x, "num_rows": "i32"},
        constants=block,
    )  # fmt: skip


def _elementwise_variants(make: _Maker) -> Iterable[Variant]:
    x, acc, index = make.x, make.acc, INDEX
    for numel in ("i32", "i64"):
        yield make(
            "swiglu.swiglu_fwd", dict.fromkeys(("gate", "up", "y"), x) | {"numel": numel},
            constants={"BLOCK": 1024},
        )  # fmt: skip
        yield make(
            "swiglu.swiglu_bwd",
            dict.fromkeys(("dy", "gate", "up", "dgate", "dup"), x) | {"numel": numel},
            constants={"BLOCK": 1024},
        )  # fmt: skip
    for sign in (1.0, -1.0):
        wide = {"HEADS": 32, "HALF": HEAD // 2, "ROWS": 16, "WIDE": HEAD // 2}
        yield make(
            "rope.rope_turn",
            {"x": x, "y": x, "cosine": acc, "sine": acc, "position": index, "num_rows": "i32"},
            constants={"SIGN": sign} | wide,
        )  # fmt: skip


def planted(*, bulk_reduce: bool) -> list[Variant]:
    """Kernels whose sums follow the order of arrival; none of them may be certified.

    bulk_reduce: whether the target has such an instruction.
    """
    sizes = {"LENGTH": ROW, "ROWS": 8, "BLOCK": ROW}
    columns = {"x": "*fp32", "out": "*fp32", "num_rows": "i32"}
    found = [
        Variant(name="planted.column_sum_by_float_atomics", dtype="float32",
                arguments=columns, constants=sizes),
        Variant(name="planted.column_sum_behind_a_lock", dtype="float32",
                arguments=columns | {"lock": "*i32"}, constants=sizes, counters=1),
    ]  # fmt: skip
    if bulk_reduce:
        found.append(
            Variant(name="planted.tile_sum_by_bulk_reduce", dtype="float32",
                    arguments={"x": "*fp32", "out": "*fp32"}, constants={"BLOCK": 256})
        )  # fmt: skip
    return found
