"""Parameters that are not trained: what a step changes in them is seen, and put back."""

from __future__ import annotations

from typing import Any

import torch
from sumgrad.base.tensors import bits, to_local
from torch import Tensor, nn

MOST_COPIED = 1 << 28  # elements of all together; the largest beyond that are not put back


class Frozen:
    """Of one rank's model, as `distribute` left it."""

    def __init__(self, model: nn.Module) -> None:
        self._held = {n: p for n, p in model.named_parameters() if not p.requires_grad}
        self._before = {name: self._bits(name) for name in self._held}
        self._copies: dict[str, Tensor] = {}
        left = MOST_COPIED
        for name in sorted(self._held, key=lambda name: to_local(self._held[name]).numel()):
            local = to_local(self._held[name]).detach()
            left -= local.numel()
            if left < 0:
                break
            self._copies[name] = local.clone()

    def put_back(self) -> None:
        with torch.no_grad():
            for name, value in self._copies.items():
                held = to_local(self._held[name])
                if held.shape == value.shape:
                    held.copy_(value)

    def said(self) -> dict[str, Any]:
        """Digests of each as it was and as it is; those that are others and stay so."""
        now = {name: [before, self._bits(name)] for name, before in self._before.items()}
        others = [name for name, (before, after) in now.items() if before != after]
        return {"frozen": now, "frozen_left": [n for n in others if n not in self._copies]}

    def _bits(self, name: str) -> str:
        return bits([to_local(self._held[name]).detach()])
