"""The invariance matrix and a benchmark on a machine with a GPU; one command, results as data.

    python scripts/gpu.py                 writes docs/data/gpu_NAME_ops_DTYPE.json and _bench.json
    python scripts/gpu.py --try-on-cpu    every step at toy sizes, interpreted: does it run?

Times are medians of device events over random data larger than the cache, in one process with
torch and, where it is installed, Liger. Fractions are of ceilings measured here: a copy of memory,
torch's own product in bfloat16.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parent.parent / "docs" / "data"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One timing. amount: bytes moved or operations done; ceiling: per second, as measured."""

    operator: str
    variant: str
    dtype: str
    seconds: float
    amount: float
    unit: str
    fraction_of_ceiling: float


class Bench:
    """Times calls on one device, and knows its ceilings."""

    def __init__(self, device: str, *, tiny: bool) -> None:
        import torch

        self.torch, self.device, self.tiny = torch, device, tiny
        self.found: list[Measured] = []
        numel = 2**10 if tiny else 2**28
        a = torch.randn(numel, device=device, dtype=torch.float32)
        b = torch.empty_like(a)
        self.bandwidth = 8 * numel / self.seconds(lambda: b.copy_(a))
        side = 32 if tiny else 8192
        x = torch.randn(side, side, device=device, dtype=torch.bfloat16)
        self.flops = 2 * side**3 / self.seconds(lambda: x @ x)

    def seconds(self, call: Callable[[], Any], repeats: int = 20) -> float:
        """Median of several calls, after warming up."""
        torch = self.torch
        for _ in range(1 if self.tiny else 5):
            call()
        times = []
        for _ in range(2 if self.tiny else repeats):
            if self.device == "cpu":
                started = time.perf_counter()
                call()
                times.append(time.perf_counter() - started)
                continue
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        return statistics.median(times)

    def add(
        self, operator: str, variant: str, dtype: Any, call: Callable[[], Any], *,
        moved: float = 0.0, computed: float = 0.0,
    ) -> None:  # fmt: skip
        """Time a call that moves bytes or does operations."""
        seconds = self.seconds(call)
        amount, ceiling = (moved, self.bandwidth) if moved else (computed, self.flops)
        self.found.append(
            Measured(
                operator=operator, variant=variant, dtype=str(dtype).removeprefix("torch."),
                seconds=seconds, amount=amount, unit="B/s" if moved else "FLOP/s",
                fraction_of_ceiling=amount / seconds / ceiling,
            )
        )  # fmt: skip
        last = self.found[-1]
        rate = f"{amount / seconds:10.3g} {last.unit} {last.fraction_of_ceiling:6.1%}"
        print(
            f"{operator:22} {variant:12} {last.dtype:9} {seconds * 1e3:9.3f} ms {rate}", flush=True
        )

    def backward(self, function: Callable[..., Any], inputs: list[Any], seed: Any) -> Callable:
        """A call that only differentiates."""
        leaves = [t.clone().requires_grad_() for t in inputs]
        out = function(*leaves)
        return lambda: self.torch.autograd.grad(out, leaves, seed, retain_graph=True)


def norms(bench: Bench) -> None:
    """Bytes of a norm's backward: x and dy read, dx written."""
    torch = bench.torch
    from sumgrad.kernels.layer_norm import layer_norm
    from sumgrad.kernels.rms_norm import rms_norm
    from torch.nn import functional

    rows, length = (40, 32) if bench.tiny else (8192, 4096)
    for dtype in (torch.bfloat16, torch.float32):
        x, dy = (torch.randn(rows, length, device=bench.device, dtype=dtype) for _ in range(2))
        w, b = (torch.randn(length, device=bench.device, dtype=dtype) for _ in range(2))
        moved = 3.0 * x.numel() * x.element_size()
        rms = {
            "tree": rms_norm,
            "last_block": lambda x, w: rms_norm(x, w, mode="last_block"),
            "torch": lambda x, w, n=length: functional.rms_norm(x, (n,), w, 1e-6),
        }
        layer = {
            "tree": layer_norm,
            "torch": lambda x, w, b, n=length: functional.layer_norm(x, (n,), w, b),
        }
        if importlib.util.find_spec("liger_kernel") and bench.device != "cpu":
            from liger_kernel.ops.layer_norm import LigerLayerNormFunction
            from liger_kernel.ops.rms_norm import LigerRMSNormFunction

            rms["Liger"] = lambda x, w: LigerRMSNormFunction.apply(x, w, 1e-6)
            layer["Liger"] = lambda x, w, b: LigerLayerNormFunction.apply(x, w, b, 1e-5)
        for name, function in rms.items():
            call = bench.backward(function, [x, w], dy)
            bench.add("rms_norm backward", name, dtype, call, moved=moved)
        for name, function in layer.items():
            call = bench.backward(function, [x, w, b], dy)
            bench.add("layer_norm backward", name, dtype, call, moved=moved)


