"""Keeps what goes into a step's collectives and what they give: an observer around another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from sumgrad.ledger.backends import tensors_in
from sumgrad.ledger.evidence import OUT_OF_PLACE
from sumgrad.ledger.operations import FAMILIES
from sumgrad.ledger.process_group import Ledger, Observer
from sumgrad.record.exchanged import Exchange
from torch import Tensor

MAX_BYTES = 1 << 27  # of what goes in and comes out, on each rank


class Exchanges:
    """Observes the operations of a step in front of another observer, `inner`, and keeps their
    values.

    begin_step() begins another: what the one before was given is kept beside it, operation by
    operation of each kind.
    """

    def __init__(self, ledger: Ledger, inner: Observer) -> None:
        self._ledger, self.inner = ledger, inner
        self._found: dict[int, Exchange] = {}
        self._streams: dict[str, list[Tensor]] = {}
        self._before: dict[str, list[Tensor]] = {}
        self._room = MAX_BYTES

    def begin_step(self) -> None:
        """Forget what the step before the last one gave."""
        self._before, self._streams = self._streams, {}
        self._found.clear()
        self._room = MAX_BYTES

    @property
    def found(self) -> tuple[Exchange, ...]:
        """Those of the step so far."""
        return tuple(self._found.values())

    def observe(
        self, op: str, args: tuple[Any, ...]
    ) -> tuple[dict[str, Any], Callable[[], Any] | None]:
        """For the ledger: what the observer behind this one says."""
        seen, result = self.inner(op, args)
        number, family = self._ledger.num_operations, FAMILIES.get(op)
        outputs = list(tensors_in(args[:1]))
        inputs = list(tensors_in(args[1:2])) if family in OUT_OF_PLACE else outputs
        given = self._kept(inputs)
        if given is None or family in (None, "barrier", "send", "recv"):
            return seen, result
        stream = self._streams.setdefault(op, [])
        earlier = self._before.get(op, [])
        before = earlier[len(stream)] if len(stream) < len(earlier) else None
        if before is not None and before.shape != given.shape:
            before = None
        stream.append(given)
        self._found[number] = Exchange(number=number, given=given, before=before)

        def done() -> Any:
            got = self._kept(outputs)
            if number in self._found:
                self._found[number] = replace(self._found[number], got=got)
            return None if result is None else result()

        return seen, done

    def _kept(self, tensors: list[Tensor]) -> Tensor | None:
        """Copies; None of what is no dense floating number, or over the room that is left."""
        if not tensors or any(
            t.is_sparse or t.is_quantized or not t.is_floating_point() for t in tensors
        ):
            return None
        self._room -= sum(t.numel() * t.element_size() for t in tensors)
        if self._room < 0 or len({t.dtype for t in tensors}) > 1:
            return None
        with torch.no_grad():
            held = [t.detach().to(device="cpu", copy=True).contiguous() for t in tensors]
            return held[0] if len(held) == 1 else torch.cat([t.reshape(-1) for t in held])
