"""Which optimizer steps run: one may call that of its base, or that of another optimizer. What is
asked before a step comes after the optimizer's own hooks, which may change what it finds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from sumgrad.ledger.process_group import step_aside
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle


@dataclass(slots=True)
class StepsUnderWay:
    """Steps that have begun and not ended, the outermost first, each with the frame it runs in.

    A step that raised ends without a word: it is known by its frame, which nobody runs any more.
    """

    steps: list[tuple[int, FrameType | None]] = field(default_factory=list)

    def begins(self, optimizer: Any) -> bool:
        """A step begins; to be asked in its own hook. Whether one before it, the outermost, raised
        and was given up."""
        running = _running()
        live = [s[1] in running if s[1] is not None else s[0] != id(optimizer) for s in self.steps]
        kept = live.index(False) if False in live else len(live)
        given_up = kept == 0 and bool(self.steps)
        del self.steps[kept:]
        self.steps.append((id(optimizer), _step_of(running)))
        return given_up

    def ends(self, optimizer: Any) -> bool:
        """A step has ended; to be asked in its own hook. Whether it was the outermost."""
        running = _running()
        mine = [
            i
            for i, (key, frame) in enumerate(self.steps)
            if key == id(optimizer) and (frame is None or frame in running)
        ]
        if not mine:
            return False  # it began before anybody looked
        del self.steps[mine[-1] :]
        return not self.steps

    def __len__(self) -> int:
        return len(self.steps)


class AfterItsOwn:
    """A hook before every optimizer's step that comes after the optimizer's own hooks."""

    def __init__(self, hook: Callable[[Optimizer, Any, Any], Any]) -> None:
        self._hook = hook
        self._added: dict[int, RemovableHandle] = {}  # by id of an optimizer

    @step_aside
    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """To be called as one of all optimizers, which come first."""
        self.over(optimizer)  # of a step that raised
        if not optimizer._optimizer_step_pre_hooks:
            return self._hook(optimizer, args, kwargs)
        self._added[id(optimizer)] = optimizer.register_step_pre_hook(self._hook)
        return None

    def over(self, optimizer: Optimizer) -> None:
        """A step has ended."""
        added = self._added.pop(id(optimizer), None)
        if added is not None:
            added.remove()


def _running() -> list[FrameType]:
    """The frames of this thread that run, the innermost first."""
    frames, frame = [], sys._getframe(1)
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back  # type: ignore[assignment]
    return frames


def _step_of(running: list[FrameType]) -> FrameType | None:
    """That of torch's wrapper around a step, which calls the hooks; None where it is compiled."""
    ours = ("optim", "optimizer.py")
    at = (f for f in running if tuple(f.f_code.co_filename.split("/")[-2:]) == ours)
    return next(at, None)
