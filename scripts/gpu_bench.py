"""The benchmark of scripts/gpu.py, and raw bits at real sizes.

Times are the device's own, of all kernels that a call launches, by torch's profiler, over random
data larger than the cache, in one process with torch and, where it is installed, Liger; beside them
the median time between device events around one call, which also waits for Python. Fractions are of
ceilings measured here: a copy of memory, and torch's own product in bfloat16.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

CALLS = 10  # under the profiler


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One timing. amount: bytes moved or operations done; ceiling: per second, as measured.

    seconds: on the device; called: from one device event to another around the call.
    """

    operator: str
    variant: str
    dtype: str
    seconds: float
    called: float
    amount: float
    unit: str
    fraction_of_ceiling: float


class Bench:
    """Times calls on one device, and knows its ceilings. warm: only let everything compile."""

    def __init__(self, device: str, *, tiny: bool, warm: bool = False) -> None:
        import torch

        self.torch, self.device, self.tiny, self.warm = torch, device, tiny, warm
        self.found: list[Measured] = []
        numel = 2**10 if tiny else 2**28
        a = torch.randn(numel, device=device, dtype=torch.float32)
        b = torch.empty_like(a)
        self.bandwidth = 8 * numel / self.seconds(lambda: b.copy_(a))[0]
        side = 32 if tiny else 8192
        x = torch.randn(side, side, device=device, dtype=torch.bfloat16)
        self.flops = 2 * side**3 / self.seconds(lambda: x @ x)[0]

    def seconds(self, call: Callable[[], Any]) -> tuple[float, float]:
        """On the device, and as called."""
        for _ in range(1 if self.tiny or self.warm else 5):
            call()
        if self.warm:
            return 1.0, 1.0
        if self.device == "cpu":
            started = time.perf_counter()
            call()
            return (time.perf_counter() - started,) * 2
        return self._on_device(call), self._called(call)

    def _on_device(self, call: Callable[[], Any]) -> float:
        from torch.profiler import ProfilerActivity, profile

        torch = self.torch
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            for _ in range(CALLS):
                call()
            torch.cuda.synchronize()
        kind = torch.autograd.DeviceType.CUDA
        busy = sum(e.device_time for e in seen.events() if e.device_type == kind)
        return busy / CALLS / 1e6

    def _called(self, call: Callable[[], Any]) -> float:
        torch, times = self.torch, []
        for _ in range(CALLS):
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
        seconds, called = self.seconds(call)
        amount, ceiling = (moved, self.bandwidth) if moved else (computed, self.flops)
        self.found.append(
            Measured(
                operator=operator, variant=variant, dtype=str(dtype).removeprefix("torch."),
                seconds=seconds, called=called, amount=amount, unit="B/s" if moved else "FLOP/s",
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
    """Raw bits at real sizes, packed, reversed and in micro-batches: of the roots of weight
    gradients, and of attention's results and gradients by (sample, position)."""
    torch = bench.torch
    lengths = [37, 16, 0, 50] if bench.tiny else [1500, 37, 4096, 0, 2211, 1]
    width = 24 if bench.tiny else 1024
    out = {}
    for dtype in (torch.float32, torch.bfloat16):
        for name in ("rms_norm", "linear", "attention"):
            found = [_in_calls(bench, name, dtype, lengths, width, calls)
                     for calls in _arrangements(len(lengths))]  # fmt: skip
            same = all(
                torch.equal(a.view(torch.uint8), b.view(torch.uint8))
                for other in found[1:]
                for a, b in zip(found[0], other, strict=True)
            )
            out[f"{name} {dtype}".replace("torch.", "")] = same
    print(out)
    return out


def _arrangements(number: int) -> list[list[list[int]]]:
    """Samples by call: all, all from the end, the later ones before the others."""
    everyone = list(range(number))
    return [[everyone], [everyone[::-1]], [everyone[3:], everyone[:3]]]


def _in_calls(
    bench: Bench, name: str, dtype: Any, lengths: list[int], width: int, calls: list[list[int]]
) -> list[Any]:
    """What must not depend on the calls: a root, or rows in logical order."""
    torch = bench.torch
    from sumgrad.kernels.attention import attention
    from sumgrad.kernels.layout import Layout
    from sumgrad.kernels.linear import linear
    from sumgrad.kernels.rms_norm import rms_norm
    from sumgrad.kernels.tree import Accumulator

    device = bench.device
    torch.manual_seed(0)
    rows = torch.randn(4, sum(lengths), width, device=device, dtype=dtype)
    weight = torch.randn(*((width,) if name == "rms_norm" else (width, width)),
                         device=device, dtype=dtype)  # fmt: skip
    starts = [sum(lengths[:s]) for s in range(len(lengths))]
    tree, logical = Accumulator(len(lengths)), torch.zeros_like(rows)
    for samples in calls:
        sizes = [lengths[s] for s in samples]
        layout = Layout.packed(sizes, samples=samples, num_samples=len(lengths), gap=len(calls))
        there = (layout.positions >= 0).to(device)
        source = torch.cat(
            [torch.arange(starts[s], starts[s] + lengths[s]) for s in samples]
        ).to(device)  # fmt: skip
        placed = rows.new_zeros(4, layout.num_rows, width)
        placed[:, there] = rows[:, source]
        if name == "attention":
            heads = [t.unflatten(1, (-1, 8)).contiguous() for t in placed.unbind()]
            leaves = [t.requires_grad_() for t in heads[:3]]
            y = attention(*leaves, layout=layout)
            grads = torch.autograd.grad(y, leaves, heads[3])
            found = torch.stack([t.flatten(1) for t in (y.detach(), *grads)])
            logical[:, source] = found[:, there]
            continue
        held = weight.clone().requires_grad_()
        function = rms_norm if name == "rms_norm" else linear
        function(placed[0], held, layout=layout, sinks={"weight": tree}).backward(placed[1])
    return [logical] if name == "attention" else [tree.finish()]


def bench_all(device: str, *, tiny: bool, warm: bool = False) -> dict[str, Any]:
    """Bits at real sizes and every timing."""
    bench = Bench(device, tiny=tiny, warm=warm)
    bits = {} if warm else real_sizes(bench)
    for part in (norms, products, attention):
        part(bench)
    return {
        "bandwidth_ceiling": bench.bandwidth, "flops_ceiling_bf16": bench.flops,
        "same_bits_at_real_sizes": bits, "measured": [asdict(m) for m in bench.found],
    }  # fmt: skip
