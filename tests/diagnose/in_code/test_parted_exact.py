"""The line from which on each rank has rows of its own."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from sumgrad.diagnose.explainers.by_modules.rows import rows_used
from sumgrad.diagnose.modules.in_code.parted import Parted, where_ranks_part
from sumgrad.record.computed import Computation, Computed

BATCH, LENGTHS = torch.arange(12.0).view(6, 2), torch.tensor([3, 1, 2, 6, 5, 4])
ORDER = LENGTHS.argsort()


def line(number, function, takes, gives, path="/x/a.py"):
    return Computation(
        function=function, line=f"{path}:{number}", code=f"line({number})", takes=takes,
        gives=gives, made_at=(), site=f"{path}:{number}", within=f"{path}:1 own",
    )  # fmt: skip


def trace(own, *, taken="slice(0, 2, None)", made=4, order=ORDER, extra=()):
    """Sorts, takes a part of the order, and these rows of the batch."""
    computed = Computed(
        computations=(
            *extra,
            line(2, "argsort", (0,), (1,)),
            line(3, "getitem", (1, taken), (2,)),
            line(4, "getitem", (3, 2), (4,)),
            line(5, "mul", (4, "2"), (5,)),
        ),
        values=(LENGTHS, order, own, BATCH, BATCH[own], BATCH[own] * 2),
    )
    entered_at = ((f"/x/a.py:{made}", f"line({made})"),)
    return SimpleNamespace(
        computed=computed, entered=("model",), data=(BATCH[own],), entered_at=entered_at
    )


def parted(*ranks):
    return where_ranks_part(SimpleNamespace(ranks=dict(enumerate(ranks))))


def test_they_part_at_the_first_line_that_takes_the_same_and_gives_others():
    ranks = trace(ORDER[:2]), trace(ORDER[1:3], taken="slice(1, None, 2)")
    words = {0: "0:2", 1: "1::2"}
    at = ("/x/a.py:3", "line(3)")
    assert parted(*ranks) == Parted(line=at, within="/x/a.py:1 own", words=words)
    said = rows_used._where_ranks_part(SimpleNamespace(ranks=dict(enumerate(ranks))))
    assert said == ["which rows each rank has is told at a.py:3 `line(3)` in own, of what is the "
                    "same on all of them: 0:2 on rank 0, 1::2 on rank 1"]  # fmt: skip


def test_an_order_that_is_anothers_parts_them_where_it_is_made():
    """What is taken of it is a consequence."""
    other = ORDER.flip(0)
    drawn = parted(trace(ORDER[:2]), trace(other[:2], order=other))
    assert drawn == Parted(line=("/x/a.py:2", "line(2)"), within="/x/a.py:1 own")


def test_nothing_is_told_of_ranks_that_have_the_same_or_go_other_ways():
    own = trace(ORDER[:2])
    assert parted(own) is None
    behind = SimpleNamespace(entered=(), entered_at=(), computed=Computed(), data=())
    assert parted(behind, own) is None
    assert parted(behind, own, trace(ORDER[1:3])) is not None  # a stage that reads no rows
    assert parted(own, own) is None
    assert parted(own, trace(ORDER[1:3], made=9)) is None
    shorter = trace(ORDER[1:3])
    shorter.computed = Computed(
        computations=shorter.computed.computations[2:], values=shorter.computed.values
    )
    assert parted(own, shorter) is None  # it has them from somewhere else
    assert (
        parted(
            SimpleNamespace(entered=(), entered_at=(), computed=Computed(), data=()),
            SimpleNamespace(entered=(), entered_at=(), computed=Computed(), data=()),
        )
        is None
    )


def test_lines_that_what_enters_is_not_made_of_tell_nothing():
    beside = line(1, "full", ("0",), (6,))
    ranks = [trace(own, extra=[beside]) for own in (ORDER[:2], ORDER[1:3])]
    for rank, one in enumerate(ranks):
        values = (*one.computed.values, torch.full((1,), float(rank)))
        one.computed = Computed(computations=one.computed.computations, values=values)
    found = parted(*ranks)
    assert found is not None
    assert found.line[0] == "/x/a.py:3"
    assert not found.words  # both are said to take 0:2, as of a tensor that was changed meanwhile
