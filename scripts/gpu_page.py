"""docs/gpu.md from the data that scripts/gpu.py has written; nothing on the page is typed in."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parent.parent / "docs" / "gpu.md"
INTRODUCTION = """# On a GPU

Written by `python scripts/gpu.py --page` from `docs/data/gpu_*.json`, which `python scripts/gpu.py`
measures on a machine with a GPU. Times are the device's own, of all kernels that a call launches;
*called* is the time around one call, which also waits for Python. The ceiling of bytes is a copy of
memory, that of operations torch's own product in bfloat16, both measured in the same process.
"""


def write_page(data: Path, page: Path = PAGE) -> None:
    """A section for each GPU."""
    parts = [INTRODUCTION]
    for path in sorted(data.glob("gpu_*_bench.json")):
        bench = json.loads(path.read_text())
        parts += _section(bench, data)
    page.write_text("\n".join(parts).rstrip() + "\n")


def _section(bench: dict[str, Any], data: Path) -> Iterator[str]:
    name = bench["device"]
    yield f"## {name.replace('_', ' ').upper()}, torch {bench['torch']}, Triton {bench['triton']}\n"
    yield "### The same bits\n"
    head = ("dtype", "`sumgrad ops --device cuda`", "ours: same cells", "planted: caught",
            "torch's own that are not invariant")  # fmt: skip
    yield from _table(head, _matrices(name, data))
    bits = bench["same_bits_at_real_sizes"]
    same = ", ".join(key for key, value in bits.items() if value)
    other = ", ".join(key for key, value in bits.items() if not value) or "none"
    yield "At real sizes, packed, reversed and in micro-batches:\n"
    yield f"- the same bits: {same}\n- other bits: {other}\n"
    checks = data / f"gpu_{name}_checks.json"
    if checks.exists():
        yield "### Checks on CUDA ranks\n"
        yield "Several ranks share the GPU over Gloo; one rank with one GPU is over NCCL.\n"
        found = json.loads(checks.read_text())["checks"]
        yield from _table(
            ("case", "verdict", "right", "worst error / threshold", "s"),
            [(c["case"], c["verdict"], c["right"], _worst(c), c["seconds"]) for c in found],
        )
    yield "### Speed\n"
    yield (
        f"Ceilings: {bench['bandwidth_ceiling'] / 1e9:.0f} GB/s, "
        f"{bench['flops_ceiling_bf16'] / 1e12:.0f} TFLOP/s.\n"
    )
    yield from _table(
        ("operator", "dtype", "by", "on the device, ms", "rate", "of the ceiling", "called, ms"),
        [_row(m) for m in bench["measured"]],
    )


def _matrices(name: str, data: Path) -> Iterator[tuple[str, ...]]:
    for path in sorted(data.glob(f"gpu_{name}_ops_*.json")):
        found = json.loads(path.read_text())
        of = {kind: [op for op in found["operators"] if op["expect"] == kind]
              for kind in ("invariant", "planted", "control")}  # fmt: skip
        cells = [cell["status"] == "same" for op in of["invariant"] for cell in op["cells"]]
        caught = [op for op in of["planted"] if not any(op["name"] in w for w in found["wrong"])]
        red = [op["name"].removeprefix("torch ") for op in of["control"]
               if any(cell["status"] != "same" for cell in op["cells"])]  # fmt: skip
        yield (
            path.stem.rpartition("_")[2], found["status"], f"{sum(cells)} of {len(cells)}",
            f"{len(caught)} of {len(of['planted'])}", ", ".join(red) or "none",
        )  # fmt: skip


def _worst(case: dict[str, Any]) -> str:
    known = {tier: worst for tier, worst in case.get("worst", {}).items() if worst is not None}
    return ", ".join(f"{tier} {worst:.3g}" for tier, worst in known.items()) or "-"


def _row(m: dict[str, Any]) -> tuple[str, ...]:
    rate = m["amount"] / m["seconds"]
    shown = f"{rate / 1e9:.0f} GB/s" if m["unit"] == "B/s" else f"{rate / 1e12:.1f} TFLOP/s"
    return (
        m["operator"], m["dtype"], m["variant"], f"{m['seconds'] * 1e3:.3f}", shown,
        f"{m['fraction_of_ceiling']:.0%}", f"{m['called'] * 1e3:.3f}",
    )  # fmt: skip


def _table(head: tuple[str, ...], rows: Iterable[tuple[Any, ...]]) -> Iterator[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    yield "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows)]) + "\n"
