"""Words for modules, for vectors of a tensor, and for what a rank issues between two modules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

from sumgrad.base.outcome import some_of, spans
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.looked import looked, named, ordinal
from sumgrad.diagnose.modules.values.matching import MAX_VECTORS
from sumgrad.diagnose.modules.values.seen import Seen
from sumgrad.diagnose.modules.where.first_wrong import FirstWrong
from sumgrad.diagnose.modules.where.look import Look

MAX_OPERATIONS = 4
SUMS = ("allreduce", "reduce_scatter", "_reduce_scatter")  # how they begin, in words


def listed(look: Look, modules: Sequence[str]) -> str:
    """Modules by name, class and line, the nearest first; of one inside another the inner."""
    inner = [m for m in modules if not any(is_in(other, m) for other in modules)]
    return some_of([named(look, m) for m in reversed(inner)])


def right_up_to(look: Look, found: FirstWrong) -> str:
    """What is known of the modules beside what goes wrong in the forward, in words; nothing where
    what they give may stand in another order."""
    told, near = found.modules, listed(look, found.modules)
    seen = [s for m in told for s in look.seen[m] if s.rank in found.ranks]
    if not told or not all(s.in_order for s in seen if s.forward == "right"):
        return ""
    before = look.modules[: look.modules.index(found.wrong)]
    known = ", where a gradient reaches it" if any(map(is_told_in_part, seen)) else ""
    if any(look.forward(m) == "wrong" for m in before):
        return f"in the forward what {near} gives is right{known}"
    return f"the forward is right up to {near}{known}"


def is_told_in_part(s: Seen) -> bool:
    """Whether some of its vectors, which do not count in the loss, may be others."""
    return s.where is not None and len(s.where.picked) < min(_vectors(s), MAX_VECTORS)


def is_in(module: str, outer: str) -> bool:
    return module != outer and (not outer or module.startswith(f"{outer}."))


def places(seen: Sequence[Seen]) -> str:
    """Which vectors of a tensor are not right in the call that is told of, in words."""
    s = told_of(seen)
    if s.wrong is None or not s.shape:
        return "all of it"
    total, one = _vectors(s), "for one, " if len(seen) > 1 else ""
    where = f"on rank {s.rank} in call {s.call.number}"
    if any(x.call.part != s.call.part for x in seen):
        where += f", {ordinal(s.call.part)} output"
    if len(s.wrong) >= total:
        return f"{one}all its {total} vectors, some elements or all, {where}"
    where += f" ({' x '.join(map(str, s.shape))})"
    if s.forward == "wrong" and s.told_by is None:
        # Of others nothing is told; and what is found elsewhere may be wrong where it stands.
        reached = "of those that a gradient reaches " if s.call.operation_back is not None else ""
        one += f"{reached}at least "
    if len(s.shape) >= 3:
        last = s.shape[-2]
        positions = sorted({int(i) % last for i in s.wrong})
        if len(positions) < last and len(s.wrong) == len(positions) * (total // last):
            return f"{one}positions {spans(positions)} of {last} {where}"
    return f"{one}vectors {spans([int(i) for i in s.wrong])} of {total} {where}"


def told_of(seen: Sequence[Seen]) -> Seen:
    """The call that stands for all: the first where some vectors are wrong and not all, which tells
    more, else the first; of gradients not one that none reaches, if others are reached."""
    reached = [s for s in seen if s.forward == "wrong" or s.call.operation_back is not None]
    some = (s for s in reached or seen if s.wrong is not None and len(s.wrong) < _vectors(s))
    return next(some, (reached or seen)[0])


def _vectors(s: Seen) -> int:
    return math.prod(s.shape[:-1])


def between(case: Case, found: FirstWrong, *, back: bool, only_some: bool = False) -> list[str]:
    """The collectives that the first wrong rank issues in between, in words. only_some: nothing
    where there are none."""
    s, traces = found.seen[0], case.traces
    if traces is not None and not found.modules:
        every = traces.ranks[s.rank].operations if back else ()
        return _since_the_forward(s, [without_place(case, w) for w in every])
    issued = issued_between(case, found, back=back)
    if issued is None:
        return []
    if not issued and only_some:
        return []
    if not issued:
        # Autograd may have run what stands in between before the first of them, or after the last.
        way = (
            "on the way back, by the clock," if back else "in the forward, once all of it is there,"
        )
        return [f"{way} rank {s.rank} issues no collective in between"]
    alike = [(w, len([*same])) for w, same in groupby(without_place(case, w) for w in issued)]
    shown = [w + (f" ({n} times)" if n > 1 else "") for w, n in alike[:MAX_OPERATIONS]]
    left = sum(n for _, n in alike[MAX_OPERATIONS:])
    more = f" and {left} more" if left else ""
    return [f"{_since(case, found, back=back)} rank {s.rank} issues {'; '.join(shown)}{more}"]


def _since(case: Case, found: FirstWrong, *, back: bool) -> str:
    """`in between`; or since which module, where some of what is issued comes before the last."""
    look, s = looked(case), found.seen[0]
    times = _times_beside(look, found, s.rank, back=back) if look is not None else {}
    end = s.call.operation_back if back else s.call.operation
    if end is None or len({*times.values()}) < 2:
        return "in between"
    first = min(times, key=lambda m: times[m])
    return f"since {'the gradient that reaches ' * back}what {first or 'the model'} gives,"


def without_place(case: Case, operation: str) -> str:
    """Without the tier and the step, which are those of the case."""
    return operation.replace(f" [{case.tier}/{case.step}/step]", "")


def issued_between(case: Case, found: FirstWrong, *, back: bool) -> tuple[str, ...] | None:
    """The collectives that the first wrong rank issues between the modules beside and the wrong
    one; None where that is not known."""
    rank, traces = found.seen[0].rank, case.traces
    between = range_between(case, found, rank, back=back)
    if traces is None or between is None:
        return None
    return tuple(traces.ranks[rank].operations[between.start : between.stop])


def range_between(case: Case, found: FirstWrong, rank: int, *, back: bool) -> range | None:
    """The numbers of a rank's operations between the modules beside and the wrong one, of its first
    wrong call; None where that is not known."""
    look = looked(case)
    if look is None or not found.modules:
        return None
    s = next(s for s in found.seen if s.rank == rank)
    known = _times_beside(look, found, rank, back=back)
    b = s.call.operation_back if back else s.call.operation
    if not known or len(known) < len(found.modules) or b is None or b < min(known.values()):
        return None
    return range(min(known.values()), b)


def _times_beside(look: Look, found: FirstWrong, rank: int, *, back: bool) -> dict[str, int]:
    """By module beside, how many operations a rank had issued by the call that belongs to its first
    wrong one, of several outputs by the first."""
    number = next((s.call.number for s in found.seen if s.rank == rank), None)
    calls = {m: [x.call for x in look.seen[m] if x.rank == rank and x.call.number == number]
             for m in found.modules}  # fmt: skip
    times = {m: [c.operation_back if back else c.operation for c in own]
             for m, own in calls.items()}  # fmt: skip
    known = {m: [time for time in own if time is not None] for m, own in times.items()}
    return {m: min(own) for m, own in known.items() if own}


def _since_the_forward(s: Seen, operations: Sequence[str]) -> list[str]:
    a, b = s.call.operation, s.call.operation_back
    issued = list(dict.fromkeys(operations[a:b]))
    if b is None or not issued:
        return []
    shown = "; ".join(issued[:MAX_OPERATIONS])
    return [f"between that output and its gradient rank {s.rank} issues {shown}"]
