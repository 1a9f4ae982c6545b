"""True float64: what a model casts to fewer digits is lifted, and what cannot be is named.

Models upcast to float32 in the middle of float64 (norms, rotary tables, a router's softmax), and a
step may cast what it communicates. While a Lift is on, every such cast gives float64: PyTorch's
function mode rewrites what Python asks for, also while torch.compile traces it, and its dispatch
mode what is asked for below (a kernel's own dtype, the backward's). Integers and bits are left
alone. Random numbers are drawn in the dtype that the model would have drawn them in, and then
lifted, so that a mask is the same mask in every tier.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from sumgrad.ledger.backends import tensors_in
from sumgrad.subjects.users_line import users_line
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

DIGITS = {
    torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8,
    torch.complex128: 53, torch.complex64: 24, torch.complex32: 11,
}  # fmt: skip
DRAWS = torch.float32  # what a model draws its random numbers in, unless it says another
MAX_PLACES = 50  # lines that are listed; the rest is counted under the last
_CASTS = {torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16}
_aten = torch.ops.aten
_BITS = {torch.Tensor.view, torch.frombuffer, torch.from_file, _aten.view.dtype,
         _aten.from_file.default}  # fmt: skip
_STORAGES = (
    "torch/_utils.py", "torch/storage.py", "torch/serialization.py",
    "torch/multiprocessing/reductions.py", "torch/utils/data/_utils/collate.py",
)  # fmt: skip
AUTOCASTS = ("cpu", "cuda")  # devices whose blocks are told
_COPIES = {"__deepcopy__", "__reduce_ex__", "_reduce_ex_internal", "__setstate__"}
_OWN = f"{Path(__file__).parents[2]}{os.sep}"  # as code objects have it, not resolved
_DRAWN_INTO = {
    _aten.uniform_.default, _aten.normal_.default, _aten.exponential_.default,
    _aten.log_normal_.default, _aten.cauchy_.default,
}  # fmt: skip
_DRAWN_FLOATS = {_aten.rand, _aten.randn, _aten.rand_like, _aten.randn_like}
_DRAWN = {
    torch.rand, torch.randn, torch.rand_like, torch.randn_like, torch.normal, torch.bernoulli,
    torch.empty_like, torch.poisson,
}  # fmt: skip


class Lift:
    """Every float inside the block has at least the digits of a dtype, where `change` is set.

    lifted: line -> how often a cast there was lifted, as `float32 at model.py:9`. narrow: the same
    of what stayed in fewer digits all the same. autocast: where such a block is first met, which
    casts nothing that is float64. draws: lines that draw random numbers, which without the Lift
    would be others, and how often.
    """

    def __init__(self, dtype: torch.dtype = torch.float64, *, change: bool = True) -> None:
        self.dtype, self.change = dtype, change
        self.lifted: Counter[str] = Counter()
        self.narrow: Counter[str] = Counter()
        self.autocast: Counter[str] = Counter()
        self.draws: Counter[str] = Counter()
        self._modes: list[Any] = []

    def __enter__(self) -> Lift:
        self._modes = [_Dispatch(self), *([_Function(self)] if self.change else [])]
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        for mode in reversed(self._modes):
            mode.__exit__(kind, error, trace)
        self._modes = []

    def is_narrow(self, dtype: Any) -> bool:
        """Whether a dtype is a float, or a complex number, of fewer digits."""
        return isinstance(dtype, torch.dtype) and DIGITS.get(dtype, 99) < DIGITS[self.dtype]

    def wider(self, dtype: torch.dtype) -> torch.dtype:
        """What a narrow dtype is lifted to."""
        return torch.complex128 if dtype.is_complex else self.dtype

    def wide(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any, list[Any]]:
        """Arguments with narrow dtypes replaced, and those dtypes."""
        asked = [a for a in (*args, *kwargs.values()) if self.is_narrow(a)]
        if not asked:
            return args, kwargs, asked
        return (
            tuple(self.wider(a) if self.is_narrow(a) else a for a in args),
            {k: self.wider(a) if self.is_narrow(a) else a for k, a in kwargs.items()},
            asked,
        )

    @property
    def drawn(self) -> bool:
        """Whether random numbers were."""
        return bool(self.draws)

    def note(self, counts: Counter[str], dtype: torch.dtype) -> None:
        """Count the line of Python that runs, outside of torch and of what observes it."""
        _count(counts, f"{str(dtype).removeprefix('torch.')} at {users_line()}")


def _count(counts: Counter[str], place: str) -> None:
    counts[place if place in counts or len(counts) < MAX_PLACES else "elsewhere"] += 1


def lifting(dtype: torch.dtype, *, change: bool) -> AbstractContextManager[Any]:
    """A Lift where float64 is computed and casts are to be lifted; else nothing."""
    return Lift() if change and dtype == torch.float64 else nullcontext()


def is_compiled(model: nn.Module) -> bool:
    """Whether a part of a model is compiled: such regions are lifted, and not looked into."""
    return any(
        type(module).__name__ == "OptimizedModule"
        or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )


class _Function(TorchFunctionMode):
    """What Python asks for. torch.compile traces this method, so it is plain there."""

    def __init__(self, lift: Lift) -> None:
        super().__init__()
        self.lift = lift

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        traced = torch.compiler.is_dynamo_compiling()
        if not traced and not self.lift.autocast:
            for device in AUTOCASTS:
                if torch.is_autocast_enabled(device):
                    self.lift.note(self.lift.autocast, torch.get_autocast_dtype(device))
        if func in _BITS or func in _DRAWN or (not traced and _compiler_runs()):
            return func(*args, **kwargs)
        if func in _CASTS:
            asked = [_cast_dtype(func)] if self.lift.is_narrow(_cast_dtype(func)) else []
            if asked:
                func, args = torch.Tensor.to, (args[0], self.lift.dtype)
        else:
            wide, named, asked = self.lift.wide(args, kwargs)
            if asked and not traced and _is_over_a_storage():
                return func(*args, **kwargs)
            args, kwargs = wide, named
        if asked and not traced:
            self.lift.note(self.lift.lifted, asked[0])
        return func(*args, **kwargs)


def _compiler_runs() -> bool:
    """Whether a compiler computes on its own behalf: its patterns and fake tensors are no step."""
    return torch._guards.TracingContext.try_get() is not None or any(
        torch._C._get_dispatch_mode(key) is not None for key in _COMPILERS
    )


_COMPILERS = (torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY)


def _cast_dtype(func: Callable[..., Any]) -> torch.dtype:
    if func is torch.Tensor.float:
        return torch.float32
    return torch.float16 if func is torch.Tensor.half else torch.bfloat16


class _Dispatch(TorchDispatchMode):
    """What reaches the kernels, forward and backward, but for compiled regions."""

    def __init__(self, lift: Lift) -> None:
        super().__init__()
        self.lift = lift

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # else torch.compile would run everything as it is written

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        lift, kwargs = self.lift, kwargs or {}
        if _compiler_runs():
            return func(*args, **kwargs)
        drawn = torch.Tag.nondeterministic_seeded in func.tags
        if drawn:
            _count(lift.draws, users_line())
        if lift.change and func in _DRAWN_INTO:
            return _draw_into(func, *args, **kwargs)
        pure = func.namespace == "aten" and not _aliases(func)
        if lift.change and pure and not drawn:
            wide, named, asked = lift.wide(args, kwargs)
            if asked and _is_autograds_own():
                return func(*args, **kwargs)
            wide, named = _raised(lift, wide), _raised(lift, named)
            same = all(a is b for a, b in zip(args, wide, strict=True)) and not kwargs
            if func in _BITS or (not same and _is_over_a_storage()):
                return func(*args, **kwargs)
            if asked:
                lift.note(lift.lifted, asked[0])
            args, kwargs = wide, named
        if lift.change and drawn and pure and _asks_for_none(func, args, kwargs):
            kwargs = {**kwargs, "dtype": DRAWS}
        stand_in = _STAND_INS.get(func) if lift.change else None
        out = (stand_in or func)(*args, **kwargs)
        if lift.change and drawn and pure:
            return _raised(lift, out)
        if pure or _writes(func):
            # What no operation made, as memory of numpy's, is only ever taken.
            for tensor in (*tensors_in(out), *tensors_in(args)):
                if lift.is_narrow(tensor.dtype):
                    lift.note(lift.narrow, tensor.dtype)
                    break
        return out


def _asks_for_none(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a draw's dtype is our float64: the default's, or that of what it shall be like."""
    if func.overloadpacket not in _DRAWN_FLOATS or kwargs.get("dtype"):
        return False
    return all(t.dtype == torch.float64 for t in tensors_in(args))


