"""A certificate for every kernel, made without a GPU: compile it and read what came out.

    python -m sumgrad.kernels.certificate --json certificates.json

For each kernel, dtype and target it states: no float atomic in Triton's IR nor in the machine's
assembly (integer counters only where named here), which matrix instruction does the products,
which approximate instructions are used, registers, spills and shared memory. Compiling needs a
process in which Triton was imported without its interpreter: run it as a command.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}
SHARED_LIMIT = {"sm_80": 166912, "sm_90": 232448, "sm_100": 232448, "gfx942": 65536}
DTYPES = ("float32", "bfloat16", "float16", "float64")
SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}
ROW, VOCABULARY, HEAD = 4096, 32000, 128
PTX_ATOMIC = re.compile(r"(?:^|[\s;{])((?:atom|red|multimem|cp\.reduce)\.[\w.:]+)")
AMD_ATOMIC = re.compile(
    r"^\s*((?:global|buffer|flat|ds)_(?:atomic_\w+|(?:pk_)?add_\w*f\w+))", re.MULTILINE
)
COUNTER = "atomic_rmw add"
FLOAT = re.compile(r"(?:\.|_)(?:b?f(?:16|32|64)(?:x2)?|pk_\w+)\b")
IR_ATOMIC = re.compile(r"(atomic_rmw\s+\w+|atomic_cas|descriptor_reduce|elementwise_inline_asm)")
MATRIX = re.compile(r"\b(mma\.sync[\w.]+|wgmma\.mma_async[\w.]+|tcgen05\.mma[\w.:]*|v_mfma_\w+)")
APPROXIMATE = re.compile(r"\b(\w+\.approx(?:\.ftz)?\.\w+|div\.full\.f32)")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """What one compiled kernel contains. problems: empty where it may be trusted."""

    kernel: str
    dtype: str
    target: str
    float_atomics: list[str] = field(default_factory=list)
    integer_atomics: list[str] = field(default_factory=list)
    matrix: list[str] = field(default_factory=list)
    approximate: list[str] = field(default_factory=list)
    registers: int | None = None
    spilled_bytes: int | None = None
    shared_bytes: int = 0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)


def variants(target: str, dtypes: Sequence[str] = DTYPES) -> list[Variant]:
    """Every kernel of this package as it is launched on a target, in sizes of a real model."""
    kind = TARGETS[target][0]
    return [variant for dtype in dtypes for variant in _variants(dtype, kind)]


def _variants(dtype: str, kind: str) -> Iterable[Variant]:
    import torch
    from sumgrad.kernels import attention, linear, runtime

    given = getattr(torch, dtype)
    accumulator = "float64" if dtype == "float64" else "float32"
    x, acc = "*" + SHORT[dtype], "*" + SHORT[accumulator]
    constant = {"ACC": runtime.TL_DTYPE[getattr(torch, accumulator)]}
    index = "*i64"

    def make(name: str, arguments: dict[str, str], **rest: Any) -> Variant:
        constants = {**rest.pop("constants"), **(constant if rest.pop("acc", True) else {})}
        return Variant(name=name, dtype=dtype, arguments=arguments, constants=constants, **rest)

    row = {"LENGTH": ROW, "BLOCK": ROW}
    warps = {"num_warps": runtime.warps_for(ROW)}
    leaf = {"leaf_row": index, "leaf_count": index}
    rows = dict.fromkeys(("dy", "x", "weight"), x) | {"rstd": acc}
    yield make(
        "rms_norm.rms_norm_fwd",
        {"x": x, "weight": x, "y": x, "rstd": acc, "num_rows": "i32"},
        constants=row | {"EPS": 1e-6, "ROWS": 1}, **warps,
    )  # fmt: skip
    yield make(
        "rms_norm.rms_norm_bwd_leaf", rows | {"dx": x, "leaves": acc} | leaf,
        constants=row | {"ROWS": 1}, **warps,
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
        constants=row | {"ROWS": 1}, **warps,
    )  # fmt: skip
    tiles = linear.default_tiles(given, kind=kind)
    launched = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages, "products": True}
    tile = {"BM": tiles.rows, "BN": tiles.columns, "BK": tiles.depth, "N": ROW, "K": ROW}
    for transposed, bias in ((True, True), (True, False), (False, False)):
        yield make(
            "linear.matmul",
            {"a": x, "b": x, "bias": x, "out": x, "num_rows": "i32"},
            constants=tile | {"TRANSPOSED": transposed, "BIAS": bias}, **launched,
        )  # fmt: skip
    yield make(
        "linear.linear_dweight",
        {"dy": x, "x": x, "values": acc, "stacks": acc} | leaf
        | {"node_first": index, "merges": "*i32", "depth": "i32"},
        constants=tile, **launched,
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
    yield from _attention_variants(make, attention.default_tiles(given, kind), x, acc, index)
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


def _attention_variants(make: Any, tiles: Any, x: str, acc: str, index: str) -> Iterable[Variant]:
    shape = {"SCALE": HEAD**-0.5, "H": 32, "GROUP": 4, "DIM": HEAD, "WIDE": HEAD}
    shape |= {"BQ": tiles.query, "BK": tiles.key}
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
    yield make("attention.attention_dkv", inputs | grads | carried, num_stages=1, **rest)


def planted(target: str) -> list[Variant]:
    """Kernels whose sums follow the order of arrival; none of them may be certified."""
    sizes = {"LENGTH": ROW, "ROWS": 8, "BLOCK": ROW}
    columns = {"x": "*fp32", "out": "*fp32", "num_rows": "i32"}
    found = [
        Variant(name="planted.column_sum_by_float_atomics", dtype="float32",
                arguments=columns, constants=sizes),
        Variant(name="planted.column_sum_behind_a_lock", dtype="float32",
                arguments=columns | {"lock": "*i32"}, constants=sizes, counters=1),
    ]  # fmt: skip
    if target in ("sm_90", "sm_100"):  # where there is such an instruction
        found.append(
            Variant(name="planted.tile_sum_by_bulk_reduce", dtype="float32",
                    arguments={"x": "*fp32", "out": "*fp32"}, constants={"BLOCK": 256})
        )  # fmt: skip
    return found


def certify(variant: Variant, target: str) -> Certificate:
    """Compile one kernel for one target and read its code. Raises RuntimeError if interpreted."""
    import importlib

    import triton
    from sumgrad.kernels.runtime import INTERPRETED
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if INTERPRETED:
        raise RuntimeError("certificates need a process without TRITON_INTERPRET=1")
    module, name = variant.name.split(".")
    kernel = getattr(importlib.import_module(f"sumgrad.kernels.{module}"), name)
    order = kernel.arg_names
    signature = {a: variant.arguments.get(a, "constexpr") for a in order}
    wrong = set(variant.arguments) - set(order) | {
        a for a in order if a not in variant.arguments and a not in variant.constants
    }
    assert not wrong, (variant.name, wrong)
    attributes = {
        (i,): [["tt.divisibility", 16]] for i, a in enumerate(order) if signature[a][0] == "*"
    }
    started = time.monotonic()
    compiled = triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=variant.constants, attrs=attributes),
        target=GPUTarget(*TARGETS[target]),
        options={
            "num_warps": variant.num_warps,
            "num_stages": variant.num_stages,
            "enable_fp_fusion": False,
        },
    )
    return _read(variant, target, compiled, time.monotonic() - started)


def _read(variant: Variant, target: str, compiled: Any, seconds: float) -> Certificate:
    """What the intermediate and the final code say."""
    amd = TARGETS[target][0] == "hip"
    code = compiled.asm["amdgcn" if amd else "ptx"]
    found = (AMD_ATOMIC if amd else PTX_ATOMIC).findall(code)
    in_ir = [" ".join(op.split()) for op in IR_ATOMIC.findall(compiled.asm["ttir"])]
    floats = [op for op in found if FLOAT.search(op)] + [k for k in in_ir if " f" in k]
    integers = [op for op in found if not FLOAT.search(op)]
    matrix = sorted(set(MATRIX.findall(code)))
    if variant.products and not matrix:
        matrix = ["fma"]
    registers, spilled = _amd_resources(code) if amd else _cuda_resources(compiled)
    problems = [f"float atomic: {op}" for op in sorted(set(floats))]
    if in_ir != [COUNTER] * variant.counters:
        problems.append(f"in the IR: {in_ir}, {variant.counters} counters are named")
    if compiled.metadata.shared > SHARED_LIMIT[target]:
        problems.append(f"{compiled.metadata.shared} bytes of shared memory do not fit")
    if not variant.counters and integers:
        problems.append(f"atomics that nobody named: {sorted(set(integers))}")
    return Certificate(
        kernel=variant.name,
        dtype=variant.dtype,
        target=target,
        float_atomics=sorted(set(floats)),
        integer_atomics=sorted(set(integers)),
        matrix=matrix,
        approximate=sorted(set(APPROXIMATE.findall(code))),
        registers=registers,
        spilled_bytes=spilled,
        shared_bytes=int(compiled.metadata.shared),
        seconds=round(seconds, 2),
        problems=problems,
    )


def _cuda_resources(compiled: Any) -> tuple[int | None, int | None]:
    """Registers and spilled bytes a thread, by the cuobjdump that comes with Triton."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        return None, None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(tool), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+).*?LOCAL:(\d+)", text)
    return (int(found[1]), max(int(found[2]), int(found[3]))) if found else (None, None)


