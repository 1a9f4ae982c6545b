"""What a script does to gradients between their backward and its optimizer: a clip, a division.

A factor that all gradients share is gone behind a clip. So a sample of each is kept as the last
backward left it, or better as one of torch's own clips found it, and the optimizer's held against
it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from sumgrad.base.tensors import own_arithmetic
from sumgrad.launch.script.watched.gradients import is_placed_otherwise
from sumgrad.record.ranks import sample_of
from sumgrad.subjects.script.models import Held
from torch import Tensor

CLIPS = ("clip_grad_norm_", "clip_grads_with_norm_", "clip_grad_value_")
NEAR = {torch.float64: 1e-9, torch.float32: 1e-4}  # of the largest: still the same, times a factor
COARSE = 3e-2


class Rescaled:
    """Observes one process. held: the parameters that it has by now."""

    def __init__(self, held: Callable[[], Iterable[Held]]) -> None:
        self._held = held
        self._before: dict[str, Tensor] = {}
        self._by_clip: set[str] = set()
        self._idle: set[str] = set()  # of these, whose clip left them as they were
        self.saturated: dict[str, float] = {}  # which part of a gradient's numbers a clip cut off
        self.unseen: list[str] = []  # what no backward left there, as where a hook puts it

    def install(self) -> None:
        """See torch's clips, under the names that scripts import them by."""
        utils: Any = torch.nn.utils
        for name in CLIPS:
            clip = self._seen(getattr(utils, name))
            for module in (utils, utils.clip_grad):
                setattr(module, name, clip)

    def after_backward(self) -> None:
        """Every gradient as it is now, of a step that was not clipped yet."""
        self._note(by_clip=set())

    def taken(self, held: Iterable[Held]) -> dict[str, list[Any]]:
        """By parameter [factor, whether a clip of torch's found it], where any is not 1.

        The factor is None where its gradient is no multiple of what it was.
        """
        found: dict[str, list[Any]] = {}
        self.saturated, self.unseen = {}, []
        for h in held:
            before, now = self._before.pop(h.name, None), _sample(h)
            if before is None and h.param.requires_grad:
                self.unseen.append(h.name)
            if before is None or now is None or before.shape != now.shape:
                continue
            if not bool(before.any()) and not bool(now.any()):
                continue  # any multiple of nothing
            factor = _factor(before, now)
            if factor is None and (share := _share_cut_off(before, now)):
                self.saturated[h.name] = share
            # What follows a clip that did nothing is none of its.
            by_clip = h.name in self._by_clip and (factor == 1.0 or h.name not in self._idle)
            found[h.name] = [factor, by_clip]
            self._by_clip.discard(h.name)
            self._idle.discard(h.name)
        changed = any(factor is None or factor != 1.0 for factor, _ in found.values())
        return found if changed else {}

    def _seen(self, clip: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(clip)
        def seen(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            ids = {id(p) for p in given}
            with own_arithmetic():
                self._note(by_clip=ids)
            norm = clip(given, *args, **kwargs)
            with own_arithmetic():
                self._note_idle(ids)
            return norm

        return seen

    def _note_idle(self, ids: set[int]) -> None:
        """A clip that does nothing, as one that is called for the norm alone, may be followed by
        another, and by a reduction in between."""
        for h in self._held():
            before = self._before.get(h.name)
            if id(h.param) in ids and before is not None:
                now = _sample(h)
                same = now is not None and torch.equal(before, now)
                (self._idle.add if same else self._idle.discard)(h.name)

    def _note(self, *, by_clip: set[int]) -> None:
        """by_clip: ids of the parameters that a clip was given; of no other it says anything."""
        for h in self._held():
            given = id(h.param) in by_clip
            known = h.name in self._by_clip - self._idle and h.name in self._before
            if (by_clip and not given) or known:
                continue  # as the first clip of this step found it that did something
            sample = _sample(h)
            if sample is not None:
                self._before[h.name] = sample
                if given:
                    self._by_clip.add(h.name)


def _sample(held: Held) -> Tensor | None:
    grad = held.param.grad
    if grad is None or is_placed_otherwise(held.param, grad):
        return None
    local = held.part_of(grad.to_dense() if grad.is_sparse else grad).detach().reshape(-1)
    return local[sample_of(local.numel()).to(local.device)].clone()


def _share_cut_off(before: Tensor, now: Tensor) -> float:
    """Of the numbers that were not zero, 0 to 1, those that a clip by value has cut off, where that
    is all that was done: of these no factor shows."""
    most = float(now.abs().max())
    if not math.isfinite(most) or not torch.equal(now, before.clamp(-most, most)):
        return 0.0
    return int((before.abs() > most).sum()) / max(int((before != 0).sum()), 1)


def _factor(before: Tensor, now: Tensor) -> float | None:
    """Which multiple of `before` it is: 1.0 where it is the same, None where it is none."""
    if torch.equal(before, now):
        return 1.0
    old, new = before.double(), now.double()
    size = float(old.square().sum())
    if not size or not bool(torch.isfinite(new).all()):
        return None
    factor = float((old * new).sum()) / size
    near = NEAR.get(now.dtype, COARSE) * float(new.abs().max())
    return factor if float((new - factor * old).abs().max()) <= near else None
