"""Closures of an optimizer that run several times in one step: only the first run's gradients are
compared, so those of later runs must look like the single run's, or nothing is known of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from sumgrad.base.outcome import some_of
from sumgrad.judge.finding import Compared, Finding

APART = 0.01  # of a norm: far above what roundings make of a few calls, below any factor of ranks


def closures_that_run_again(compared: Compared) -> Iterator[Finding]:
    """UNKNOWN where a later run gives another gradient, by its norm, or there are more of them."""
    script = compared.record.spec.script
    for tier in compared.record.spec.tiers if script else ():
        for step, single in enumerate(script.again if script else ()):
            for rank, held in compared.record.ranks.items():
                info = held.info.get((tier, step))
                told = None if info is None else _unlike(info.get("again", ()), single)
                if told:
                    yield Finding(
                        level="unknown",
                        text=f"step {step}: rank {rank}'s optimizer calls its closure again, and "
                        f"{told}: only the gradients of its first call are compared",
                    )
                    return


def _unlike(own: Sequence[Mapping[str, float]], single: Sequence[Mapping[str, float]]) -> str:
    if len(own) != len(single):
        return f"{len(own) + 1} times, where the single run does {len(single) + 1} times"
    for i, (mine, its) in enumerate(zip(own, single, strict=True)):
        size = max(its.values(), default=0.0)
        off = [n for n in mine.keys() & its.keys() if abs(mine[n] - its[n]) > APART * size]
        if off:
            first = min(off)
            return (
                f"in call {i + 1} the gradient of {some_of(sorted(off))} is another: the norm of "
                f"{first}'s is {mine[first]:.6g}, in the single run {its[first]:.6g}"
            )
    return ""