def _amd_resources(code: str) -> tuple[int | None, int | None]:
    registers = re.search(r"\.vgpr_count:\s+(\d+)", code)
    spilled = re.search(r"\.private_segment_fixed_size:\s+(\d+)", code)
    return registers and int(registers[1]), spilled and int(spilled[1])


def _certify_one(task: tuple[Variant, str]) -> Certificate:
    variant, target = task
    try:
        return certify(variant, target)
    except Exception as error:  # a kernel that does not compile is a finding, not an end
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        return Certificate(
            kernel=variant.name, dtype=variant.dtype, target=target,
            problems=[f"does not compile: {type(error).__name__}: {line}"],
        )  # fmt: skip


def certify_all(
    tasks: Sequence[tuple[Variant, str]], *, num_workers: int | None = None
) -> list[Certificate]:
    """All of them, in as many processes as there are cores."""
    workers = num_workers or len(os.sched_getaffinity(0))
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        return pool.map(_certify_one, tasks, chunksize=1)


def main(argv: Sequence[str] | None = None) -> int:
    """Certify; 0 if every kernel may be trusted and the planted one was caught."""
    parser = argparse.ArgumentParser(prog="python -m sumgrad.kernels.certificate")
    parser.add_argument("--json", type=Path, help="write the certificates here")
    parser.add_argument("--dtype", action="append", choices=DTYPES, help="default: all")
    parser.add_argument("--target", action="append", choices=list(TARGETS), help="default: all")
    parser.add_argument("--kernel", help="only those whose name contains this")
    args = parser.parse_args(argv)
    chosen = [
        (variant, target)
        for target in args.target or TARGETS
        for variant in (*variants(target, args.dtype or DTYPES), *planted(target))
        if not args.kernel or args.kernel in variant.name
    ]
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache  # a certificate is of this code, not of an old one
        certificates = certify_all(chosen)
    clean = [c for c in certificates if not c.kernel.startswith("planted.")]
    missed = [
        c
        for c in certificates
        if c.kernel.startswith("planted.")
        and (not c.problems or c.problems[0].startswith("does not compile"))
    ]
    bad = [c for c in clean if c.problems]
    if args.json:
        import triton

        data = {
            "triton": triton.__version__,
            "seconds": round(time.monotonic() - started, 1),
            "certificates": [asdict(c) for c in certificates],
        }
        args.json.write_text(json.dumps(data, indent=1) + "\n")
    for c in bad:
        sys.stdout.write(f"{c.kernel} {c.dtype} {c.target}: {'; '.join(c.problems)}\n")
    for c in missed:
        sys.stdout.write(f"{c.kernel} {c.target}: the plant was not found: {c.problems}\n")
    sys.stdout.write(
        f"{len(clean) - len(bad)} of {len(clean)} kernels certified, "
        f"{len(certificates) - len(clean) - len(missed)} plants found, "
        f"{time.monotonic() - started:.0f} s\n"
    )
    return 1 if bad or missed else 0


if __name__ == "__main__":
    sys.exit(main())
