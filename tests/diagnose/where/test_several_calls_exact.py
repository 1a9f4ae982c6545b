"""Vectors that stand in several calls, as of items that one process encodes once for all rows.

There are as many items as rows here: else it is seen that they have no rows.
"""

from __future__ import annotations

import torch
from sumgrad.diagnose.modules.where.look import look_at
from sumgrad.record.trace import Call, Trace, Traces

G = torch.Generator().manual_seed(7)
ITEMS, OF_ITEMS = (torch.randn(4, 5, generator=G).double() for _ in range(2))
ROWS, OF_ROWS = (torch.randn(4, 3, generator=G).double() for _ in range(2))
FACTOR = 2.0  # of every rank's loss


def trace(*held, batch=None):
    """held: module, number of the call, what it gives, the gradient of that."""
    calls = tuple(
        Call(module=m, number=n, part=0, operation=0, operation_back=0, recomputed=False)
        for m, n, *_ in held
    )
    return Trace(calls=calls, outputs=tuple(h[2] for h in held), sources={},
                 gradients=tuple(h[3] for h in held), batch=batch)  # fmt: skip


SINGLE = trace(("item", 0, ITEMS, OF_ITEMS), ("head", 0, ROWS, OF_ROWS),
               batch={"x": torch.arange(4)})  # fmt: skip


def look(*, change=None, held=((0, 1, 2), (0, 3), (1, 0)), rows=FACTOR):
    """Three calls of `item` on two ranks; what reaches an item adds up to FACTOR of the right one.
    change: of the parts, by call."""
    shares = {i: [k for k, own in enumerate(held) if i in own] for i in range(4)}
    parts = []
    for k, own in enumerate(held):
        part = torch.zeros(len(own), 5).double()
        for at, i in enumerate(own):
            noise = torch.randn(5, generator=torch.Generator().manual_seed(i)).double()
            others = len(shares[i]) - 1
            mine = noise if k != shares[i][0] else OF_ITEMS[i] * FACTOR - others * noise
            part[at] = mine
        parts.append(part)
    if change is not None:
        change(parts)
    calls = [("item", k, ITEMS[list(own)], part)
             for k, (own, part) in enumerate(zip(held, parts, strict=True))]  # fmt: skip
    ranks = {
        0: trace(*calls[:2], ("head", 0, ROWS[:2], rows * OF_ROWS[:2])),
        1: trace(("item", 0, *calls[2][2:]), ("head", 0, ROWS[2:], FACTOR * OF_ROWS[2:])),
    }
    traces = Traces(tier="structure", step=0, ranks=ranks, single=SINGLE)
    return look_at(traces, "float64", ())


def states(found):
    return {(s.backward, s.over_all) for s in found.seen["item"]}


def test_parts_that_add_up_over_all_calls_are_right():
    assert states(look()) == {("untold", "right")}


def test_parts_that_do_not_are_wrong_as_a_sum():
    def lost(parts):
        parts[1][0] = 0

    assert states(look(change=lost)) == {("untold", "wrong")}


def test_vectors_of_one_call_each_are_told_call_by_call():
    def wrong(parts):
        parts[0][1] += 1

    found = look(held=((0, 1), (2,), (3,)), change=wrong)
    assert [s.backward for s in found.seen["item"]] == ["wrong", "right", "right"]
    assert {s.over_all for s in found.seen["item"]} == {"untold"}


def test_nothing_is_told_of_sums_where_others_have_several_factors():
    assert ("wrong", "untold") in states(look(rows=3.0))