def _draw_into(func: Any, out: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Fill a tensor with numbers that were drawn in fewer digits."""
    if out.dtype != torch.float64:
        filled: Tensor = func(out, *args, **kwargs)
        return filled
    return out.copy_(func(torch.empty_like(out, dtype=DRAWS), *args, **kwargs))


def _is_autograds_own() -> bool:
    """Whether the engine itself casts: a gradient to the dtype of what it is the gradient of.

    That is narrow only where a tensor in the forward was; the engine refuses another dtype.
    """
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.endswith(_DISPATCHERS):
        frame = frame.f_back
    if frame.f_code.co_name != "_engine_run_backward":
        return False
    node = torch._C._current_autograd_node()
    return node is not None and "AccumulateGrad" not in node.name()


def _is_over_a_storage() -> bool:
    """Whether torch makes a tensor anew over the bytes of another, as of a file, a message or a
    copy: in another dtype these bytes are other numbers, or end too soon."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(_OWN) and not path.endswith(_DISPATCHERS):
            break
        frame = frame.f_back
    if frame is None:
        return False
    copies = path.endswith("torch/_tensor.py") and frame.f_code.co_name in _COPIES
    return copies or path.endswith(_STORAGES)


_DISPATCHERS = ("torch/_compile.py", "torch/_dynamo/eval_frame.py", "torch/_ops.py")


def _aliases(func: Any) -> bool:
    """Whether an operator writes to its arguments or returns them: those keep their dtype."""
    known = _ALIASES.get(func)
    if known is None:
        schema = func._schema
        known = any(a.alias_info is not None for a in (*schema.arguments, *schema.returns))
        _ALIASES[func] = known
    return known


_ALIASES: dict[Any, bool] = {}


def _writes(func: Any) -> bool:
    return any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)


