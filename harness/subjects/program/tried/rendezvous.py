"""What ranks send each other in a trial, begun only once all whom it concerns have come to it.

A change may have a rank leave a step in which others wait for it. What Gloo has begun is not taken
back: ranks that wait in it have to be ended, and started again. What nobody has begun can be left:
each rank says first what it comes to, and where one of the others has ended its step, or comes to
something else there, it never will be begun, and those that have come leave their step, too.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from sumgrad.ledger.backends import tensors_in
from sumgrad.ledger.operations import POINT_TO_POINT
from sumgrad.ledger.process_group import Call, Interposer
from sumgrad.subjects.program.tried.board import Board, number_of
from sumgrad.subjects.program.tried.exchange import ByMemory, Exchange, SentByMemory

ALIKE = {"allreduce": 0, "broadcast": 0, "allgather": 1, "_allgather_base": 1,
         "all_gather_single": 1, "reduce_scatter": 0, "_reduce_scatter_base": 0,
         "reduce_scatter_single": 0}  # fmt: skip
# Of operations that have something as large on all ranks: which argument.
OF_WHAT = 40  # bits; above them where this rank has put what it brings
YIELDS, PAUSE_S = 50, 5e-5  # of a rank that waits: others may need its core
SIZES = 8  # of what one rank sends another: the last ones that are told
MOST_BY_MEMORY = 16  # that one rank sends another in a round, of each tag: the first ones


class Parted(RuntimeError):
    """Others do not come to it any more."""


class Rendezvous:
    """An interposer of the ledger's, on one rank. patience_s: until ranks that all wait, each for
    others, are taken to wait for ever. by_memory: small operations are carried out without Gloo."""

    def __init__(self, board: Board, rank: int, exchange: Exchange | None = None) -> None:
        self._board, self._rank, self._exchange = board, rank, exchange
        self.by_memory = exchange is not None
        self._times: dict[int, int] = {}
        self._later: list[_Later] = []  # not begun, in order
        self._begun: list[_Later] = []  # a work that nobody holds may end before it is done
        self._unfit: set[int] = set()  # keys of ways on which one sends more than the other takes
        self._beyond: Interposer | None = None
        self._is_off = False
        self.patience_s = 0.0

    @contextlib.contextmanager
    def round(self, *, as_it_is: bool) -> Iterator[Rendezvous | None]:
        """One or several steps; None where operations are to go on as ever. as_it_is: steps that
        are known to end: where ranks do not meet in them, they do not from then on."""
        if self._is_off:
            yield None
            return
        self._beyond, self._as_it_is = None, as_it_is
        self._times, self._later, self._begun, self._unfit = {}, [], [], set()
        if self._exchange is not None:
            self._exchange.begin()
        self._board.begin()
        try:
            yield self
        finally:
            self._board.end()
            if as_it_is:
                self._begin(self._later)  # what nobody here waits for, and others may
            self._begin_what_has_come()
            for one in reversed(self._later):  # those that have not come now begin nothing alone
                self._board.put(one.own, one.number - 1, 0)

    def before(self, beyond: Interposer | None) -> Rendezvous:
        """This, and what carries operations out after it."""
        self._beyond = beyond
        return self

    def __call__(self, call: Call) -> Any:
        peer = call.event.get("peer")
        if self._is_off or call.group.size() < 2:
            return self._carry_out(call)
        if call.op in POINT_TO_POINT and peer not in (None, self._rank):
            later = _Later(self, call, self._rank)
            self._later.append(later)
            if self._is_off:
                self.turn_off()
            else:
                self._begin_what_has_come()
            return later
        if call.op == "recv_anysource":
            return self._carry_out(call)
        number, slots = self._meet(call)
        if self._exchange is None or not all(slots) or self._is_off:
            return self._carry_out(call)
        below = ByMemory(self._exchange, call, slots, number)
        with call.group.carried_out_by(below):
            return self._carry_out(call)

    def _carry_out(self, call: Call) -> Any:
        return call.issue() if self._beyond is None else self._beyond(call)

    def come(self, key: int, what: int = 0) -> int:
        """How often it has, this time with it."""
        self._times[key] = self._times.get(key, 0) + 1
        if not self._board.put(key, self._times[key], what):
            self.turn_off()
        return self._times[key]

    def come_with(self, key: int, size: int, call: Call) -> tuple[int, int]:
        """How often it has, this time with something so large; and where it has put it."""
        number, part = self._times.get(key, 0) + 1, 0
        by_memory = self.by_memory and self._exchange is not None and not self._as_it_is
        if by_memory and call.op == "send" and number <= MOST_BY_MEMORY and size < 1 << OF_WHAT:
            assert self._exchange is not None
            part = self._exchange.send(call)
        if not self._board.put(_of_its_size(key, number), number, size | part << OF_WHAT):
            self.turn_off()
            part = 0
        return self.come(key), part

    def _meet(self, call: Call) -> tuple[int, list[int]]:
        """Wait until the others have come to it: which of the group's operations it is, and by rank
        where it has put what it brings. Parted where one of them never will."""
        key, what = number_of(call.group.ranks, call.event["pg"]), _what(call)
        before = self._board.seen(self._rank, key)[1]
        number, slot = self._times.get(key, 0) + 1, 0
        # In a step that is known to end one may go on with Gloo that has waited for long.
        if self.by_memory and self._exchange is not None and not self._as_it_is:
            slot = self._exchange.bring(key, number, call)
        own = self.come(key, what | slot << OF_WHAT)
        others = [rank for rank in call.group.ranks if rank != self._rank]

        def all_are_there() -> bool:
            while others:
                rank = others[-1]
                ended = self._board.has_ended(rank)  # before it is looked where it is
                times, its = self._board.seen(rank, key)
                if times == own and its & ((1 << OF_WHAT) - 1) != what:
                    self._part(f"rank {rank} does something else than {call.op} there")
                if times < own:
                    if ended:
                        self._part(f"rank {rank} does not come to {call.op}")
                    return False
                others.pop()
            return True

        try:
            self._wait(all_are_there)
        except Parted:
            # Who comes later does not find this rank here, and one who is behind finds it there.
            self._board.put(key, own - 1, before)
            raise
        told = [] if self._is_off else [self._board.told(r, key, own) for r in call.group.ranks]
        return own, [one >> OF_WHAT for one in told] or [0]

    def _wait(self, is_so: Callable[[], bool]) -> None:
        until, times = time.monotonic() + self.patience_s, 0
        while not is_so() and not self._is_off:
            self._begin_what_has_come()
            if time.monotonic() > until:
                self._part("ranks wait for each other in different places")
            times += 1
            if times < YIELDS:
                os.sched_yield()
            else:
                time.sleep(PAUSE_S)

    def _part(self, why: str) -> None:
        """Parted, but in a step that is known to end: all goes on there as ever."""
        if not self._as_it_is:
            raise Parted(why)
        self.turn_off()

    @property
    def is_off(self) -> bool:
        return self._is_off

    def turn_off(self) -> None:
        """From now on all goes on as ever."""
        self._is_off = True
        self._begin(self._later)

    def come_to(self, later: _Later) -> None:
        """Wait until what two ranks send each other is begun."""
        self._wait(lambda: self.is_begun(later))

    def is_begun(self, later: _Later) -> bool:
        """Begins it where both have come. Parted where the other one never will."""
        ended = self._board.has_ended(later.peer)
        self._begin_what_has_come()
        if later.work is None and later.own in self._unfit:
            self._part(f"more is sent than ranks {self._rank} and {later.peer} take")
        elif later.work is None and ended:
            self._part(f"rank {later.peer} does not come to {later.call.op}")
        return later.work is not None

    def _begin_what_has_come(self) -> None:
        # Of one way once: Gloo takes them in the order in which they are begun.
        ways = {(one.peer, one.theirs) for one in self._later}
        times = {way: self._board.seen(*way)[0] for way in ways}
        come = [one for one in self._later if times[one.peer, one.theirs] >= one.number]
        self._unfit.update(one.own for one in come if not self._fits(one))
        self._begin([one for one in come if one.own not in self._unfit])

    def _fits(self, one: _Later) -> bool:
        """Gloo ends a process that is sent more than it takes. Of what the other one has long left
        behind nothing is known."""
        number, told = self._board.seen(one.peer, _of_its_size(one.theirs, one.number))
        size = told & ((1 << OF_WHAT) - 1)
        sent, taken = (one.size, size) if one.call.op == "send" else (size, one.size)
        return number != one.number or sent <= taken

    def _begin(self, several: Sequence[_Later]) -> None:
        for one in [*several]:
            self._later.remove(one)
            self._begun.append(one)
            with self._by_memory(one):
                one.work = self._carry_out(one.call)

    def _by_memory(self, one: _Later) -> contextlib.AbstractContextManager[None]:
        """Where what is sent was put there, both see it so, also where one goes on as ever."""
        number, told = one.number, one.part << OF_WHAT
        if one.call.op == "recv" and number <= MOST_BY_MEMORY:
            number, told = self._board.seen(one.peer, _of_its_size(one.theirs, number))
        if self._exchange is None or number != one.number or not told >> OF_WHAT:
            return contextlib.nullcontext()
        taken = (one.peer, told >> OF_WHAT, told & ((1 << OF_WHAT) - 1))
        below = SentByMemory(self._exchange, taken if one.call.op == "recv" else None)
        return one.call.group.carried_out_by(below)


class _Later(dist.Work):
    """What goes one way between two ranks, begun when both have come to it. own, theirs: the keys
    of those who come; number: which of its kind it is; size: in bytes; part: where what is sent was
    put, 0 for nowhere."""

    def __init__(self, rendezvous: Rendezvous, call: Call, rank: int) -> None:
        super().__init__()
        self._rendezvous, self.call = rendezvous, call
        self.peer = int(call.event["peer"])
        sends = call.op == "send"
        way = (
            (rank, self.peer) if sends else (self.peer, rank),
            call.event["tag"],
            call.event["pg"],
        )
        sent, received = number_of("send", way), number_of("recv", way)
        self.own, self.theirs = (sent, received) if sends else (received, sent)
        self.size = sum(t.numel() * t.element_size() for t in tensors_in(call.args[:1]))
        self.number, self.part = rendezvous.come_with(self.own, self.size, call)
        self.work: Any = None

    def _there(self) -> Any:
        if self.work is None:
            self._rendezvous.come_to(self)
        return self.work

    def wait(self, *args: Any) -> bool:
        return bool(self._there().wait(*args))

    def is_completed(self) -> bool:
        return self._rendezvous.is_begun(self) and bool(self.work.is_completed())

    def is_success(self) -> bool:
        return bool(self._there().is_success())

    def exception(self) -> Any:
        return self._there().exception()

    def result(self) -> Any:
        return self._there().result()

    def synchronize(self) -> None:
        self._there().synchronize()

    def get_future(self) -> Any:
        return self._there().get_future()


def _of_its_size(key: int, number: int) -> int:
    """The key under which it is told."""
    later = f"one of {SIZES}", number % SIZES
    return number_of("size", key, number if number <= MOST_BY_MEMORY else later)


def _what(call: Call) -> int:
    """What ranks of a group have to have alike."""
    at = ALIKE.get(call.op)
    sizes = [] if at is None else [t.numel() for t in tensors_in(call.args[at : at + 1])]
    dtype = None if at is None else call.event["dtype"]
    return number_of(call.op, call.event.get("reduce"), dtype, sizes)
