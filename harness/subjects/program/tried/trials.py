"""A failing step again and again, each time with one thing done otherwise: which makes it right.

Every rank holds its own gradients against what they must be, and all of them have to be right.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from sumgrad.ledger.process_group import Interposer
from sumgrad.record.trial import BEFORE, OF_COLLECTIVES, SUMMED, Asked, Change, Trial, Values
from sumgrad.subjects.program.placed.placement import Placed
from sumgrad.subjects.program.placed.renamed import names_of_modules
from sumgrad.subjects.program.placed.seen_modules import seen_modules
from sumgrad.subjects.program.tier_run import Tensors, TierRun
from sumgrad.subjects.program.tried.board import Board
from sumgrad.subjects.program.tried.changed import Changed, summed, summed_before
from sumgrad.subjects.program.tried.changed_collective import ChangedCollective
from sumgrad.subjects.program.tried.edited import UsersFunctions
from sumgrad.subjects.program.tried.exchange import Exchange
from sumgrad.subjects.program.tried.functions_run import functions_run
from sumgrad.subjects.program.tried.kept_from import kept_from_outside
from sumgrad.subjects.program.tried.rendezvous import Rendezvous
from torch import Tensor
from torch._C._distributed_c10d import Store

FEWEST, GRACE_S = 24, 6.0  # that are made though their time is over, for so long more
MOST_TRIAL_S = 2.0  # a longer step is not run so often
MOST_RIGHT = 6  # more tell nothing more
# Until it is seen whether the step is as it was: at first, and after the first that raised, soon.
FIRST_UNSEEN, MOST_UNSEEN = 3, 20
# A step that raised leaves what is about it in a wrapper's hands: it is looked at each time, and
# where it is another, all is distributed anew, so often.
WRAPPERS, MOST_ANEW = ("torch.nn.parallel", "torch.distributed"), 12
MOST_AFTER, MOST_AFTER_EDITED = 8, 12  # that are tried after the first line that was right
PATIENCE_S, PATIENCE_RAISED_S = 20.0, 2.0  # for ranks that may wait for this one in their step
LEAST_AS_IT_IS_S = 6.0  # in which ranks may first see that they do not meet
# A step is stuck after so long, or so many times its usual length, which is no more than this.
LEAST_S, LEAST_EDITED_S, MOST_TIMES, MOST_STUCK_S = 3.0, 0.7, 8.0, 10.0
STUCK = 17  # the exit code of a rank that is
# Ranks that all wait for others are apart after so long, or so many times a step's usual length.
MEETING_S, MEETING_EDITED_S, MEETING_TIMES = 1.0, 0.4, 3.0
PATIENCE_EDITED_S = 0.2  # the same of an edit, of which many raise on some ranks alone
WATCH_S = 0.05
POLL_S = 0.001  # a store's own wait sleeps for longer than a step may take
Told = Literal["yes", "no", "raised"]


class Agreement:
    """What each rank says, told to all without a collective: one that raised out of its step, and
    one that still waits in it, could not meet in it. over: a file that there is once a rank waits
    for the others no more."""

    def __init__(self, store: Store, rank: int, num_ranks: int, over: Path) -> None:
        self._store, self._rank, self._num_ranks, self._over = store, rank, num_ranks, over
        self._times = 0

    def of_all(self, own: str, patience_s: float = PATIENCE_S) -> Sequence[str]:
        """By rank, in a word. TimeoutError where one says nothing in time, or waits for the others
        no more: it has ended since, and so did what the others waited for in their step."""
        self._times += 1
        self._store.set(f"{self._times}/{self._rank}", own)
        keys = [f"{self._times}/{rank}" for rank in range(self._num_ranks)]
        until = time.monotonic() + patience_s
        while not self._store.check(keys):
            if time.monotonic() > until:
                self._over.touch()
                raise TimeoutError("not all ranks said how a trial ended")
            time.sleep(POLL_S)
        if self.is_over():
            raise TimeoutError("a rank waited no more for the others")
        return [self._store.get(key).decode() for key in keys]

    def rendezvous(self) -> Rendezvous:
        """Of this rank, with the others."""
        board = Board(self._over.with_name("board"), self._rank, self._num_ranks)
        exchange = Exchange(self._over.with_name("exchange"), self._rank, self._num_ranks)
        return Rendezvous(board, self._rank, exchange)

    def is_over(self) -> bool:
        """Of a file, for a store may wait for another that is gone."""
        return self._over.exists()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Left:
    """What steps left on this rank: their gradients, and where what they are of lies. whole: all
    ranks together hold all of every parameter, and this one as much as without the change: who
    leaves a model whole goes round all that is wrong in its parts."""

    grads: Sequence[Tensors]
    placed: Sequence[Placed]
    whole: bool = True


def _left(run: TierRun, steps: Sequence[int], through: Interposer | None) -> _Left:
    """A buffer that a step writes its gradients into holds the next step's after that."""
    grads = [{n: g.clone() for n, g in run.bare_step(step, through).items()} for step in steps]
    return _Left(grads=grads, placed=run.placement.placed)