def _raised(lift: Lift, value: Any) -> Any:
    """Narrow tensors among arguments or results, in the lift's dtype."""
    if isinstance(value, Tensor):
        return value.to(lift.wider(value.dtype)) if lift.is_narrow(value.dtype) else value
    if isinstance(value, list | tuple):
        return type(value)(_raised(lift, v) for v in value) if _plain(value) else value
    if isinstance(value, dict):
        return {k: _raised(lift, v) for k, v in value.items()}
    return value


def _plain(value: Any) -> bool:
    return type(value) in (list, tuple)


# ---- operators without a float64 kernel ----------------------------------------------------------


def _grouped_mm(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Products of groups: rows of `a` (2d) or columns of it, cut at `offs`, with each of `b`."""
    if a.dtype != torch.float64:
        return torch.ops.aten._grouped_mm.default(a, b, offs, bias, out_dtype)
    if offs is None:
        out = torch.bmm(a, b)
        return out if bias is None else out + bias[:, None]
    ends = offs.tolist()
    groups = list(zip([0, *ends], ends, strict=False))
    if a.dim() == 2 and b.dim() == 3:  # rows of a: (M, K) x (G, K, N)
        out = a.new_zeros(a.shape[0], b.shape[-1])
        for i, (start, end) in enumerate(groups):
            out[start:end] = a[start:end] @ b[i] + (0 if bias is None else bias[i])
    elif a.dim() == 2:  # what is summed over: (M, K) x (K, N)
        out = torch.stack([a[:, start:end] @ b[start:end] for start, end in groups])
    else:  # columns of b: (G, M, K) x (K, N)
        out = a.new_zeros(a.shape[1], b.shape[-1])
        for i, (start, end) in enumerate(groups):
            out[:, start:end] = a[i] @ b[:, start:end]
    return out


def _unscale(grads: Sequence[Tensor], found_inf: Tensor, inverse: Tensor) -> None:
    """What a GradScaler does to gradients; its kernel takes a float32 scale only."""
    for grad in grads:
        if not bool(torch.isfinite(grad).all()):
            found_inf.fill_(1.0)
        grad.mul_(inverse.to(grad.dtype))


def _update_scale(
    scale: Tensor, tracker: Tensor, found_inf: Tensor, growth: float, backoff: float, interval: int
) -> Tensor:
    """And to its scale: smaller after an overflow, larger after so many steps without one."""
    if bool(found_inf):
        scale.mul_(backoff)
        tracker.zero_()
        return scale
    tracker.add_(1)
    if int(tracker) == interval:
        scale.mul_(growth)
        tracker.zero_()
    return scale


_STAND_INS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten._grouped_mm.default: _grouped_mm,
    torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
    torch.ops.aten._amp_update_scale_.default: _update_scale,
}
