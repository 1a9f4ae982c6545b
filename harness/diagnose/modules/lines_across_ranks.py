"""Lines that only other ranks tell of: what picks or divides by parts, what a stage gives back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from sumgrad.diagnose.modules.lines import AtLine, Lines
from sumgrad.diagnose.modules.loss_weights import same
from sumgrad.record.computed import Computation, same_value

PICKS = {"argmin", "argmax", "topk", "sort", "argsort", "kthvalue", "multinomial"}
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
