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
from sumgrad.subjects.program.renamed import names_of_modules
from sumgrad.subjects.program.seen_modules import seen_modules
from sumgrad.subjects.program.tier_run import Tensors, TierRun
from torch._C._distributed_c10d import Store

MOST_TRIAL_S = 2.0  # a longer step is not run so often
MOST_RIGHT = 6  # more tell nothing more
PATIENCE_S, PATIENCE_RAISED_S = 20.0, 2.0  # for ranks that may wait for this one in their step
LEAST_S, MOST_TIMES = 3.0, 20.0  # after so long, or so many times its usual length, a step is stuck
STUCK = 17  # the exit code of a rank that is
POLL_S = 0.001  # a store's own wait sleeps for longer than a step may take
Told = Literal["yes", "no", "raised", "late"]


class Agreement:
    """What each rank says, told to all without a collective: one that raised out of its step, and
    one that still waits in it, could not meet in it. late: not right, and the time is over."""

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
        self._usual_s = 0.0
        self._modules = dict(seen_modules(run.model, names))

    def found(self) -> Iterator[Trial]:
        """In order, until their time is over. Nothing where the step does not fail as it did, or
        is too long to be run often."""
        began = time.monotonic()
        if not self._is_as_it_was():
            return
        is_long = self._usual_s > MOST_TRIAL_S
        if "late" in self._agreement.of_all("late" if is_long else "no"):
            return
        right = 0
        for change in self._asked.changes:
            own = self._told(change)
            late = own == "no" and time.monotonic() - began > self._asked.seconds
            told = self._agreement.of_all("late" if late else own)
            is_right = {*told} == {"yes"}
            if is_right and not self._is_as_it_was():
                return  # the step remembers, and what is tried after it is another
            yield Trial(change=change, right=is_right)
            if "raised" in told and not self._is_as_it_was():
                return
            right += is_right
            if "late" in told or right == MOST_RIGHT:
                return

    def _is_as_it_was(self) -> bool:
        """Whether the step, as it is, gives every rank what it gave when it failed."""
        began = time.monotonic()
        held = {name: grad.cpu().contiguous() for name, grad in self._step(None).items()}
        self._usual_s = max(self._usual_s, time.monotonic() - began)
        same = hash_weights(held) == self._asked.before.get(self._run.seat.rank)
        return {*self._agreement.of_all("yes" if same else "no")} == {"yes"}

    def _told(self, change: Change) -> Told:
        """Whether this rank's gradients are right with it."""
        # Ranks that wait for each other in a sum that a change has put between them wait for ever.
        end = threading.Timer(max(LEAST_S, MOST_TIMES * self._usual_s), os._exit, (STUCK,))
        end.daemon = True
        end.start()
        try:
            return "yes" if self._are_right(self._step(change)) else "no"
        except Exception:  # as of a loss without a graph: on all ranks, or the others wait
            return "raised"
        finally:
            end.cancel()

    def _step(self, change: Change | None) -> Tensors:
        """The gradients that the step that failed leaves, after those before it, all so changed."""
        run, grads = self._run, dict[str, Any]()
        for step in range(self._asked.step + 1):
            with self._changed(change):
                grads, _ = run.step(step)
        return grads

    def _changed(self, change: Change | None) -> contextlib.AbstractContextManager[Any]:
        if change is None:
            return contextlib.nullcontext()
        axes = [change.axis] if change.axis else []
        return Changed(change, self._run.ctx.group(*axes), self._modules)

    def _are_right(self, grads: Tensors) -> bool:
        """No gradient is zero."""
        for p in self._run.placement.placed:
            if p.name not in self._wanted:
                continue
            wanted = p.slice(self._wanted[p.name]).double()
            got = grads.get(p.name)
            got = torch.zeros_like(wanted) if got is None else got.double().cpu()
            if got.shape != wanted.shape:
                return False
            if not bool(((got - wanted).abs() <= self._asked.bounds[p.name]).all()):
                return False
        return True
