"""Lines that only other ranks tell of: what picks or divides by parts, what a stage gives back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

from sumgrad.diagnose.modules.in_code.lines import AtLine, Lines
from sumgrad.diagnose.modules.values.value_states import gradient_of
from sumgrad.diagnose.modules.where.loss_weights import same
from sumgrad.record.computed import Computation, same_value
from torch import Tensor

PICKS = {"argmin", "argmax", "topk", "sort", "argsort", "kthvalue", "multinomial"}
MOST_ASKED = 64  # values of a rank, of which most have one factor
OF_TWO = {"mul", "div"}
NOT_LINEAR = OF_TWO | {
    "rdiv", "pow", "square", "sqrt", "rsqrt", "exp", "log", "log10", "abs",
    "softmax", "log_softmax", "logsumexp", "max", "min", "amax", "amin", "clamp", "sigmoid",
    "tanh", "softplus", "reciprocal",
}  # fmt: skip


def sent_back(lines: Lines, rank: int, to: Sequence[int]) -> Iterator[AtLine]:
    """Against the order, Functions of what other ranks sent that get what is right, and give
    another gradient back, or a multiple of it."""
    mine, states = lines.computed(rank), lines.states
    for place, c in reversed(list(enumerate(mine.computations))):
        if not c.written or c.function_of or lines.is_run_there(c):
            continue
        results = [n for n in c.gives if n in mine.with_graph]
        if not results or any(states.backward(rank, n) != "right" for n in results):
            continue
        factor = states.factor(rank, results[0])
        for i, n in enumerate(c.takes):
            if not isinstance(n, int) or not (n in mine.with_graph or n in mine.arrivals):
                continue
            sender = states.sender(rank, n)
            if sender is None or sender[0] not in to or not _is_all_it_is_for(lines, sender, rank):
                continue
            one = AtLine(rank=rank, mine=c, place=place, at=(i,), back=True)
            state, own = states.backward(rank, n), states.factor(rank, n)
            if state == "wrong":
                yield one
            elif state == "right" and own and factor and not same([own, factor]):
                yield replace(one, times=own / factor)


def _is_all_it_is_for(lines: Lines, sender: tuple[int, int], rank: int) -> bool:
    """Whether nothing but this rank uses what was sent: else each gives a share of its gradient."""
    at, number = sender
    handed_on, value = {number}, lines.computed(at).values[number]
    for c in lines.computed(at).computations:
        if handed_on.isdisjoint(c.uses):
            continue
        if not lines.moves(at, c):
            return False
        handed_on |= {*c.gives}
    others = (lines.computed(r).values for r in lines.states.ranks if r not in (at, rank))
    return not any(same_value(v, value) for values in others for v in values)


def nothing_goes_back(
    lines: Lines, rank: int, asked: Callable[[Computation], bool]
) -> Iterator[AtLine]:
    """Those that take what another rank made, of which autograd knows nothing here, beside what it
    does know; where that rank's value gets another gradient than in the single process."""
    mine, states = lines.computed(rank), lines.states
    for place, c in enumerate(mine.computations):
        if not asked(c) or c.function_of or c.written or mine.with_graph.isdisjoint(c.gives):
            continue  # the backward of a Function may send it back
        for i, n in enumerate(c.takes):
            if not isinstance(n, int) or n in mine.with_graph or n in mine.arrivals:
                continue
            if gradient_of(mine, n) is not None or not mine.values[n].is_floating_point():
                continue
            sender = states.sender(rank, n)
            if sender is None or _is_detached_there(lines, mine.values[n]):
                continue
            if not _lacks_gradient(lines, *sender):
                continue
            made = lines.ways(sender[0]).gives[sender[1]]
            its = lines.computed(sender[0]).computations[made[0]]
            yield AtLine(rank=rank, mine=c, place=place, at=(i,), sender=(sender[0], its))


def _is_detached_there(lines: Lines, value: Tensor) -> bool:
    """Whether the single process has the same numbers without a graph, too."""
    held = [n for n in lines.states.there.holding(value) if n < len(lines.single.values)]
    whole = [n for n in held if lines.single.values[n].shape == value.shape] or held
    return any(n not in lines.single.with_graph for n in whole)


def _lacks_gradient(lines: Lines, rank: int, number: int) -> bool:
    """Whether it is wrong, or has another factor than most of what the rank computes."""
    state, factor = lines.states.backward(rank, number), lines.states.factor(rank, number)
    if state != "right" or factor is None:
        return state == "wrong"
    factors = list(islice(_factors(lines, rank), MOST_ASKED))
    usual = max(factors, key=lambda f: sum(same([f, other]) for other in factors), default=factor)
    return not same([usual, factor])


def _factors(lines: Lines, rank: int) -> Iterator[float]:
    for c in lines.computed(rank).computations:
        for n in (n for n in c.gives if lines.is_run_there(c) and not c.function_of):
            if lines.states.backward(rank, n) == "right" and (f := lines.states.factor(rank, n)):
                yield f


def picks_by_parts(
    lines: Lines, rank: int, asked: Callable[[Computation], bool]
) -> Iterator[AtLine]:
    """Those that pick by what is a part on each rank, where only the sum tells which, and of whose
    picks something with a gradient is made."""
    for place, c in enumerate(lines.computed(rank).computations):
        if not asked(c) or c.function not in PICKS or not c.takes or c.function_of:
            continue
        number = c.takes[0]
        if not isinstance(number, int) or lines.states.forward(rank, number) != "part":
            continue
        if _counts(lines, rank, c):
            yield AtLine(rank=rank, mine=c, place=place, parts=True, picks=True)


def _counts(lines: Lines, rank: int, c: Computation) -> bool:
    mine, picks = lines.computed(rank), {*c.gives, *lines.after(rank, c.gives)}
    return any(
        not picks.isdisjoint(t for t in then.takes if isinstance(t, int))
        and not mine.with_graph.isdisjoint(then.gives)
        for then in mine.computations
    )


def only_of_parts(lines: Lines, one: AtLine) -> bool:
    """Whether no sum over ranks makes it right: a quotient of parts, a power of one."""
    takes = [t for t in one.mine.takes if isinstance(t, int)]
    if one.mine.function in OF_TWO and len(takes) < 2:
        return False  # with a number
    parts = all(lines.states.forward(one.rank, t) == "part" for t in takes)
    return parts and not one.again and one.mine.function in NOT_LINEAR
