"""Buffers of a script's models: what each step leaves in them, as the next forward finds it.

Running statistics, a router's biases, counters: nothing reduces them like gradients. They are only
looked at, and never set: what the next forward takes from a wrong one, its gradients show.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from sumgrad.base.tensors import same_bits, to_local
from sumgrad.launch.script.watched.kept import Kept
from sumgrad.record.reference import Grads
from sumgrad.subjects.script.asked import Asked, buffers_of
from torch import Tensor

MOST = 1 << 20  # elements; a larger one (a table, a cache) is not looked at


class Buffers:
    """Of one process. directory: where the single run keeps its own."""

    def __init__(self, asked: Asked, directory: Path) -> None:
        self._asked, self._kept = asked, Kept(asked, directory)
        self._last: Grads = {}

    def begin(self, buffers: Mapping[str, Tensor]) -> None:
        """Those of every model met so far, as they are before its first forward."""
        for name, local in _small(buffers).items():
            self._last.setdefault(name, local.clone())

    def after(self, buffers: Mapping[str, Tensor], call: int) -> tuple[Grads, list[str]]:
        """What a step left in those that it changed, here or in the single run; and which it
        changed here."""
        here = _small(buffers)
        changed = [n for n, local in here.items()
                   if n not in self._last or not same_bits(local, self._last[n])]  # fmt: skip
        theirs: Mapping[str, Tensor] = {}
        if self._asked.start is None:
            self._kept.keep(buffers_of(call), {n: here[n] for n in changed})
        else:
            theirs = self._kept.stored(buffers_of(call))
        self._last |= {n: here[n].clone() for n in changed}
        return {
            n: local.clone() for n, local in here.items() if n in changed or n in theirs
        }, changed


def _small(buffers: Mapping[str, Tensor]) -> Grads:
    """The part of each that is here, without a copy, of those that are looked at."""
    local = {name: to_local(buffer).detach() for name, buffer in buffers.items()}
    return {
        n: torch.view_as_real(t.resolve_conj()) if t.is_complex() else t
        for n, t in local.items()
        if t.numel() <= MOST
    }
