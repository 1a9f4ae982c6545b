"""Where a shard lies whose values do not tell: in a model whose every weight is its own number.

A bias that starts at zero, a fused projection cut by heads, a layout that a kernel wants: the same
code is let cut a model of numbers, and what it cuts says where it came from. What is learnt so is
held against the weights bit by bit, as every place is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from sumgrad.base.tensors import to_local
from torch import Tensor, nn

Found = Mapping[str, tuple[str, Tensor | None]]
MOST = 1 << 53  # numbers that float64 tells apart


class Numbers:
    """The number of each element of each trained parameter of a model, from 1 on.

    shapes: name -> of the full parameter, in the order of their numbers.
    """

    def __init__(self, shapes: Mapping[str, Any]) -> None:
        self._shapes = {name: torch.Size(shape) for name, shape in shapes.items()}
        sizes = [shape.numel() for shape in self._shapes.values()]
        self._starts = torch.tensor([1, *sizes]).cumsum(0)

    def write(self, params: Mapping[str, nn.Parameter]) -> None:
        """In place of the parameters' values, which are float64."""
        with torch.no_grad():
            for name, start in zip(self._shapes, self._starts.tolist(), strict=False):
                param = params[name]
                param.copy_(torch.arange(start, start + param.numel()).view(param.shape))

    def read(self, model: nn.Module) -> dict[str, tuple[str, Tensor | None]]:
        """Name that the distributed model has for a parameter -> the full one's, and its elements
        in it, of the local shape; None for all of them, in their order."""
        found = {}
        for shown, param in model.named_parameters():
            known = self._read(to_local(param).detach().cpu())
            if known is not None:
                found[shown] = known
        return found

    def _read(self, local: Tensor) -> tuple[str, Tensor | None] | None:
        last = int(self._starts[-1])
        if not local.numel() or local.dtype != torch.float64 or last > MOST:
            return None
        if not bool(((local >= 1) & (local < last)).all()):
            return None
        numbers = local.long()
        if not torch.equal(numbers.double(), local) or len(numbers.unique()) < local.numel():
            return None
        ends = torch.stack([numbers.min(), numbers.max()])
        first, also = (torch.searchsorted(self._starts, ends, right=True) - 1).tolist()
        if first != also:
            return None  # parts of two parameters in one
        name = list(self._shapes)[first]
        index = (numbers - self._starts[first]).contiguous()
        shape = self._shapes[name]
        whole = torch.arange(shape.numel()).view(shape)
        return name, None if torch.equal(index, whole) else index