def _num_held(placed: Sequence[Placed]) -> int:
    """Elements of parameters on this rank."""
    return sum(p.local().numel() for p in placed)


def _modules_of(run: TierRun) -> dict[str, torch.nn.Module]:
    """By the names that they have in the single process."""
    return dict(seen_modules(run.model, names_of_modules(run.model, run.modules, run.placement)))


def _wraps(module: torch.nn.Module) -> bool:
    """DDP, FSDP and others of torch's, and what is made one of them."""
    return any(one.__module__.startswith(WRAPPERS) for one in type(module).__mro__)


class Trials:
    """On one rank; all ranks make them together. agreement: of all of them."""

    def __init__(self, run: TierRun, asked: Asked, values: Values, agreement: Agreement) -> None:
        self._run, self._asked, self._agreement = run, asked, agreement
        self._all_anew = any(change.anew for change in asked.changes)
        self._wanted = values.wanted
        self._failed = values.before.get(run.seat.rank, {})
        self._usual_s, self._until, self._times_anew = 0.0, 0.0, 0
        self._run_as_it_is: set[str] = set()
        self._modules = _modules_of(run)
        self._is_wrapped = any(map(_wraps, run.model.modules()))
        self._functions, self._rendezvous = UsersFunctions(), agreement.rendezvous()

    def found(self) -> Iterator[Trial]:
        """In order, until their time is over, but some in any case. Nothing where the step does not
        fail as it did, or is too long to be run often."""
        self._until = time.monotonic() + self._asked.seconds
        if not self._is_as_it_was() or self._any(self._usual_s > MOST_TRIAL_S):
            return
        right, first = 0, len(self._asked.changes)
        unseen, raised = MOST_UNSEEN - FIRST_UNSEEN, False
        for num, change in enumerate(self._asked.changes, 1):
            told = self._told(change)
            is_right = {*told} == {"yes"}
            raises = "raised" in told
            often = MOST_UNSEEN if self._is_wrapped else FIRST_UNSEEN
            unseen += often if raises and (self._is_wrapped or not raised) else 1
            raised |= raises
            if is_right or unseen >= MOST_UNSEEN:
                # Where it is not, the step remembers: what is tried now is another.
                if not self._is_as_it_was(by_functions=is_right):
                    if is_right and change.edit is not None and not change.anew:
                        yield self._confirmed(replace(change, anew=True))
                        return
                    if not self._is_anew_as_it_was():
                        return
                unseen = 0
            # What is right once may be so by what the change before it has left.
            made = self._confirmed(change) if is_right else Trial(change=change, right=False)
            is_right = made.right
            yield made
            right += is_right
            if is_right and change.sure:  # others may make good what they are not
                first = min(first, num)
            left = self._until + (GRACE_S if num < FEWEST else 0) - time.monotonic()
            after = MOST_AFTER if change.edit is None else MOST_AFTER_EDITED
            if self._any(left < 0) or right == MOST_RIGHT or num == first + after:
                return

    def _any(self, own: bool) -> bool:
        """Whether it is so on any rank."""
        return "yes" in self._agreement.of_all("yes" if own else "no")

    def _is_as_it_was(self, *, by_functions: bool = False) -> bool:
        """Whether the step, as it is, gives every rank what it gave when it failed.

        Up to the bounds of what is right: a reducer that has seen a step may sum in another order.
        by_functions: which it runs is kept, too.
        """
        began, same = time.monotonic(), False
        with self._not_for_ever(LEAST_AS_IT_IS_S), contextlib.suppress(Exception):
            with functions_run() if by_functions else contextlib.nullcontext(set[str]()) as run:
                held = self._steps(None).grads[-1]
            self._run_as_it_is = run
            same = held.keys() == self._failed.keys() and all(
                self._is_within(f"{self._asked.step}/{n}", grad, self._failed[n])
                for n, grad in held.items()
            )
        self._usual_s = max(self._usual_s, time.monotonic() - began)
        if self._any(self._rendezvous.is_off):  # on all, or those that are not wait for those
            self._rendezvous.turn_off()
        return {*self._agreement.of_all("yes" if same else "no")} == {"yes"}

    def _is_anew_as_it_was(self) -> bool:
        """The same, after it was distributed anew; not for ever."""
        self._times_anew += 1
        if self._times_anew > MOST_ANEW:
            return False
        old = self._run
        with (
            self._not_for_ever(MOST_STUCK_S),
            contextlib.suppress(Exception),
            self._rendezvous.round(as_it_is=True) as rendezvous,
            self._as_in_a_step(None if rendezvous is None else rendezvous.before(None)),
        ):
            self._run = TierRun(old.seat, old.job, old.tier, old.dtype, like=old)
            self._run.stepped = True
            old.close()
            self._modules = _modules_of(self._run)
        self._agreement.of_all("yes")  # none begins a round while others are in this one
        return self._is_as_it_was()

    def _told(self, change: Change) -> Sequence[str]:
        """Of each rank, whether its gradients are right with it."""
        own: Told = "raised"  # as of a loss without a graph: on all ranks, or the others wait
        least = LEAST_S if change.edit is None else LEAST_EDITED_S  # of which more are tried
        with self._not_for_ever(least), contextlib.suppress(Exception):
            left = self._steps(change)
            own = "yes" if left.whole and self._are_right(left) else "no"
        if own != "raised":
            return self._agreement.of_all(own)
        # Others that distribute anew may be long before they come to what this one does not.
        soon = change.edit is not None and not change.anew
        patience = max(PATIENCE_EDITED_S, 2 * self._usual_s) if soon else PATIENCE_RAISED_S
        return self._agreement.of_all(own, patience)

    def _confirmed(self, change: Change) -> Trial:
        """What was right once more, with every operation carried out as in the user's run."""
        before, self._rendezvous.by_memory = self._rendezvous.by_memory, False
        try:
            with functions_run() as run:
                told = self._told(change)
        finally:
            self._rendezvous.by_memory = before
        own = sorted(self._run_as_it_is - run)
        every = (json.loads(one) for one in self._agreement.of_all(json.dumps(own)))
        avoids = tuple(sorted({name for one in every for name in one}))
        return Trial(change=change, right={*told} == {"yes"}, avoids=avoids)

    @contextlib.contextmanager
    def _not_for_ever(self, least_s: float = LEAST_S) -> Iterator[None]:
        """Ranks that wait for each other, in a sum that a change has put between them, end."""
        limit = min(max(least_s, MOST_TIMES * self._usual_s), MOST_STUCK_S)
        until, done = time.monotonic() + limit, threading.Event()

        def watch() -> None:
            while not done.wait(WATCH_S):
                if time.monotonic() > until or self._agreement.is_over():
                    os._exit(STUCK)

        threading.Thread(target=watch, daemon=True).start()
        try:
            yield
        finally:
            done.set()

    def _steps(self, change: Change | None) -> _Left:
        """What each step leaves, up to the one that failed, all so changed."""
        least = MEETING_S if change is None or change.edit is None else MEETING_EDITED_S
        self._rendezvous.patience_s = max(least, MEETING_TIMES * self._usual_s)
        steps = range(self._asked.step + 1)
        # On every rank a round, whatever becomes of the change on it: they are counted.
        with (
            self._rendezvous.round(as_it_is=change is None) as rendezvous,
            self._changed(change) as otherwise,
        ):
            through = otherwise if rendezvous is None else rendezvous.before(otherwise)
            if not (self._all_anew or (change is not None and change.anew)):
                return _left(self._run, steps, through)
            with self._as_in_a_step(through):
                run = TierRun(self._run.seat, self._run.job, self._run.tier, self._run.dtype,
                              like=self._run)  # fmt: skip
            try:
                run.stepped = True  # with the recorded weights, whatever it has left
                left = _left(run, steps, through)
            finally:
                run.close()
            with self._as_in_a_step(through):
                held = _num_held(run.placement.placed) == _num_held(self._run.placement.placed)
                return replace(left, whole=run.is_whole() and held)

    @contextlib.contextmanager
    def _as_in_a_step(self, through: Interposer | None) -> Iterator[None]:
        """Ranks that part do not wait for each other, either."""
        ledger = self._run.seat.ledger
        ledger.interpose, ledger.as_in_a_step = through, True
        try:
            yield
        finally:
            ledger.interpose, ledger.as_in_a_step = None, False

    @contextlib.contextmanager
    def _changed(self, change: Change | None) -> Iterator[Interposer | None]:
        """Between `with` and its end. Through which operations are to go."""
        if change is None:
            yield None
            return
        if change.edit is not None:
            with (
                self._functions.edited(change.edit, {SUMMED: self._summed, BEFORE: self._before}),
                self._run.seat.ledger.unwritten(),
                kept_from_outside(files_grow=change.anew),
            ):
                yield None
            return
        group = self._run.ctx.group(*([change.axis] if change.axis else []))
        if change.way in OF_COLLECTIVES:
            yield ChangedCollective(change, group)
            return
        with Changed(change, group, self._modules):
            yield None

    def _summed(self, value: Any, axis: str) -> Any:
        return summed(value, self._run.ctx.group(axis))

    def _before(self, value: Any, axis: str) -> Any:
        return summed_before(value, self._run.ctx.group(axis))

    def _are_right(self, left: _Left) -> bool:
        """No gradient is zero."""
        return all(
            self._is_right(p, f"{step}/{p.name}", grads.get(p.name))
            for step, grads in enumerate(left.grads)
            for p in left.placed
        )

    def _is_within(self, key: str, got: Tensor, was: Tensor) -> bool:
        wide = torch.complex128 if was.is_complex() else torch.float64
        got, was, bound = got.cpu().to(wide), was.to(wide), self._asked.bounds.get(key, 0.0)
        return got.shape == was.shape and torch.allclose(got, was, 0.0, bound, equal_nan=True)

    def _is_right(self, p: Placed, key: str, got: Tensor | None) -> bool:
        if key not in self._wanted:
            return True
        wanted = p.slice(self._wanted[key]).double()
        got = torch.zeros_like(wanted) if got is None else got.double().cpu()
        if got.shape != wanted.shape:
            return False
        return bool(((got - wanted).abs() <= self._asked.bounds[key]).all())
