"""The first module, in the forward or down the backward, behind which nothing is right any more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sumgrad.diagnose.modules.look import SAME_FACTOR, Look, Seen, constant


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FirstWrong:
    """Between `right` and `wrong` something goes wrong. right: None where nothing was right before.

    seen: what is wrong of it. ratio: the gradient is right there but for this factor. lost: no
    gradient reaches it.
    """

    right: str | None
    wrong: str
    seen: tuple[Seen, ...]
    ratio: float | None = None
    lost: bool = False

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({s.rank for s in self.seen}))


def first_wrong_forward(look: Look) -> FirstWrong | None:
    """What is right again later was computed in another way, and is no fault."""
    states = [(module, look.forward(module)) for module in look.modules]
    last_right = max((i for i, (_, s) in enumerate(states) if s == "right"), default=-1)
    for module, state in states[last_right + 1 :]:
        if state == "wrong":
            seen = [s for s in look.seen[module] if s.forward == "wrong" and not s.call.recomputed]
            return FirstWrong(right=_vouching(look, module), wrong=module, seen=tuple(seen))
    return None


def _vouching(look: Look, wrong: str) -> str | None:
    """The last module before that is right in its place: what all rows share, as embeddings of
    positions, is found by its values wherever it belongs."""
    before = look.modules[: look.modules.index(wrong)]
    for module in reversed(before):
        if look.forward(module) == "right" and not look.shared(module):
            return module
    return None


def first_wrong_recomputed(look: Look) -> FirstWrong | None:
    """A checkpoint that computes something else the second time."""
    right = None
    for module in look.modules:
        again = [s for s in look.seen[module] if s.call.recomputed]
        wrong = [s for s in again if s.forward == "wrong"]
        if wrong and look.forward(module) == "right":
            return FirstWrong(right=right, wrong=module, seen=tuple(wrong))
        right = module if again else right
    return None


def first_wrong_backward(look: Look, failing: Sequence[str]) -> FirstWrong | None:
    """Against the order of the forward. failing: modules that own a wrong gradient."""
    order = list(reversed(look.modules))
    known: dict[tuple[int, int], float] = {}
    odd: dict[str, FirstWrong] = {}
    last_right, right = -1, None
    for i, module in enumerate(order):
        found = _odd(look, module, known, right)
        if found is not None:
            odd[module] = found
            continue
        if look.backward(module) == "right":
            last_right, right = i, module
    # What is right again further down was put together in another way, unless its own parameters
    # are wrong: then the way down passed by its side.
    for i, module in enumerate(order):
        if module in odd and (i > last_right or module in failing):
            return odd[module]
    return None


def _odd(
    look: Look, module: str, known: dict[tuple[int, int], float], right: str | None
) -> FirstWrong | None:
    """What is wrong of the gradients that reach a module. known: (rank, call) -> the factor so far,
    which is set where none is known."""
    wrong = [s for s in look.seen[module] if s.backward == "wrong"]
    if wrong:
        lost = all(s.wrong is None for s in wrong)
        return FirstWrong(right=right, wrong=module, seen=tuple(wrong), lost=lost)
    jumps: list[tuple[Seen, float]] = []
    for s in look.seen[module]:
        factor = constant(s.factors)
        if s.backward != "right" or factor is None:
            continue
        before = known.setdefault((s.rank, s.call.number), factor)
        if abs(factor - before) > SAME_FACTOR * max(abs(before), abs(factor)):
            jumps.append((s, factor / before if before else float("inf")))
    if not jumps:
        return None
    first = jumps[0][1]
    same = all(abs(ratio - first) <= SAME_FACTOR * abs(first) for _, ratio in jumps)
    seen = tuple(s for s, _ in jumps)
    lost = all(constant(s.factors) == 0 for s in seen)
    return FirstWrong(
        right=right, wrong=module, seen=seen, ratio=first if same and not lost else None, lost=lost
    )
