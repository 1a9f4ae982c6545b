"""The line where what is right becomes what the single process has nowhere, or its gradient does.

What a rank's lines take and give is looked for among all that the single process has, by value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import torch
from sumgrad.diagnose.modules.in_code.followed import Ways, followed, ways_of
from sumgrad.diagnose.modules.values.parts import Groups
from sumgrad.diagnose.modules.values.seen import State
from sumgrad.diagnose.modules.values.value_states import ValueStates, gradient_of
from sumgrad.diagnose.modules.where.loss_weights import same
from sumgrad.record.computed import LARGE, MODULE, Computation, Computed, same_value
from sumgrad.record.trace import Traces
from torch import Tensor

PRODUCTS = {"matmul", "mm", "bmm"}
NEAR = 32  # values that one is made of, among which it is looked for
SAMPLE = 8  # numbers of it, that are looked for first
# Formulas that use what was kept for the backward, which may have been changed meanwhile: what only
# passes a gradient on, as an addition, gives none that is wrong.
ONE_BY_ONE = {
    "mul", "div", "rdiv", "exp", "log", "sin", "cos", "tanh", "pow", "sigmoid", "relu", "gelu",
    "silu", "softplus", "elu", "leaky_relu", "square", "sqrt", "abs", "clamp", "dropout",
    "layer_norm", "rms_norm", "normalize", "softmax", "log_softmax",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AtLine:
    """A rank's computation, number `place`, that gives what the single process has nowhere, and
    takes only what it has. at: of its arguments, by number: in the backward those that get what is
    wrong, where its results get what is right; in the forward one that no line gives and that the
    single process has nowhere. back: it is told of the backward. cut: its results have no gradient,
    where there they have one; kept: they have one, where there they have none. told: whether all
    that it takes is known to be right, number by number; whole: vector by vector. parts: what it
    takes is right only as a sum over ranks. there: whether the single process runs it, too. again:
    something right is made of what it gives. beside: Functions that take the same and get what is
    right, in the backward. then: of a line that the single process does not run, what it does not
    run either and is wrong because of it. times: what an argument gets is this multiple of what is
    right. picks: it picks by parts. untold: others that take the same, whose results may have what
    is wrong. sender: the other rank that made an argument of which autograd knows nothing here, and
    what made it there.
    """

    rank: int
    mine: Computation
    place: int
    at: tuple[int, ...] = ()
    back: bool = False
    cut: bool = False
    kept: bool = False
    told: bool = True
    whole: bool = False
    parts: bool = False
    there: bool = True
    again: bool = False
    beside: tuple[Computation, ...] = ()
    then: tuple[Computation, ...] = ()
    times: float | None = None
    picks: bool = False
    untold: tuple[Computation, ...] = ()
    sender: tuple[int, Computation] | None = None


class Lines:
    """What every rank's lines computed, beside the single process's. groups: as in ValueStates."""

    def __init__(self, traces: Traces, groups: Groups, tolerance: float) -> None:
        self.states = ValueStates(traces, groups, tolerance)
        self._ranks = {rank: trace.computed for rank, trace in traces.ranks.items()}
        self.single = traces.single.computed
        self._sites = {c.site for c in self.single.computations}
        # Inside of a Function, as in the first pass of a checkpoint, nothing has a graph by right.
        self._in_functions = {n for c in self.single.computations if c.function_of for n in c.gives}
        self._ways = {rank: ways_of(computed) for rank, computed in self._ranks.items()}

    def computed(self, rank: int) -> Computed:
        return self._ranks[rank]

    def ways(self, rank: int) -> Ways:
        return self._ways[rank]

    def is_run_there(self, c: Computation) -> bool:
        """Whether the single process runs it, too."""
        return c.site in self._sites

    def first_forward(self, rank: int, asked: Callable[[Computation], bool]) -> Iterator[AtLine]:
        """Of the computations that are asked for, those that give something else than the single
        process has, of what it has, or of parts of that."""
        outside: set[int] = set()
        turned: set[int | str] = set()  # what is there with the other sign
        for place, c in enumerate(self._ranks[rank].computations):
            if not asked(c) or c.function.startswith(MODULE) or "empty" in c.function:
                continue
            takes = ["untold" if t in turned else self._taken(rank, t) for t in c.takes]
            if "wrong" not in (self.states.forward(rank, n) for n in c.gives):
                continue
            at = tuple(i for i, state in enumerate(takes) if state == "wrong")
            known = {c.takes[i] for i in at} & self._ways[rank].gives.keys()
            if not known <= outside:
                continue
            if not at and self._turns_the_sign(rank, c):
                turned.update(c.gives)
                continue
            if self.moves(rank, c):
                outside.update(c.gives)  # what comes from outside is so in another place, too
                continue
            if c.written and self._takes_wrong_elsewhere(c, rank):
                continue  # a collective in it hands on what is wrong there
            if c.site not in self._sites and not self._has_a_gradient(rank, c):
                continue  # as of a norm that is written down
            if self._is_a_part_of_a_product(rank, c):
                continue  # as of a rank's own keys: what goes into it is told by what it takes
            yield AtLine(
                rank=rank,
                mine=c,
                place=place,
                at=at,
                told=all(self._is_told(rank, t) for t in c.takes),
                whole=all(self._is_whole(rank, t) for t in c.takes),
                parts="part" in takes,
                there=c.site in self._sites,
                again=self._is_right_again(rank, c),
                then=() if c.site in self._sites else tuple(self._then(rank, c, asked)),
            )

    def _taken(self, rank: int, taken: int | str) -> State:
        """Of an argument; not wrong where it is there with the other sign, as what comes from a
        neighbour."""
        state = self.states.forward(rank, taken) if isinstance(taken, int) else "untold"
        if state == "wrong" and isinstance(taken, int):
            return "untold" if self.states.is_there_negative(rank, taken) else state
        return state

    def first_backward(self, rank: int, asked: Callable[[Computation], bool]) -> Iterator[AtLine]:
        """Against the order, those whose results get what is right, and an argument does not.

        Torch's formulas only where each number is made of its own: what is shared, as a matrix or
        keys, has a part of its gradient from a part of the rows.
        """
        mine, right = self._ranks[rank], _right_derivatives(self._ranks[rank])
        for place, c in reversed(list(enumerate(mine.computations))):
            if not asked(c) or c.function.startswith(MODULE) or c.function_of:
                continue
            reached = [self._reached(rank, c, n) for n in c.gives if n in mine.with_graph]
            if not reached or {*reached} != {"right"}:
                continue
            shapes = {mine.values[n].shape for n in c.gives}
            at = tuple(
                i
                for i, n in enumerate(c.takes)
                if isinstance(n, int)
                and n in mine.with_graph
                and (c.line, i) not in right
                and (
                    c.written
                    or (
                        c.function in ONE_BY_ONE
                        and {mine.values[n].shape} == shapes
                        and not self._is_a_piece(rank, n)
                    )
                )
                and self.states.backward(rank, n) == "wrong"
                and self._is_first(rank, n, sure=not c.written)
            )
            if at:
                taken = [n for i in at if isinstance(n := c.takes[i], int)]
                others = dict.fromkeys(
                    other
                    for n in taken
                    for p in self._ways[rank].takes.get(n, ())
                    if (other := mine.computations[p]).written and p != place
                )
                if c.written or not others:  # else one of those that have a backward of their own
                    untold = tuple(self._untold_beside(rank, c, taken))
                    yield AtLine(
                        rank=rank,
                        mine=c,
                        place=place,
                        at=at,
                        back=True,
                        beside=tuple(others),
                        untold=untold,
                    )

    def _untold_beside(
        self, rank: int, c: Computation, taken: Sequence[int]
    ) -> Iterator[Computation]:
        """What else takes these, and may have a gradient that is not known to be right."""
        mine, ways = self._ranks[rank], self._ways[rank]
        for place in sorted({p for n in taken for p in ways.takes.get(n, ())}):
            other = mine.computations[place]
            if other is c or other.function_of or other.written:
                continue
            own = [n for n in other.gives if n in mine.with_graph]
            if any(self.states.backward(rank, n) != "right" for n in own):
                yield other

    def into_the_loss(self, rank: int, asked: Callable[[Computation], bool]) -> Iterator[AtLine]:
        """Against the order, those that take what is right and gets what is not, where what they
        give is nothing that the single process has: what a loss is made of."""
        mine = self._ranks[rank]
        for place, c in reversed(list(enumerate(mine.computations))):
            if not asked(c) or c.function.startswith(MODULE) or c.function_of or not c.gives:
                continue
            if any(
                self.states.forward(rank, n) == "right" or n not in mine.with_graph for n in c.gives
            ):
                continue
            at = tuple(
                i
                for i, n in enumerate(c.takes)
                if isinstance(n, int)
                and n in mine.with_graph
                and self.states.forward(rank, n) == "right"
                and self.states.backward(rank, n) == "wrong"
            )
            if at:
                yield AtLine(rank=rank, mine=c, place=place, at=at, back=True)

    def cuts(self, rank: int, asked: Callable[[Computation], bool]) -> Iterator[AtLine]:
        """Those whose results autograd does not know, as it knows what they take, where the single
        process has a gradient of the same numbers."""
        mine = self._ranks[rank]
        for place, c in enumerate(mine.computations):
            known = any(isinstance(t, int) and t in mine.with_graph for t in c.takes)
            if not asked(c) or not known or c.function.startswith(MODULE) or c.function_of:
                continue
            if not c.gives or not all(self._is_cut(rank, n) for n in c.gives):
                continue
            if self._is_cut_there_too(rank, c):
                continue
            if any(n in mine.with_graph for n in self.after(rank, c.gives)):  # else it is sent
                yield AtLine(rank=rank, mine=c, place=place, back=True, cut=True)

    def kept(self, rank: int, asked: Callable[[Computation], bool]) -> Iterator[AtLine]:
        """Those whose results get a gradient, where autograd knows nothing of the same numbers in
        the single process; not what only has the numbers of data, as a product with ones."""
        mine = self._ranks[rank]
        for place, c in enumerate(mine.computations):
            if not asked(c) or c.function.startswith(MODULE) or c.function_of or not c.gives:
                continue
            if all(self._is_kept(rank, n) for n in c.gives) and not self._has_those_of_data(
                rank, c
            ):
                yield AtLine(rank=rank, mine=c, place=place, back=True, kept=True)

    def _has_those_of_data(self, rank: int, c: Computation) -> bool:
        """Whether all that it gives is in something near that it is made of, of which autograd
        knows nothing. Not of a Function, which may hand one thing on with the gradient of another.
        """
        mine = self._ranks[rank]
        if c.written:
            return False
        given = torch.cat([mine.values[n].reshape(-1).double() for n in c.gives])
        for n in islice(self._before(rank, c.gives), NEAR):
            data = mine.values[n].double()
            if n in mine.with_graph or not bool(torch.isin(given[:SAMPLE], data).all()):
                continue
            if bool(torch.isin(given, data).all()):
                return True
        return False

    def _is_kept(self, rank: int, number: int) -> bool:
        mine = self._ranks[rank]
        got = gradient_of(mine, number) if number in mine.with_graph else None
        if got is None or not bool(got.any()):
            return False
        held = self.states.there.holding(mine.values[number])
        with_graph, inside = self.single.with_graph, self._in_functions
        return bool(held) and not any(
            n >= len(self.single.values) or n in with_graph or n in inside for n in held
        )

    def _is_told(self, rank: int, taken: int | str) -> bool:
        """Whether it is known to be the single process's, or has no numbers with digits."""
        if not isinstance(taken, int):
            return not taken.startswith(LARGE)
        value = self._ranks[rank].values[taken]
        return not value.is_floating_point() or self.states.forward(rank, taken) == "right"

    def _is_whole(self, rank: int, taken: int | str) -> bool:
        """Whether each vector of it is one of one value of the single process."""
        if not isinstance(taken, int):
            return not taken.startswith(LARGE)
        value = self._ranks[rank].values[taken]
        return not value.is_floating_point() or self.states.has_its_vectors(value)

    def _is_a_piece(self, rank: int, number: int) -> bool:
        """Whether it is a view or an index of another value, which may get a gradient elsewhere."""
        mine = self._ranks[rank].computations
        return any(self.moves(rank, mine[p]) for p in self._ways[rank].gives.get(number, ()))

    def moves(self, rank: int, c: Computation) -> bool:
        """Whether all that it gives is among what it takes, as of a view or an index."""
        given, taken = self._given_and_taken(rank, c)
        return bool(torch.isin(given, taken).all())

    def _turns_the_sign(self, rank: int, c: Computation) -> bool:
        """Whether it gives what it takes, and some of it with the other sign."""
        given, taken = self._given_and_taken(rank, c)
        return bool(torch.isin(given.abs(), taken.abs()).all())

    def _given_and_taken(self, rank: int, c: Computation) -> tuple[Tensor, Tensor]:
        values = self._ranks[rank].values
        taken = [values[t].reshape(-1).double() for t in c.takes if isinstance(t, int)]
        given = [values[n].reshape(-1).double() for n in c.gives]
        return torch.cat(given), torch.cat(taken)

    def _takes_wrong_elsewhere(self, c: Computation, rank: int) -> bool:
        """Whether the same call of another rank takes what is wrong already."""
        for other, number in self.states.same_call(rank, c.gives[0]) if c.gives else ():
            for at in self._ways[other].gives.get(number, ()):
                takes = self._ranks[other].computations[at].takes
                if any(
                    isinstance(t, int) and self.states.forward(other, t) == "wrong" for t in takes
                ):
                    return True
        return False

    def _is_right_again(self, rank: int, c: Computation) -> bool:
        """Whether something right is made of what it gives, and not only beside what is wrong."""
        mine, ways = self._ranks[rank], self._ways[rank]
        for n in self.after(rank, c.gives):
            if self.states.forward(rank, n) == "right" and all(
                self.states.forward(rank, beside) != "wrong"
                for place in ways.gives.get(n, ())
                for beside in mine.computations[place].gives
            ):
                return True
        return False

    def _reached(self, rank: int, c: Computation, number: int) -> State:
        """What reaches a result of it; where that is one number, only a factor may be wrong."""
        if c.written and self._ranks[rank].values[number].numel() == 1:
            return "right" if gradient_of(self._ranks[rank], number) is not None else "untold"
        return self.states.backward(rank, number)

    def _is_first(self, rank: int, number: int, *, sure: bool) -> bool:
        """Whether all else that a value goes into gets what is right, and nothing right is met
        further down. sure: that of all of it this is known: torch's own formulas are right, and
        what comes from something else, as a part that is summed later, may not be."""
        mine, ways = self._ranks[rank], self._ways[rank]
        factors = []
        for place in ways.takes.get(number, ()):
            c = mine.computations[place]
            for n in c.gives if not c.function_of else ():
                if n not in mine.with_graph:
                    continue
                state = self.states.backward(rank, n)
                if state in ("wrong", "part") or (sure and state != "right"):
                    return False
                factors.append(self.states.factor(rank, n))
        told = [f for f in factors if f is not None]
        if told and not same(told):
            return False  # right each by itself, and no sum of them
        before = (n for n in self._before(rank, [number]) if n in mine.with_graph)
        return not any(self.states.backward(rank, n) == "right" for n in before)

    def _is_cut(self, rank: int, number: int) -> bool:
        mine, value = self._ranks[rank], self._ranks[rank].values[number]
        if number in mine.with_graph or not value.is_floating_point():
            return False
        held = self.states.alike(value)
        if any(same_value(mine.values[n], value) for n in mine.arrivals if n > number):
            return False  # a leaf from here on, whose gradient a step hands on itself
        return bool(held) and all(
            n in self.single.with_graph and gradient_of(self.single, n) is not None for n in held
        )

    def _is_cut_there_too(self, rank: int, c: Computation) -> bool:
        """Whether the single process does the same with some of these numbers, or with more, and
        makes something of it that has a graph, as a choice of rows: not only what is written down.
        """
        own = self._ranks[rank].values[c.gives[0]].reshape(-1).double()
        for place in self._cut_there.get(c.function, ()):
            w = self.single.computations[place]
            there = self.single.values[w.gives[0]].reshape(-1).double()
            some = bool(torch.isin(there, own).all()) or bool(torch.isin(own, there).all())
            if some and self._leads_to_a_graph(place):
                return True
        return False

    @cached_property
    def _cut_there(self) -> dict[str, list[int]]:
        """By function, the single process's calls of which autograd knows what they take alone."""
        found: dict[str, list[int]] = {}
        known = self.single.with_graph
        for place, w in enumerate(self.single.computations):
            takes = any(isinstance(t, int) and t in known for t in w.takes)
            if takes and w.gives and not w.function_of and known.isdisjoint(w.gives):
                found.setdefault(w.function, []).append(place)
        return found

    def _leads_to_a_graph(self, place: int) -> bool:
        """Whether anything that has one takes what that gives, were it as an index."""
        reached = {*self.single.computations[place].gives}
        for w in self.single.computations[place + 1 :]:
            if any(isinstance(t, int) and t in reached for t in w.takes):
                if not self.single.with_graph.isdisjoint(w.gives):
                    return True
                reached |= {*w.gives}
        return False

    def _has_a_gradient(self, rank: int, c: Computation) -> bool:
        """Whether what a computation gives, or something that is made of it, gets one."""
        known = {n for own in self._ranks[rank].gradients for n in own}
        return any(n in known for n in (*c.gives, *self.after(rank, c.gives)))

    def _is_a_part_of_a_product(self, rank: int, c: Computation) -> bool:
        """Whether it sums over fewer numbers than that line does in the single process, each time
        that it runs there."""
        own = _summed_over(c, self._ranks[rank])
        there = {_summed_over(w, self.single) for w in self.single.computations
                 if (w.site, w.function) == (c.site, c.function)}  # fmt: skip
        return own is not None and bool(there) and all(n is not None and n > own for n in there)

    def _then(
        self, rank: int, c: Computation, asked: Callable[[Computation], bool]
    ) -> Iterator[Computation]:
        mine, ways = self._ranks[rank], self._ways[rank]
        reached = {*c.gives, *self.after(rank, c.gives)}
        for place in sorted({p for n in reached for p in ways.takes.get(n, ())}):
            then = mine.computations[place]
            wrong = "wrong" in (self.states.forward(rank, n) for n in then.gives)
            if wrong and then.site not in self._sites and then.line and asked(then):
                yield then

    def after(self, rank: int, numbers: Sequence[int]) -> Iterator[int]:
        mine, ways = self._ranks[rank], self._ways[rank]
        return followed(numbers, ways.takes, lambda place: mine.computations[place].gives)

    def _before(self, rank: int, numbers: Sequence[int]) -> Iterator[int]:
        mine, ways = self._ranks[rank], self._ways[rank]
        return followed(numbers, ways.gives, lambda place: mine.computations[place].uses)


def _summed_over(c: Computation, computed: Computed) -> int | None:
    """Over how many numbers a product of matrices sums; None of anything else."""
    if c.function not in PRODUCTS or len(c.uses) != 2:
        return None
    first, second = (computed.values[n].shape for n in c.uses)
    return first[-1] if len(first) > 1 and len(second) > 1 else None


def _right_derivatives(computed: Computed) -> set[tuple[str, int]]:
    """Lines that call a Function, each with an argument of which its backward gives the derivative,
    by finite differences, in all calls that were looked at: what is wrong there is wrong before."""
    told = [((one.line[0], one.at), one.agrees) for one in computed.derivatives]
    return {where for where, agrees in told if agrees} - {
        where for where, agrees in told if not agrees
    }
