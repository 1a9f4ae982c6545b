"""What a module is handed for one row, and does not belong together; rows put together of two."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sumgrad.diagnose.explainers.by_modules.rows.odd_data import odd_data
from sumgrad.diagnose.modules.inputs.companions import Odd, odd_companions
from sumgrad.diagnose.modules.values.seen import Mixed, Seen
from sumgrad.diagnose.modules.where.look import look_at
from sumgrad.record.trace import Call, Trace, Traces
from sumgrad.subjects.program.watched.watch import ModuleWatch
from torch import nn

IDS = torch.tensor([[0, 0, 3, 1, 4], [5, 9, 2, 6, 7], [0, 8, 1, 2, 4], [4, 9, 2, 3, 1]])
TYPES = torch.tensor([[0, 0, 0, 1, 1], [1, 1, 0, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 1, 0]])
IMAGES = torch.randn(4, 3, 2, generator=torch.Generator().manual_seed(1))
WHOLE = {"ids": IDS, "types": TYPES, "attention_mask": (IDS > 0).long(), "images": IMAGES}
ROWS = slice(1, 3)


def trace(*calls):
    held = {(i, name): t for i, call in enumerate(calls) for name, t in call.items()}
    return Trace(calls=(), outputs=(), gradients=(), sources={}, data=tuple(held.values()),
                 entered=("m",) * len(held), entered_as=tuple(held))  # fmt: skip


def odd(*calls):
    return list(odd_companions(trace(*calls), trace(WHOLE), "m"))


def own(rows=ROWS, **changed):
    return {name: t[rows].clone() for name, t in WHOLE.items()} | changed


def test_rows_that_belong_together_are_none():
    assert odd(own(), own(slice(0, 1)), own([3, 0])) == []


@pytest.mark.parametrize("cut", [slice(1, 5), slice(0, 4)])
def test_rows_that_are_padded_less_are_compared_where_they_stand(cut):
    mine = {n: t if n == "images" else t[:, cut] for n, t in own(slice(2, 3)).items()}
    assert odd(mine) == []
    mine["types"] = 1 - mine["types"]
    (found,) = odd(mine)
    padding = int((mine["attention_mask"] == 0).sum())
    assert (found.of, found.name, found.others) == (2, "types", 4 - padding)


def test_types_that_are_padded_on_the_other_side():
    types = TYPES[ROWS].clone()
    types[1] = torch.tensor([0, 1, 1, 0, 0])
    (found,) = odd(own(), own(types=types))
    assert found == Odd(call=1, row=1, told="ids", of=2, name="types", others=2, size=5, at=1,
                        now=1.0, was=0.0)  # fmt: skip


def test_an_image_of_another_row():
    assert odd(own(images=IMAGES[[1, 3]])) == [
        Odd(call=0, row=1, told="ids", of=2, name="images", whose=(3,))
    ]
    assert odd(own(images=IMAGES[[1, 3]] * 2))[0].whose == ()


def test_an_entry_of_a_list_that_several_rows_have():
    whole = {"ids": IDS, "names": torch.tensor([7.0, 5, 8, 5])}
    mine = {"ids": IDS[2:3], "names": torch.tensor([5.0])}
    (found,) = odd_companions(trace(mine), trace(whole), "m")
    assert (found.of, found.name, found.whose) == (2, "names", (1, 3))


def test_a_mask_that_is_another_and_what_it_hides():
    mask = WHOLE["attention_mask"][ROWS].clone()
    mask[1, 0] = 1
    assert [(o.name, o.at) for o in odd(own(attention_mask=mask))] == [("attention_mask", 0)]
    types = TYPES[ROWS].clone()
    types[1, 0] = 1  # where the mask says padding
    assert odd(own(types=types)) == []


def test_positions_that_all_begin_elsewhere_are_meant():
    whole = {"ids": IDS, "positions": torch.arange(5).expand(4, 5)}
    mine = {"ids": IDS[1:3], "positions": torch.arange(2, 7).expand(2, 5)}
    assert list(odd_companions(trace(mine), trace(whole), "m")) == []
    mine["positions"] = torch.tensor([[0, 1, 2, 0, 1]]).expand(2, 5)
    assert len(list(odd_companions(trace(mine), trace(whole), "m"))) == 2


def test_rows_that_may_be_several_or_none_tell_nothing():
    ids = IDS.clone()
    ids[2] = ids[1]
    whole = WHOLE | {"ids": ids}
    mine = {"ids": ids[1:2], "images": IMAGES[3:4]}
    assert list(odd_companions(trace(mine), trace(whole), "m")) == []
    assert odd({"ids": torch.tensor([[9, 8, 7, 6, 5]]), "images": IMAGES[3:4]}) == []
    few = IDS.clamp(max=1)  # a row of two different numbers
    assert list(odd_companions(trace({"ids": few, "types": TYPES.flip(0)}),
                               trace(WHOLE | {"ids": few}), "m")) == []  # fmt: skip


def test_what_a_module_is_handed_is_known_by_its_name():
    class Model(nn.Module):
        def forward(self, ids, *, images=None, **more):
            return ids.double() @ more["weight"]

    names = ["north", "south"]
    model = Model()
    with ModuleWatch(model) as watch:
        weight = torch.ones(5, dtype=torch.float64, requires_grad=True)
        for rows in (IDS[:2], IDS[2:]):
            model(rows, images=IMAGES, weight=weight, names=names, flags=[None], sizes=[1 << 80])
    seen = watch.trace()
    each = [("names", 1), ("ids", 2), ("images", 3)]
    assert [(*at, t.dim()) for at, t in zip(seen.entered_as, seen.data, strict=True)] == [
        (call, name, dims) for call in (0, 1) for name, dims in each
    ]
    north, south = seen.data[0].tolist()
    assert north != south


def test_the_words_say_which_row_and_where():
    types = TYPES[ROWS].flip(1)
    case = SimpleNamespace(traces=Traces(
        tier="t", step=0, ranks={0: trace(own()), 1: trace(own(types=types))}, single=trace(WHOLE)
    ))  # fmt: skip
    found = SimpleNamespace(wrong="m", modules=(), ranks=(0, 1))
    look = SimpleNamespace(modules=("m",), seen={"m": ()})
    odd = odd_data(case, look, found)
    assert (odd.module, odd.is_sure) == ("m", True)
    assert odd.said == (
        "what m is handed for one row does not belong together: on rank 1 row 0 has as ids what "
        "row 1 has in the single process, and as types something else than that one at 4 of 5 "
        "places (at place 0 0 where that has 1), and so in 1 more",
    )
    # Where such a row comes out right all the same, it tells nothing.
    call = Call(module="m", number=0, part=0, operation=0, operation_back=0, recomputed=False)
    right = Seen(rank=1, call=call, shape=(2, 3), forward="right", in_order=True)
    look.seen["m"] = (right,)
    assert odd_data(case, look, found) is None


def windows(rows, gradient=None, num_rows=3):
    """A tensor (windows, 4, C) as a trace, with its own gradient."""
    gradient = rows.cos() if gradient is None else gradient
    call = Call(module="m", number=0, part=0, operation=0, operation_back=0, recomputed=False)
    return Trace(calls=(call,), outputs=(rows,), gradients=(gradient,), sources={"m": "Linear"},
                 batch={"x": torch.zeros(num_rows, 2)})  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "state", "mixed"),
    [
        ({}, "right", ()),
        ({2: (7, 2)}, "wrong", (Mixed(row=2, of=(4, 7), at=((0, 1), (2, 3))),)),
        ({2: (7, 1)}, "right", ()),  # one vector may be there by chance
        ({0: (7, 2), 1: (7, 2), 2: (7, 2)}, "untold", ()),  # of another layout
    ],
)
def test_rows_that_are_put_together_of_two(changed, state, mixed):
    whole = torch.randn(9, 4, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    mine = whole[2:5].clone()
    for row, (other, number) in changed.items():
        mine[row, 4 - number :] = whole[other, 4 - number :]
    traces = Traces(tier="structure", step=0, single=windows(whole), ranks={0: windows(mine)})
    (seen,) = look_at(traces, "float64", ()).seen["m"]
    assert (seen.forward, seen.mixed) == (state, mixed)


@pytest.mark.parametrize(("places", "num_rows"), [(3, 9), (2, 3)])
def test_vectors_that_no_gradient_reaches_may_be_of_any_row(places, num_rows):
    """As where a table is cut by its entries: a rank takes something for those that others hold,
    and a mask makes it nothing."""
    whole = torch.randn(9, 4, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    mine, gradient = whole[2:5].clone(), whole[2:5].cos()
    mine[1, places:] = whole[7, places:]
    masked = gradient.clone()
    masked[1, places:] = 0
    for own, state in ((gradient, "wrong"), (masked, "right")):
        ranks = {0: windows(mine, own, num_rows)}
        single = windows(whole, num_rows=num_rows)
        (seen,) = look_at(Traces(tier="t", step=0, single=single, ranks=ranks), "float64", ()).seen[
            "m"
        ]
        assert seen.forward == state
