"""A failing step again and again, each time with one thing done otherwise: which makes it right.

Every rank holds its own gradients against what they must be, and all of them have to be right.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from sumgrad.base.tensors import hash_weights
from sumgrad.record.reference import Grads
from sumgrad.record.trial import Asked, Change, Trial
from sumgrad.subjects.program.changed import Changed
from sumgrad.subjects.program.placement import Placed
from sumgrad.subjects.program.renamed import names_of_modules
from sumgrad.subjects.program.seen_modules import seen_modules
from sumgrad.subjects.program.tier_run import Tensors, TierRun
from torch import Tensor
from torch._C._distributed_c10d import Store

FEWEST, GRACE_S = 12, 6.0  # that are made though their time is over, for so long more
MOST_TRIAL_S = 2.0  # a longer step is not run so often
MOST_RIGHT = 6  # more tell nothing more
PATIENCE_S, PATIENCE_RAISED_S = 20.0, 2.0  # for ranks that may wait for this one in their step
# A step is stuck after so long, or so many times its usual length, which is no more than this.
LEAST_S, MOST_TIMES, MOST_STUCK_S = 3.0, 8.0, 10.0
STUCK = 17  # the exit code of a rank that is
POLL_S = 0.001  # a store's own wait sleeps for longer than a step may take
Told = Literal["yes", "no", "raised"]


class Agreement:
    """What each rank says, told to all without a collective: one that raised out of its step, and
    one that still waits in it, could not meet in it."""

    def __init__(self, store: Store, rank: int, num_ranks: int) -> None:
        self._store, self._rank, self._num_ranks = store, rank, num_ranks
        self._times = 0

    def of_all(self, own: Told) -> Sequence[str]:
        """By rank. TimeoutError where one says nothing in time."""
        self._times += 1
        self._store.set(f"{self._times}/{self._rank}", own)
        keys = [f"{self._times}/{rank}" for rank in range(self._num_ranks)]
        until = time.monotonic() + (PATIENCE_RAISED_S if own == "raised" else PATIENCE_S)
        while not self._store.check(keys):
            if time.monotonic() > until:
                raise TimeoutError("not all ranks said how a trial ended")
            time.sleep(POLL_S)
        return [self._store.get(key).decode() for key in keys]


class Trials:
    """On one rank; all ranks make them together. agreement: of all of them."""

    def __init__(self, run: TierRun, asked: Asked, wanted: Grads, agreement: Agreement) -> None:
        self._run, self._asked, self._wanted, self._agreement = run, asked, wanted, agreement
        names = names_of_modules(run.model, run.modules, run.placement)
        self._usual_s = self._until = 0.0
        self._modules = dict(seen_modules(run.model, names))

    def found(self) -> Iterator[Trial]:
        """In order, until their time is over, but some in any case. Nothing where the step does not
        fail as it did, or is too long to be run often."""
        self._until = time.monotonic() + self._asked.seconds
        if not self._is_as_it_was() or self._any(self._usual_s > MOST_TRIAL_S):
            return
        right = 0
        for num, change in enumerate(self._asked.changes, 1):
            told = self._told(change)
            is_right = {*told} == {"yes"}
            if (is_right or "raised" in told) and not self._is_as_it_was():
                return  # the step remembers, and what is tried after it is another
            # What is right once may be so by what the change before it has left.
            is_right = is_right and {*self._told(change)} == {"yes"}
            yield Trial(change=change, right=is_right)
            right += is_right
            left = self._until + (GRACE_S if num < FEWEST else 0) - time.monotonic()
            if self._any(left < 0) or right == MOST_RIGHT:
                return

    def _any(self, own: bool) -> bool:
        """Whether it is so on any rank."""
        return "yes" in self._agreement.of_all("yes" if own else "no")

    def _is_as_it_was(self) -> bool:
        """Whether the step, as it is, gives every rank what it gave when it failed."""
        began, same = time.monotonic(), False
        with self._not_for_ever(), contextlib.suppress(Exception):
            held = {n: grad.cpu().contiguous() for n, grad in self._steps(None)[-1].items()}
            same = hash_weights(held) == self._asked.before.get(self._run.seat.rank)
        self._usual_s = max(self._usual_s, time.monotonic() - began)
        return {*self._agreement.of_all("yes" if same else "no")} == {"yes"}

    def _told(self, change: Change) -> Sequence[str]:
        """Of each rank, whether its gradients are right with it."""
        own: Told = "raised"  # as of a loss without a graph: on all ranks, or the others wait
        with self._not_for_ever(), contextlib.suppress(Exception):
            own = "yes" if self._are_right(self._steps(change)) else "no"
        return self._agreement.of_all(own)

    @contextlib.contextmanager
    def _not_for_ever(self) -> Iterator[None]:
        """Ranks that wait for each other, in a sum that a change has put between them, end."""
        limit = min(max(LEAST_S, MOST_TIMES * self._usual_s), MOST_STUCK_S)
        end = threading.Timer(limit, os._exit, (STUCK,))
        end.daemon = True
        end.start()
        try:
            yield
        finally:
            end.cancel()

    def _steps(self, change: Change | None) -> list[Tensors]:
        """The gradients that each step leaves, up to the one that failed, all so changed."""
        out = []
        for step in range(self._asked.step + 1):
            with self._changed(change):
                out.append(self._run.step(step)[0])
        return out

    def _changed(self, change: Change | None) -> contextlib.AbstractContextManager[Any]:
        if change is None:
            return contextlib.nullcontext()
        axes = [change.axis] if change.axis else []
        return Changed(change, self._run.ctx.group(*axes), self._modules)

    def _are_right(self, steps: Sequence[Tensors]) -> bool:
        """No gradient is zero."""
        return all(
            self._is_right(p, f"{step}/{p.name}", grads.get(p.name))
            for step, grads in enumerate(steps)
            for p in self._run.placement.placed
        )

    def _is_right(self, p: Placed, key: str, got: Tensor | None) -> bool:
        if key not in self._wanted:
            return True
        wanted = p.slice(self._wanted[key]).double()
        got = torch.zeros_like(wanted) if got is None else got.double().cpu()
        if got.shape != wanted.shape:
            return False
        return bool(((got - wanted).abs() <= self._asked.bounds[key]).all())
