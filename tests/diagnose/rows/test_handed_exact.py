"""Arguments that a module is handed where it is wrong, and not where it is right."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sumgrad.diagnose.explainers.by_modules.rows.handed import handed_otherwise
from sumgrad.record.trace import A_GROUP, Call, read_trace, write_trace
from sumgrad.subjects.program.watched.arguments import in_a_word
from sumgrad.subjects.program.watched.watch import ModuleWatch
from torch import nn


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x, mask=None, *, scale=1.0, **others):
        return self.inner(x) * scale


def test_what_a_users_module_is_handed_is_kept_by_name_with_its_defaults(tmp_path):
    model = Masked()
    watching = ModuleWatch(model)
    with watching:
        model(torch.randn(2, 3))
        model(torch.randn(2, 3), torch.ones(2), scale=2, kind="a", more=[1])
    write_trace(tmp_path / "one", watching.trace())
    assert read_trace(tmp_path / "one").handed == {
        "": (
            {"x": "a tensor of float32", "mask": "nothing", "scale": "1.0"},
            {"x": "a tensor of float32", "mask": "a tensor of float32", "scale": "2",
             "kind": "'a'", "more": "a list"},
        )
    }  # fmt: skip


def test_groups_have_one_word_whatever_their_class():
    class ProcessGroup:
        pass

    class Recording(ProcessGroup):
        pass

    assert in_a_word(Recording()) == A_GROUP
    assert in_a_word([]) == "a list"


MASK, NONE = {"mask": "a tensor of bool"}, {"mask": "nothing"}


def case_of(ranks, single):
    """Two modules, `` and in it `inner`, called as often."""
    calls = {
        rank: [Call(module="inner", number=i, part=0, operation=0, operation_back=None,
                    recomputed=False) for i in range(len(handed))]
        for rank, handed in enumerate(ranks)
    }  # fmt: skip
    traces = SimpleNamespace(
        ranks={
            rank: SimpleNamespace(calls=calls[rank], handed={"": tuple(handed)})
            for rank, handed in enumerate(ranks)
        },
        single=SimpleNamespace(handed={"": tuple(single)}),
    )
    return SimpleNamespace(traces=traces), calls


@pytest.mark.parametrize(
    ("ranks", "wrong", "single", "said"),
    [
        ([[NONE, MASK], [NONE]], {(0, 1)}, [NONE],
         "the model is handed a tensor of bool as mask where what inner gives is wrong (call 1 on "
         "rank 0), and in 0 of 2 calls where that is right; in the single process it is nothing"),
        ([[NONE, MASK], [MASK, NONE, NONE]], {(0, 1)}, [{}],
         "the model is handed a tensor of bool as mask where what inner gives is wrong (call 1 on "
         "rank 0), and in 1 of 4 calls where that is right; in the single process it is nothing"),
        ([[NONE, MASK], [{"mask": "4"}]], {(0, 1)}, [NONE], ""),  # what is right has another, too
        ([[NONE], [NONE]], {(0, 0), (1, 0)}, [MASK],
         "the model is handed nothing as mask where what inner gives is wrong (call 0 on rank 0; "
         "call 0 on rank 1); in the single process it is a tensor of bool"),
        ([[MASK, MASK], [MASK]], {(0, 1)}, [NONE], None),  # most of the right calls have it, too
        ([[NONE, MASK]], {(0, 0), (0, 1)}, [{"mask": "a tensor of int64"}], None),  # not all of one
        ([[MASK]], {(0, 0)}, [MASK, NONE], None),
        ([[{"k": "2"}]], {(0, 0)}, [{"k": "3"}], None),  # sizes are other ones on ranks
        ([[{"k": "2"}, {"k": "3"}]], {(0, 0)}, [{"k": "3"}],
         "the model is handed 2 as k where what inner gives is wrong (call 0 on rank 0), and "
         "in 0 of 1 calls where that is right; in the single process it is 3"),
        ([[MASK]], {(0, 0)}, [], None),
        ([[{"group": A_GROUP}]], {(0, 0)}, [{"group": "nothing"}], None),  # by right
        ([[{"hidden": "a tensor of float64"}]], {(0, 0)}, [{"x": "a tensor of float64"}], None),
        ([[{"hidden": "a tensor of float64"}]], {(0, 0)}, [{"x": "a tensor of bool"}],
         "the model is handed a tensor of float64 as hidden where what inner gives is wrong (call "
         "0 on rank 0); in the single process it is nothing"),
    ],
)  # fmt: skip
def test_the_argument_that_wrong_calls_have_alone(ranks, wrong, single, said):
    case, calls = case_of(ranks, single)
    seen = [
        SimpleNamespace(rank=rank, call=call,
                        forward="wrong" if (rank, call.number) in wrong else "right")
        for rank, own in calls.items()
        for call in own
    ]  # fmt: skip
    look = SimpleNamespace(modules=("inner", ""), seen={"inner": seen}, sources={})
    found = SimpleNamespace(
        wrong="inner", seen=tuple(s for s in seen if s.forward == "wrong"), ranks=(0, 1)
    )
    assert handed_otherwise(case, look, found) == ([said] if said else [])


@pytest.mark.parametrize(("source", "state", "given", "is_told"), [
    ("Block at a.py:1", "right", "nothing", False),
    ("Block at a.py:1", "wrong", "nothing", True),
    ("Other at b.py:1", "right", "nothing", True),
    ("Block at a.py:1", "right", "a tensor of int64", True),
])  # fmt: skip
def test_what_another_of_its_class_is_handed_too_and_is_right_with_tells_nothing(
    source, state, given, is_told
):
    call = Call(module="m", number=0, part=0, operation=0, operation_back=0, recomputed=False)
    mine = {"m": ({"at": "nothing"},), "other": ({"at": given},)}
    case = SimpleNamespace(traces=SimpleNamespace(
        ranks={0: SimpleNamespace(handed=mine, calls=[call])},
        single=SimpleNamespace(handed={"m": ({"at": "a tensor of int64"},)}),
    ))  # fmt: skip
    seen = SimpleNamespace(rank=0, call=call, forward="wrong")
    look = SimpleNamespace(modules=("m", "other"), seen={"m": [seen]}, forward=lambda m: state,
                           sources={"m": "Block at a.py:1", "other": source})  # fmt: skip
    found = SimpleNamespace(wrong="m", seen=(seen,), ranks=(0,))
    assert bool(handed_otherwise(case, look, found)) is is_told
