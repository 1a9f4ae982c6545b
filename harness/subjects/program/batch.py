"""A Program's batch: drawn and looked at, in the dtype that is judged, its rows cut out."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from sumgrad.base.errors import Broken
from sumgrad.base.tensors import own_arithmetic
from sumgrad.record.spec import RowsAs
from sumgrad.subjects.program.protocol import call, kind_of
from torch import Tensor


def full_batch(program: Any, step: int = 0) -> dict[str, Tensor]:
    """The full batch of a step, rows first, as the Program gives it. Broken if it is none."""
    if isinstance(getattr(program, "batch", None), _Held):
        del program.batch
    args, named = _with_step(program, step)
    batch = call(program, "batch", *args, **named)
    if not isinstance(batch, Mapping) or not batch:
        raise Broken(f"batch() returned {type(batch).__name__}, expected a dict of tensors")
    for key, value in batch.items():
        if not isinstance(value, Tensor) or value.dim() == 0:
            raise Broken(f"batch()[{key!r}]: got {kind_of(value)}, expected a tensor, rows first")
    sizes = {key: len(value) for key, value in batch.items()}
    if len(set(sizes.values())) != 1 or not next(iter(sizes.values())):
        raise Broken(f"batch(): tensors have {sizes} rows, expected as many in each, at least 1")
    return dict(batch)


def takes_step(program: Any) -> bool:
    """Whether its own batch() takes the number of the step: as `step`, or because it must."""
    return bool(_with_step(program, 0) != ((), {}))


def _with_step(program: Any, step: int) -> tuple[tuple[int, ...], dict[str, int]]:
    """What its own batch() is called with."""
    given = getattr(program, "whole_batch", None) or getattr(program.batch, "own", program.batch)
    try:
        taken = inspect.signature(given).parameters
    except (TypeError, ValueError):
        return (), {}
    named = taken.get("step")
    if named is not None and named.kind in (named.POSITIONAL_OR_KEYWORD, named.KEYWORD_ONLY):
        return (), {"step": step}
    first = next(iter(taken.values()), None)
    if first is None or first.kind not in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD):
        return (), {}
    return ((step,) if first.default is first.empty else ()), {}


def to_dtype(batch: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The batch with its floating tensors in a dtype."""
    wide = torch.complex128 if dtype == torch.float64 else torch.complex64
    return {
        k: v.to(dtype) if v.is_floating_point() else v.to(wide) if v.is_complex() else v
        for k, v in batch.items()
    }


def round_batch(
    batch: Mapping[str, Tensor], rounded: torch.dtype, dtype: torch.dtype
) -> dict[str, Tensor]:
    """The batch in a dtype, in numbers of another."""
    return to_dtype(to_dtype(batch, rounded), dtype)


def on_device(batch: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """The batch there; tensors that are there already stay themselves."""
    return {key: value.to(device) for key, value in batch.items()}


def hold_batch(
    program: Any,
    batch: Mapping[str, Tensor],
    convert: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] = dict,
) -> None:
    """Let `self.batch()` inside a method give this batch, in the dtype that is judged.

    Drawn again under another default dtype it would be another batch. Asked for with arguments, the
    rows of another step, it is the Program's own, through `convert`.
    """
    own = getattr(program.batch, "own", program.batch)
    with contextlib.suppress(AttributeError):  # an object with slots
        program.batch = _Held(batch, own, convert)


class _Held:
    """Stands for a Program's own batch(); `full_batch` takes it away again."""

    def __init__(
        self,
        batch: Mapping[str, Tensor],
        own: Callable[..., Any],
        convert: Callable[[Mapping[str, Tensor]], dict[str, Tensor]],
    ) -> None:
        self.batch, self.own, self.convert = batch, own, convert
        self.default = torch.get_default_dtype()

    def __call__(self, *args: Any, **named: Any) -> dict[str, Tensor]:
        if args or named:
            now = torch.get_default_dtype()
            torch.set_default_dtype(self.default)
            try:
                with own_arithmetic():  # as it is drawn where nothing is lifted
                    return self.convert(self.own(*args, **named))
            finally:
                torch.set_default_dtype(now)
        return {key: value.clone() for key, value in self.batch.items()}


def cut(batch: Mapping[str, Tensor], rows: Tensor, rows_as: RowsAs) -> Any:
    """What loss_sum takes for these rows. rows: (n,) int64."""
    return rows if rows_as == "indices" else {key: value[rows] for key, value in batch.items()}
