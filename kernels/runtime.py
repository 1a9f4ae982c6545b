"""What every operator does before and around a launch: find Triton, check arguments, pick dtypes.

Compiled on a GPU, interpreted on a CPU. Triton chooses its interpreter while it is imported, so
TRITON_INTERPRET=1 must be in the environment before that; the `sumgrad` commands, the pytest plugin
and their ranks see to it. The interpreter's 16-bit arithmetic cannot be trusted, so there the
kernels run in float32 on the exactly widened inputs and the results are rounded by torch. Its
products of tiles are ours (interpreted.py), since numpy's round by the place on some CPUs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from sumgrad.kernels.interpreted import use_even_products
from torch import Tensor

try:
    import triton  # noqa: F401 - the operators take it from here, with this error
    import triton.language as tl
except ImportError as error:  # macOS, or a machine without it
    raise ImportError(
        "sumgrad.kernels: Triton is not installed here (it exists for Linux); the harness, "
        "layouts, trees and oracles work without it, these kernels do not"
    ) from error

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
TL_DTYPE = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}
MAX_ROW = 1 << 16
ALIGNMENT = 16
INTERPRETED = type(tl.sum).__name__ == "InterpretedFunction"
KIND = "interpreted" if INTERPRETED else "hip" if torch.version.hip else "cuda"
LATE = """Triton was imported before TRITON_INTERPRET=1 was set, so its kernels cannot run on CPU \
tensors. Add, before the first import of torch._dynamo, of triton or of anything that makes an \
optimizer:

    import os; os.environ["TRITON_INTERPRET"] = "1"
"""


class KernelError(ValueError):
    """An argument that a kernel cannot take; the message names it."""


class InterpreterError(RuntimeError):
    """Triton's interpreter was chosen too late, or for tensors that are on a GPU."""


def check_device(*tensors: Tensor) -> None:
    """All tensors on one device that this process's Triton can reach."""
    devices = {t.device for t in tensors}
    if len(devices) > 1:
        raise KernelError(f"tensors on different devices: {sorted(map(str, devices))}")
    for device in devices:
        if device.type == "cpu" and not INTERPRETED:
            raise InterpreterError(LATE)
        if device.type not in ("cpu", "cuda"):
            raise KernelError(f"tensors on {device}: expected a CPU or a GPU")


def check_floats(**tensors: Tensor) -> torch.dtype:
    """All of one floating dtype, which is returned; strided, on one device."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise KernelError(f"{name}: got {type(tensor).__name__}, expected a tensor")
        if tensor.dtype not in FLOATS:
            raise KernelError(f"{name}: got {tensor.dtype}, expected a float of 16, 32 or 64 bits")
        if tensor.layout != torch.strided:
            raise KernelError(f"{name}: got {tensor.layout}, expected a dense tensor")
    dtypes = {tensor.dtype for tensor in tensors.values()}
    if len(dtypes) > 1:
        got = ", ".join(f"{name} {tensor.dtype}" for name, tensor in tensors.items())
        raise KernelError(f"got {got}: expected one dtype")
    check_device(*tensors.values())
    return dtypes.pop()


def check_shape(name: str, tensor: Tensor, expected: Sequence[int | str]) -> None:
    """expected: a number where the size is known, a letter where any is welcome."""
    shape = tuple(tensor.shape)
    fits = len(shape) == len(expected) and all(
        isinstance(want, str) or have == want for have, want in zip(shape, expected, strict=True)
    )
    if not fits:
        raise KernelError(f"{name}: got shape {shape}, expected ({', '.join(map(str, expected))})")


def check_eps(eps: float) -> None:
    """What keeps a division from zero must not make it."""
    if not 0 <= eps < float("inf"):
        raise KernelError(f"eps: got {eps}, expected a number >= 0")


def check_row(name: str, length: int) -> None:
    """Row lengths that fit into one program."""
    if not 1 <= length <= MAX_ROW:
        raise KernelError(f"{name}: got rows of {length} elements, expected 1 to {MAX_ROW}")


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward that refuses to be differentiated again, where it would silently drop terms."""

    @functools.wraps(backward)
    def checked(ctx: Any, *grads: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise KernelError(
                "create_graph=True: these kernels have no second derivatives, and would drop terms"
            )
        return backward(ctx, *grads)

    return checked


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, float32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def compute(tensor: Tensor) -> Tensor:
    """What a kernel is given: contiguous and aligned, so that there is one binary of the kernel.

    In the interpreter 16-bit tensors are widened to float32.
    """
    if INTERPRETED and tensor.dtype in (torch.bfloat16, torch.float16):
        tensor = tensor.float()
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a kernel stores results that belong in `dtype`."""
    return accumulator_dtype(dtype) if INTERPRETED else dtype


def block_of(length: int, *, least: int = 1) -> int:
    """The power of two that covers a row."""
    return max(least, 1 << max(0, length - 1).bit_length())


def rows_per_program(block: int) -> int:
    """Rows of a row-wise program. Its bits do not depend on it: every row is summed alone."""
    return max(1, min(128, 65536 // block)) if INTERPRETED else max(1, 1024 // block)


def rows_of_leaf(leaf: int) -> int:
    """Rows that a leaf's program takes at once; interpreted, few large programs are cheaper."""
    return min(leaf, 32) if INTERPRETED else 1


def stages_of(dtype: torch.dtype) -> int:
    """Rows of a leaf whose loads are under way at once. Rows of 32 bits fill a multiprocessor's
    queue one at a time; 16 bits take three (measured on an H200: 52 against 61 us)."""
    return 3 if not INTERPRETED and dtype in (torch.bfloat16, torch.float16) else 1


def warps_for(block: int) -> int:
    """Warps for one row of `block` elements in registers."""
    return max(1, min(16, block // 512))


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *args: Any,
    num_warps: int = 4,
    num_stages: int = 2,
    **constants: Any,
) -> None:
    """Run a kernel over a grid, multiply and add rounded separately; an empty grid runs nothing."""
    if any(size == 0 for size in grid):
        return
    if INTERPRETED:
        use_even_products()
        kernel[grid](*args, **constants)
        return
    with torch.cuda.device(_device_of(args)):
        kernel[grid](
            *args, **constants, num_warps=num_warps, num_stages=num_stages, enable_fp_fusion=False
        )


def _device_of(args: Sequence[Any]) -> torch.device:
    device: torch.device = next(a.device for a in args if isinstance(a, Tensor))
    return device
