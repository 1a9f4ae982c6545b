"""Vectors that are found by their values: whether each row of them is a stretch of one row."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from sumgrad.diagnose.explainers.by_modules.between import right_up_to
from sumgrad.diagnose.modules.values.matching import Match, match, vectors
from sumgrad.diagnose.modules.values.order import in_order
from sumgrad.diagnose.modules.values.seen import Seen
from sumgrad.diagnose.modules.values.whole import Whole
from sumgrad.diagnose.modules.where.first_wrong import FirstWrong
from sumgrad.record.trace import Call

ROWS, PLACES, WIDTH = 4, 5, 6
OUT = torch.randn(ROWS, PLACES, WIDTH, generator=torch.Generator().manual_seed(0)).double()


def told(got: torch.Tensor, wanted: torch.Tensor = OUT, *, rows: bool = True) -> bool:
    each = wanted[0].numel() // WIDTH
    number = torch.arange(len(wanted)).repeat_interleave(each) if rows else None
    whole = Whole(outputs=vectors(wanted), gradients=vectors(wanted), rows=number)
    where = match(vectors(got), whole.outputs, 1e-8)
    return in_order(where, whole, tuple(got.shape))


SWAPPED = OUT.clone()
SWAPPED[1, 2], SWAPPED[1, 3] = OUT[1, 3], OUT[1, 2]
OF_TWO = OUT.clone()
OF_TWO[2, 0] = OUT[3, 0]


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        (OUT, True),
        (OUT[[3, 1]], True),
        (OUT[:, 2:4], True),
        (OUT[..., 2:4], True),
        (OUT[:, 0], True),
        (torch.cat([OUT[:2], torch.zeros(1, PLACES, WIDTH)]), True),
        (torch.cat([torch.zeros(ROWS, 2, WIDTH), OUT[:, :3]], 1), True),  # padded on the left
        (OUT[:, [0, 4]], False),
        (OUT.transpose(0, 1), False),
        (SWAPPED, False),
        (OF_TWO, False),
    ],
)
def test_a_row_is_a_stretch_of_one_row(got, expected):
    assert told(got) is expected


def test_rows_and_positions_in_one_dimension_are_one_stretch():
    flat = OUT.flatten(0, 1)
    assert told(flat[3:9], rows=False)
    assert not told(flat[[0, 2, 1]], rows=False)


def test_equal_vectors_elsewhere_do_not_make_a_row():
    """A table gives equal tokens equal vectors: one is there, and it is not this row's."""
    ids = torch.tensor([[1, 2, 3, 4], [3, 1, 4, 2]])
    table = torch.eye(6).double()
    assert told(table[ids], table[ids])
    assert not told(table[torch.tensor([[1, 2, 4, 4]])], table[ids])


def seen(module: str, *, right: bool = True, ordered: bool = True) -> Seen:
    call = Call(module=module, number=0, part=0, operation=0, operation_back=0, recomputed=False)
    return Seen(rank=0, call=call, shape=(2, 3), forward="right" if right else "wrong",
                in_order=ordered)  # fmt: skip


def words(*modules: Seen) -> str:
    by_name = {s.call.module: [s] for s in (*modules, seen("last", right=False))}
    look = SimpleNamespace(modules=[*by_name], seen=by_name, sources={},
                           forward=lambda m: by_name[m][0].forward)  # fmt: skip
    found = FirstWrong(wrong="last", seen=tuple(by_name["last"]), beside=("near",))
    return right_up_to(look, found)


def test_it_is_said_what_the_values_prove():
    assert words(seen("near")) == "the forward is right up to near"
    behind = words(seen("other", right=False), seen("near"))
    assert behind == "in the forward what near gives is right"


def test_vectors_that_do_not_count_are_not_cleared():
    """As those of pairs that are too far from each other: no gradient passes them."""
    near = seen("near")
    where = Match(found=torch.ones(1, 4, dtype=torch.bool), columns=(0, 3),
                  picked=torch.tensor([1]), empty=torch.zeros(1, dtype=torch.bool))  # fmt: skip
    told = words(replace(near, where=where))
    assert told == "the forward is right up to near, where a gradient reaches it"
    both = replace(where, picked=torch.tensor([0, 1]))
    assert words(replace(near, where=both)) == "the forward is right up to near"


def test_what_may_stand_in_another_order_is_not_cleared():
    assert words(seen("near", ordered=False)) == ""
