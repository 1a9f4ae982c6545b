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
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sumgrad.kernels.variants import DTYPES, Variant, planted, variants

TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}
BULK_REDUCE = ("sm_90", "sm_100")
SHARED_LIMIT = {"sm_80": 166912, "sm_90": 232448, "sm_100": 232448, "gfx942": 65536}
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


def _kernels(target: str, dtypes: Sequence[str]) -> list[Variant]:
    """Ours, and those that must be caught."""
    ours = variants(TARGETS[target][0], dtypes)
    return [*ours, *planted(bulk_reduce=target in BULK_REDUCE)]


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
        for variant in _kernels(target, args.dtype or DTYPES)
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
