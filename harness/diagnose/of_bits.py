"""Where bits go wrong: the bitwise tier names no cause, it says what differs first in a step."""

from __future__ import annotations

from collections.abc import Iterator

from sumgrad.base.verdict import Diagnosis
from sumgrad.judge.checks.bitwise import compared_bits
from sumgrad.record.bits import KINDS, kind_of
from sumgrad.record.directory import Record

MADE_OF = {
    "quantity": "what the producing pool computes of its rows, or how it is sent",
    "statistic": "the global sum inside the term: its rows' parts, their tree, or its exchange",
    "cotangent": "the readers' loss at their rows, its coefficient and count, or its way back",
    "root": "the term's own gradient by rows, or the tree and the exchange that sum it",
    "gradient": "the order in which the terms' roots are added, or what is done to them after",
    "norm": "the units' squares, which are gathered from their homes' leaders",
    "clip": "the factor that the norm gives",
}


def first_other_bits(record: Record) -> Iterator[Diagnosis]:
    """The first number of the step with other bits; what comes before it is the same everywhere."""
    if not record.spec.bitwise:
        return
    found = compared_bits(record)
    if found.first is None or found.problems:
        return
    one, kind = found.first, kind_of(found.first.name)
    before = KINDS[: KINDS.index(kind)]
    yield Diagnosis(
        cause=f"the first other bits of step {one.step} are those of {one.name}, on rank "
        f"{one.rank}: {MADE_OF[kind]}",
        kind="first_other_bits",
        standing="open",
        ranks=found.ranks,
        because=(
            f"{one.differing} of its {one.elements} elements differ from one process",
            *([f"every {', '.join(before)} that ranks hold has the bits of one process"]
              if before else []),
        ),
    )  # fmt: skip