def products(bench: Bench) -> None:
    """Forward, and the weight's gradient by the tree, by one product (plain), by torch."""
    torch = bench.torch
    from sumgrad.kernels.layout import Layout
    from sumgrad.kernels.linear import Tiles, default_tiles, linear, weight_nodes

    side = 64 if bench.tiny else 4096
    for dtype in (torch.bfloat16, torch.float32):
        x, w, dy = (torch.randn(side, side, device=bench.device, dtype=dtype) for _ in range(3))
        work = 2.0 * side**3
        tiles: Tiles = default_tiles(dtype)
        layout = Layout.packed([side // 4] * 4)
        bench.add("matmul", "ours", dtype, lambda x=x, w=w: linear(x, w), computed=work)
        bench.add("matmul", "torch", dtype, lambda x=x, w=w: x @ w.T, computed=work)
        bench.add(
            "matmul dW", "tree", dtype,
            lambda x=x, dy=dy, t=tiles, where=layout: weight_nodes(dy, x, where, t),
            computed=work,
        )  # fmt: skip
        bench.add("matmul dW", "torch", dtype, lambda x=x, dy=dy: dy.T @ x, computed=work)


def attention(bench: Bench) -> None:
    """Causal, head 128: operations of the lower triangle only; backward is 2.5 forwards."""
    torch = bench.torch
    from sumgrad.kernels.attention import attention as ours
    from torch.nn import functional

    length, heads, head = (48, 2, 16) if bench.tiny else (8192, 16, 128)
    dtype = torch.bfloat16
    q, k, v, do = (
        torch.randn(length, heads, head, device=bench.device, dtype=dtype) for _ in range(4)
    )
    work = 2.0 * length * length * heads * head

    def theirs(q: Any, k: Any, v: Any) -> Any:
        parts = (t.transpose(0, 1)[None] for t in (q, k, v))
        return functional.scaled_dot_product_attention(*parts, is_causal=True)[0].transpose(0, 1)

    for name, function in (("ours", ours), ("torch", theirs)):
        bench.add("attention forward", name, dtype, lambda f=function: f(q, k, v), computed=work)
        call = bench.backward(function, [q, k, v], do)
        bench.add("attention backward", name, dtype, call, computed=2.5 * work)


def real_sizes(bench: Bench) -> dict[str, bool]:
    """Raw bits of weight gradients at real sizes: packed, reversed, in micro-batches."""
    torch = bench.torch
    from sumgrad.kernels.layout import Layout
    from sumgrad.kernels.linear import linear
    from sumgrad.kernels.rms_norm import rms_norm
    from sumgrad.kernels.tree import Accumulator

    lengths = [37, 16, 0, 50] if bench.tiny else [1500, 37, 4096, 0, 2211, 1]
    width = 24 if bench.tiny else 1024
    out = {}
    for dtype in (torch.float32, torch.bfloat16):
        x, dy = (
            torch.randn(sum(lengths), width, device=bench.device, dtype=dtype) for _ in range(2)
        )
        starts = [sum(lengths[:s]) for s in range(len(lengths))]
        weights = {
            "rms_norm": torch.randn(width, device=bench.device, dtype=dtype),
            "linear": torch.randn(width, width, device=bench.device, dtype=dtype),
        }
        functions = {"rms_norm": rms_norm, "linear": linear}
        for name, function in functions.items():
            roots = []
            everyone = list(range(len(lengths)))
            for calls in ([everyone], [everyone[::-1]], [everyone[3:], everyone[:3]]):
                tree = Accumulator(len(lengths))
                for samples in calls:
                    sizes = [lengths[s] for s in samples]
                    layout = Layout.packed(
                        sizes, samples=samples, num_samples=len(lengths), gap=len(roots)
                    )
                    rows = layout.positions >= 0
                    source = torch.cat([torch.arange(starts[s], starts[s] + lengths[s])
                                        for s in samples])  # fmt: skip
                    placed = [t.new_zeros(layout.num_rows, width) for t in (x, dy)]
                    for to, value in zip(placed, (x, dy), strict=True):
                        to[rows.to(bench.device)] = value[source.to(bench.device)]
                    weight = weights[name].clone().requires_grad_()
                    function(placed[0], weight, layout=layout, sinks={"weight": tree}).backward(
                        placed[1]
                    )
                roots.append(tree.finish())
            same = all(torch.equal(r.view(torch.int32), roots[0].view(torch.int32)) for r in roots)
            out[f"{name} {dtype}".replace("torch.", "")] = same
    print(out)
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--try-on-cpu", action="store_true", help="toy sizes, interpreted")
    parser.add_argument("--out", type=Path, default=DATA, help="folder of the results")
    args = parser.parse_args()
    device = "cpu" if args.try_on_cpu else "cuda"
    if args.try_on_cpu:
        os.environ["TRITON_INTERPRET"] = "1"
    import torch
    import triton

    if not args.try_on_cpu and not torch.cuda.is_available():
        print("scripts/gpu.py: no GPU here; --try-on-cpu runs every step at toy sizes")
        return 2
    name = "cpu" if args.try_on_cpu else torch.cuda.get_device_name().lower().replace(" ", "_")
    args.out.mkdir(parents=True, exist_ok=True)
    ok = True
    for dtype in ("float32",) if args.try_on_cpu else ("float32", "bfloat16", "float16"):
        operators = ["--op", "swiglu"] if args.try_on_cpu else []
        target = args.out / f"gpu_{name}_ops_{dtype}.json"
        command = [sys.executable, "-m", "sumgrad", "ops", "--device", device, "--dtype", dtype]
        ok &= (
            subprocess.run([*command, *operators, "--json", str(target)], check=False).returncode
            == 0
        )
    bench = Bench(device, tiny=args.try_on_cpu)
    bits = real_sizes(bench)
    for part in (norms, products, attention):
        part(bench)
    data = {
        "device": name, "torch": torch.__version__, "triton": triton.__version__,
        "bandwidth_ceiling": bench.bandwidth, "flops_ceiling_bf16": bench.flops,
        "same_bits_at_real_sizes": bits, "measured": [asdict(m) for m in bench.found],
    }  # fmt: skip
    (args.out / f"gpu_{name}_bench.json").write_text(json.dumps(data, indent=1) + "\n")
    return 0 if ok and all(bits.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
