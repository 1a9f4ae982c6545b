"""Which optimizer steps run: one may call that of its base, or that of another optimizer."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import FrameType
from typing import Any


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
