"""The line of a step's own that computed a tensor, behind those that only cut and shape it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sumgrad.base.files import is_librarys
from sumgrad.record.computed import Computation, Computed, same_value
from sumgrad.record.line import NO_LINE, Line

MOST_STEPS = 16  # from what was made back to what it was made of
SHAPING = {
    "getitem", "split", "chunk", "unbind", "flatten", "reshape", "view", "unflatten", "squeeze",
    "unsqueeze", "transpose", "permute", "movedim", "t", "expand", "contiguous", "clone", "detach",
    "to", "long", "float", "double", "narrow", "select", "index_select", "tensor_split",
}  # fmt: skip


def line_that_computed(computed: Computed, number: int | str, near: Collection[str] = ()) -> Line:
    """Where a library's lines, those that only shape, or those of `near`, by `PATH:12`, made value
    `number` of one tensor, and that of one: the first other line of the step's own that computed
    it, or filled it with one number. NO_LINE where none was seen."""
    makers, made = _makers(computed.computations), NO_LINE
    for _ in range(MOST_STEPS):
        maker = makers.get(number) if isinstance(number, int) else None
        if maker is None:
            told = made[0] not in near and not is_librarys(made[0]) and "empty" not in made[1]
            return made if told else NO_LINE
        taken = [*dict.fromkeys(t for t in maker.takes if isinstance(t, int))]
        only_shapes = len(taken) == 1 and (
            maker.function in SHAPING or _hands_on(computed, taken[0], maker.gives)
        )
        own = maker.line and not is_librarys(maker.line)
        if own and not only_shapes and maker.line not in near:
            return maker.line, maker.code
        number = taken[0] if len(taken) == 1 else ""
        made = maker.made_at[maker.takes.index(number)] if len(taken) == 1 else NO_LINE
    return NO_LINE


def _hands_on(computed: Computed, taken: int, gives: Sequence[int]) -> bool:
    """Whether what is given is what was taken, as by a Function that is there for its backward."""
    return any(same_value(computed.values[taken], computed.values[n]) for n in gives)


def before_it_was_cut(computations: Sequence[Computation], number: int | str) -> int | None:
    """The value that lines which only cut and shape made value `number` of, and that no line made;
    None where one did, or where none of these made it."""
    makers, passed = _makers(computations), set[int]()
    while isinstance(number, int) and number in makers and number not in passed:
        passed.add(number)
        taken = makers[number].uses if makers[number].function in SHAPING else []
        number = taken[0] if len(taken) == 1 else ""
    return number if passed and isinstance(number, int) and number not in makers else None


def _makers(computations: Sequence[Computation]) -> dict[int, Computation]:
    """By number of a value what gave it first: what hands it on as it is gives it, too."""
    return {n: c for c in reversed(computations) for n in c.gives}
