"""Which argument of a line on ranks alone would have to be another, and how, in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from sumgrad.base.outcome import spans
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.in_code.lines import (
    asked_between,
    expression,
    known_lines,
)
from sumgrad.diagnose.explainers.by_modules.in_code.run_between import made_in_words
from sumgrad.diagnose.explainers.by_modules.looked import (
    as_a_hint,
    fraction_of,
    line_and_code,
    ordinal,
)
from sumgrad.diagnose.modules.wanted.how_apart import ENOUGH
from sumgrad.diagnose.modules.wanted.keys_needed import KeysNeeded
from sumgrad.diagnose.modules.wanted.solved_back import Solved, SolvedBack
from sumgrad.diagnose.modules.where.first_wrong import FirstWrong
from sumgrad.record.computed import MODULE, Computation

MOST_FACTORS = 6
KINDS = ("there", "order", "zeros", "inverse", "offset", "factors", "factor", "keys", "way",
         "ranks")  # fmt: skip  # those that tell more are behind


@as_a_hint
def solved_in_words(case: Case, found: FirstWrong) -> list[str]:
    """What the wrong ranks have in common, of the first argument of all that tells most."""
    return _of_all_ranks(case, lambda back, rank: back.solved(
        rank, asked_between(case, found, rank, back=False, beyond=1)), found.ranks)  # fmt: skip


@as_a_hint
def solved_from_gradients(case: Case) -> list[str]:
    """The same of what ranks multiply by, where gradients are wrong because of it."""
    ranks = () if case.traces is None else tuple(case.traces.ranks)
    return _of_all_ranks(case, SolvedBack.solved_gradients, ranks)


def _of_all_ranks(
    case: Case, solve: Callable[[SolvedBack, int], list[Solved]], ranks: Sequence[int]
) -> list[str]:
    try:
        told = _solved(case, solve, ranks)
    except (TypeError, ArithmeticError):  # functions are called as nobody of the user's did
        return []
    if not told:
        return []
    alike: dict[str, list[int]] = {}
    for o in told:
        alike.setdefault(_what(case, o), []).append(o.rank)
    (what, ranks), *others = alike.items()
    also = [rank for _, more in others for rank in more]
    so = f", and with other numbers on rank {spans(sorted(also))}" if also else ""
    spare = told[0].need.spare if told[0].at >= 0 else 0
    agree = f" ({spare} more numbers agree than it takes to solve for that)" if spare else ""
    return [
        f"{expression(told[0].mine)}: {what} on rank {spans(sorted(ranks))}{so}{agree}",
        *_made(case, told[0]),
    ]


def _made(case: Case, one: Solved) -> list[str]:
    """How what would have to be another is made, where one argument is."""
    number = one.mine.takes[one.at] if one.at >= 0 else ""
    return made_in_words(case, one.rank, number) if isinstance(number, int) else []


def _what(case: Case, one: Solved) -> str:
    """Under which condition what would be right."""
    part = f"{'' if one.alone else 'its part of '}{_end(one)} would be right"
    if one.how.kind == "way":
        return f"were its `{one.mine.function}` {one.how.way}, {part}"
    if one.how.kind == "order" and not one.need.spare and _takes_several(one):
        return (f"the {_argument(one)} and what else it takes do not belong together: beside that, "
                f"the same numbers in another order would be right for {_end(one)}")  # fmt: skip
    if one.how.keys is not None:
        return f"were its `{one.mine.function}` {_over(one.how.keys)}, {part}"
    return f"were the {_argument(one)} {_differs(case, one)}, {part}"


def _solved(
    case: Case, solve: Callable[[SolvedBack, int], list[Solved]], ranks: Sequence[int]
) -> list[Solved]:
    lines, traces = known_lines(case), case.traces
    if lines is None or traces is None:
        return []
    back = SolvedBack(traces, lines.states)
    best = []
    for rank in ranks:
        own = solve(back, rank)
        if own:
            best.append(max(enumerate(own), key=lambda at: (*_weight(at[1]), at[0]))[1])
    keyed = [(o.mine.site, o.at, o.how.kind) for o in best]
    return [o for o, key in zip(best, keyed, strict=True) if key == max(keyed, key=keyed.count)]


def _weight(one: Solved) -> tuple[bool, int]:
    """Which of several tells most; of equals the one that is furthest back."""
    return one.need.spare >= ENOUGH or one.how.kind == "ranks", KINDS.index(one.how.kind)


def _takes_several(one: Solved) -> bool:
    return sum(isinstance(t, int) for t in one.mine.takes) > 1


def _argument(one: Solved) -> str:
    if one.mine.function.startswith(MODULE):
        return f"{ordinal(one.at)} argument"
    made, code = one.mine.made_at[one.at]
    where = f", made at {line_and_code(made, code)}," if made and made != one.mine.line else ""
    key = one.mine.key(one.at)
    which = f"argument {key}" if key else f"{ordinal(one.at)} argument"
    return f"{which} of `{one.mine.function}`{where}"


def _end(one: Solved) -> str:
    if one.end.of is not None:
        which = ordinal(one.end.at.takes.index(one.end.of))
        line = line_and_code(one.end.at.line, one.end.at.code)
        return f"the gradient of the {which} argument of {line}"
    name = one.end.at.function.removeprefix(MODULE)
    if name == one.end.at.function:
        name = line_and_code(one.end.at.line, one.end.at.code)
    return f"what goes into {name}" if one.end.enters else f"what {name} gives"


def _differs(case: Case, one: Solved) -> str:
    is_, wanted = one.is_, one.need.value
    some = f" in {one.how.some} of {is_.numel()} elements" if one.how.some else ""
    if one.how.kind == "factor":
        (factor,) = one.how.factors
        text = f"{fraction_of(factor)} times what it is" if abs(factor) > 1e-12 else "zero"
        return f"{text}{some}"
    if one.how.kind == "factors":
        return f"along its dimension {one.how.dim} {', '.join(_each(one.how.factors))}"
    if one.how.kind == "offset":
        (apart,) = one.how.factors
        return f"{fraction_of(abs(apart))} {'more' if apart > 0 else 'less'}{some or ' everywhere'}"
    if one.how.kind == "inverse":
        (number,) = one.how.factors
        return f"{fraction_of(number)} divided by what it is"
    if one.how.kind == "zeros":
        return _zeros(one)
    if one.how.kind == "ranks":
        several = f"the {one.how.way} of what rank {spans(one.how.ranks)} have there"
        return several if one.how.way else f"what rank {one.how.ranks[0]} has there"
    if one.how.kind == "order":
        turned = is_.dim() > 1 and is_.shape == is_.mT.shape and torch.allclose(is_.mT, wanted)
        return "transposed" if turned else "the same numbers in another order"
    return f"{_given_there(case, one.how.there)} in the single process"


def _over(keys: KeysNeeded) -> str:
    """Over which keys a query has to go, the first where that is others, and of how many."""
    at = int(keys.wrong.nonzero()[0])
    which = [int(i) for i in torch.unravel_index(torch.tensor(at), keys.shape)]
    now, needed = (spans(row.nonzero()[:, 0].tolist()) for row in (keys.now[at], keys.needed[at]))
    num, of = int(keys.wrong.sum()), int(keys.told.sum())
    return (f"over other keys in {num} of {of} queries (that at {which}, the first, over {needed} "
            f"and not {now})")  # fmt: skip


def _each(factors: Sequence[float]) -> Iterator[str]:
    """`0.85 times what it is at 0`, indices with one factor together."""
    rows = [(fraction_of(f), i) for i, f in enumerate(factors)]
    together: dict[str, list[int]] = {}
    for text, i in rows:
        together.setdefault(text, []).append(i)
    for text, at in [*together.items()][:MOST_FACTORS]:
        yield f"at {spans(at)} {'what it is' if text == '1' else f'{text} times what it is'}"
    if len(together) > MOST_FACTORS:
        yield f"and others at {len(together) - MOST_FACTORS} more"


def _zeros(one: Solved) -> str:
    """Elements that have to be nothing, or must not be."""
    is_, wanted = one.is_, one.need.value
    known = ~wanted.isnan()
    scale = float(wanted[known & wanted.isfinite()].abs().max())
    off = known & ~torch.isclose(is_, wanted, rtol=1e-6, atol=1e-6 * scale)
    at = off.nonzero()[0].tolist()
    num, first = int(off.sum()), f"at {at}, the first" if is_.dim() else "all of it"
    here = tuple(at)
    want = float(wanted[here])
    if want == -torch.inf:
        return f"masked (minus infinity) in {num} of {is_.numel()} elements ({first})"
    if abs(want) <= 1e-6 * scale:
        return f"zero in {num} of {is_.numel()} elements where it is not ({first})"
    return f"another in {num} of {is_.numel()} elements that are zero ({want:.6g} {first})"


def _given_there(case: Case, number: int) -> str:
    """`` `x.exp()` gives``, of the first line that has it; else what takes it."""
    assert case.traces is not None
    computations = case.traces.single.computed.computations
    for c in computations:
        if number in c.gives:
            return f"what {_place(c)} gives"
    for c in computations:
        if number in c.takes:
            which = ordinal(c.takes.index(number))
            return f"what {_place(c)} takes as its {which} argument"
    return "numbers that are there"


def _place(c: Computation) -> str:
    return c.function.removeprefix(MODULE) if c.function.startswith(MODULE) else expression(c)
