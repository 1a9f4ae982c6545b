"""Which module is said to be wrong first: what acquits, other experts, factors made up for."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.explainers.by_modules import backward, forward, looked
from sumgrad.diagnose.explainers.by_modules.forwards import entering
from sumgrad.diagnose.modules.values.matching import Match
from sumgrad.diagnose.modules.values.seen import Seen
from sumgrad.diagnose.modules.where import first_wrong
from sumgrad.diagnose.modules.where.first_wrong import (
    FirstWrong,
    first_wrong_elsewhere,
    first_wrong_forward,
)
from sumgrad.diagnose.modules.where.look import Look, look_at
from sumgrad.diagnose.modules.where.paths import paths_of
from sumgrad.diagnose.row_fit import Factors, Unit
from sumgrad.record.trace import LOSS, Call, Trace, Traces
from sumgrad.subjects.program.placed.seen_modules import source_of
from torch import nn


def seen(module, rank, state, *, number=0, back=0, **more):
    call = Call(module=module, number=number, part=0, operation=0, operation_back=back,
                recomputed=False)  # fmt: skip
    return Seen(rank=rank, call=call, shape=(2, 3), forward=state, **more)


def look(takes, *held):
    modules = tuple(m for m in takes if m != LOSS)
    by_module = {m: [s for s in held if s.call.module == m] for m in modules}
    return Look(modules=modules, seen=by_module, sources={}, paths=paths_of(modules, takes))


def whole():
    """All vectors of a tensor, each of them found."""
    return Match(found=torch.eye(2).bool(), columns=(0, 3), picked=torch.arange(2),
                 empty=torch.zeros(2).bool())  # fmt: skip


@pytest.mark.parametrize(("back", "first"), [(None, "q"), (0, "out")])
def test_what_no_gradient_passes_acquits_nothing(back, first):
    """k keeps no graph, so that it is taken to follow q."""
    takes = {"q": (), "k": ("q",), "out": ("k",), LOSS: ("out",)}
    between = seen("k", 0, "right", back=back, where=whole())
    found = look(takes, seen("q", 0, "wrong"), between, seen("out", 0, "wrong"))
    assert first_wrong_forward(found).wrong == first


def test_where_none_passes_either_it_acquits():
    takes = {"q": (), "k": ("q",), "out": ("k",), LOSS: ("out",)}
    between = seen("k", 0, "right", back=None, where=whole())
    found = look(takes, seen("q", 0, "wrong", back=None), between, seen("out", 0, "wrong"))
    assert first_wrong_forward(found).wrong == "q"  # in the single process one passes it
    frozen = replace(found, paths=replace(found.paths, known=frozenset()))
    assert first_wrong_forward(frozen).wrong == "out"


EXPERTS = {"norm": (), "e0": ("norm",), "e1": ("norm",), "e2": ("norm",),
           "top": ("e0", "e1", "e2"), LOSS: ("top",)}  # fmt: skip


def of_experts(*more):
    return look(EXPERTS, seen("norm", 0, "right"), seen("norm", 1, "right"),
                seen("e0", 0, "wrong"), seen("top", 0, "wrong"), seen("top", 1, "wrong"),
                *more)  # fmt: skip


def test_what_is_wrong_first_on_other_ranks():
    found = of_experts(seen("e1", 1, "wrong"), seen("e2", 1, "wrong"))
    first = first_wrong_forward(found)
    assert (first.wrong, first.ranks) == ("e0", (0,))
    assert first_wrong_elsewhere(found, first) == {"e1": (1,)}  # each rank once; top comes later
    right = of_experts(seen("e1", 1, "right"), seen("e2", 0, "wrong"))
    assert first_wrong_elsewhere(right, first_wrong_forward(right)) == {}
    takes = {**EXPERTS, "after": ("e1",), LOSS: ("top", "after")}
    again = look(takes, seen("norm", 1, "right"), seen("e0", 0, "wrong"), seen("e1", 1, "wrong"),
                 seen("top", 0, "wrong"), seen("after", 1, "right", where=whole()))  # fmt: skip
    first = first_wrong_forward(again)
    assert (first.wrong, first_wrong_elsewhere(again, first)) == ("e0", {})  # it is meant
    parts = of_experts(seen("e1", 0, "wrong"), seen("e1", 1, "wrong"))
    assert first_wrong_elsewhere(parts, first_wrong_forward(parts)) == {}  # they are added up
    alone = look({"a": (), "b": (), LOSS: ("a", "b")}, seen("a", 0, "wrong"), seen("b", 1, "wrong"))
    assert first_wrong_elsewhere(alone, first_wrong_forward(alone)) == {}  # nothing leads to it


def test_it_is_said_with_its_ranks():
    found = of_experts(seen("e1", 1, "wrong"))
    diagnosis = Diagnosis(cause="c", kind="forward", ranks=(0,), because=("b",))
    said = forward._with_others(found, first_wrong_forward(found), diagnosis)
    assert said.ranks == (0, 1)
    assert said.because == (
        "b",
        "where that is not wrong, e1 on rank 1 is: nothing wrong leads to it",
    )
    alone = of_experts()
    assert forward._with_others(alone, first_wrong_forward(alone), diagnosis) is diagnosis


def factors(*values):
    units = tuple(Unit(term=None, rows=(i, i + 1)) for i in range(len(values)))
    return Factors(level="rows", units=units, values=values, sigmas=(None,) * len(values))


@pytest.mark.parametrize(("values", "calls", "ratio", "made_up"), [
    ((1.0, 0.4, 0.16), 2, 2.5, True),
    ((2.5, 2.5), 2, 2.5, False),
    ((2.5, 0.4), 2, 2.5, False),  # no row is right
    ((1.0, 1.0), 2, 2.5, False),
    ((1.0,), 2, 2.5, False),
    ((1.0, None, 0.4), 2, 2.5, True),
    ((1.0, 0.4), 3, 2.5, False),  # in one call it is right
    ((1.0, 0.4), 2, None, False),
    ((1.0, 2.5), 2, 2.5, False),  # what is off on one rank, beside right rows of another
    (None, 2, 2.5, False),
])  # fmt: skip
def test_what_is_off_and_ends_right_for_some_rows_is_made_up_for(
    monkeypatch, values, calls, ratio, made_up
):
    every = [seen("m", 0, "right", number=n) for n in range(calls)]
    found = FirstWrong(wrong="m", seen=tuple(every[:2]), ratio=ratio)
    fitted = None if values is None else (None, [((0,), factors(*values))])
    monkeypatch.setattr(backward, "fitted", lambda case: fitted)
    held = look({"m": (), LOSS: ("m",)}, *every, seen("m", 1, "right"))
    assert backward._is_made_up_for(None, held, found) is made_up


def into(state="right", *, empty=(False, True, False), shape=(3, 3), any_of=(1, 0, 1)):
    found = torch.tensor(any_of).bool()[:, None]
    where = Match(found=found, columns=(0, 3), picked=torch.arange(3), empty=torch.tensor(empty))
    return replace(seen("what goes into m", 0, state), where=where, shape=shape)


@pytest.mark.parametrize(("data", "source", "wrong", "odd"), [
    (into(), "Linear", [1], [1]),
    (into(), "Linear", [0], None),
    (into(), "Linear", [0, 1], [1]),
    (into(), "Conv1d", [1], None),
    (into(any_of=(1, 1, 1)), "Linear", [1], None),  # such zeros are there in the single process
    (into("wrong"), "Linear", [1], "as it was"),
    (into(shape=(1, 3, 3)), "Linear", [1], None),
    (into(empty=(False, False, False)), "Linear", [1], None),
])  # fmt: skip
def test_zeros_of_which_a_wrong_vector_is_made_are_no_padding(
    monkeypatch, data, source, wrong, odd
):
    out = replace(seen("m", 0, "wrong"), shape=(3, 5), wrong=torch.tensor(wrong))
    monkeypatch.setattr(entering, "gone_into", lambda *_: [data])
    monkeypatch.setattr(entering, "looked", lambda case: SimpleNamespace(sources={"m": source}))
    (one,) = entering.into_the_calls(None, FirstWrong(wrong="m", seen=(out,)))
    if odd == "as it was" or odd is None:
        assert one is data
    else:
        assert (one.forward, one.wrong.tolist()) == ("wrong", odd)


def other_forward(self, x):
    return x


class Called:
    def __call__(self, x):
        return x


def test_a_forward_of_its_own_is_where_a_module_is_from():
    class Mine(nn.Module):
        def forward(self, x):
            return x

    one = Mine()
    assert source_of(one).startswith("Mine at ")
    at = source_of(one).rpartition(":")[2]
    one.forward = other_forward.__get__(one)
    here = other_forward.__code__.co_firstlineno
    assert source_of(one) == f"Mine at {__file__}:{here}"
    assert at != str(here)
    one.forward = Called()
    assert source_of(one) == f"Mine at {__file__}:{Called.__call__.__code__.co_firstlineno}"
    one.forward = len  # of which no line is known
    assert source_of(one).endswith(f":{at}")


def traced(source):
    call = Call(module="m", number=0, part=0, operation=0, operation_back=0, recomputed=False)
    return Trace(calls=(call,), outputs=(torch.ones(2, 3),), gradients=(torch.ones(2, 3),),
                 sources={"m": source}, batch={"x": torch.arange(2)})  # fmt: skip


@pytest.mark.parametrize(("ranks", "said"), [
    (("Ring at b.py:2", "Ring at b.py:2"), "Ring at b.py:2, in the single process Plain at a.py:1"),
    (("Ring at a.py:1",), "Plain at a.py:1"),  # as one that a wrapper made of it
    (("Ring",), "Plain at a.py:1"),
    (("Ring at b.py:2", "Other at c.py:3"), "Plain at a.py:1"),
])  # fmt: skip
def test_a_module_that_is_another_on_the_ranks_is_called_by_both(ranks, said):
    held = {rank: traced(source) for rank, source in enumerate(ranks)}
    traces = Traces(tier="t", step=0, ranks=held, single=traced("Plain at a.py:1"))
    assert looked.named(look_at(traces, "float64", ()), "m") == f"m ({said})"


def test_single_numbers_of_what_is_around_it_measure_nothing():
    def seen(module, shape):
        return SimpleNamespace(call=SimpleNamespace(module=module), shape=torch.Size(shape))

    inner = seen("a.b", (4, 3))
    for around in ("", "a"):
        assert first_wrong._is_another_output(seen(around, (4, 1)), inner)
        assert not first_wrong._is_another_output(seen(around, (4, 3)), inner)
        assert not first_wrong._is_another_output(seen(around, (4, 1)), seen("a.b", (2, 1)))
    assert not first_wrong._is_another_output(seen("c", (4, 1)), inner)


def test_a_call_above_is_told_by_the_order_where_one_is_called_more_often():
    """An encoder that the second of three micro-batches does without."""
    takes = {"encoder": (), "body": ("encoder",), LOSS: ("body",)}
    calls = [("encoder", 0), ("body", 0), ("body", 1), ("encoder", 1), ("body", 2)]
    factors = {("encoder", 0): 2.0, ("encoder", 1): 5.0, ("body", 0): 2.0, ("body", 1): 3.0,
               ("body", 2): 5.0}  # fmt: skip

    def held(change=None, leave=()):
        return look(takes, *(
            seen(m, 0, "right", number=n, backward="right", where=whole(), at=at,
                 factors=torch.full((2,), {**factors, **(change or {})}[m, n]))
            for at, (m, n) in enumerate(calls) if (m, n) not in leave
        ))  # fmt: skip

    assert first_wrong.first_wrong_backward(held(), ["encoder"]) is None
    odd = first_wrong.first_wrong_backward(held({("encoder", 1): 4.0}), ["encoder"])
    assert (odd.wrong, [s.call.number for s in odd.seen]) == ("encoder", [1])
    assert odd.ratio == pytest.approx(4 / 5)
    # As often: by their numbers, whatever the order, as of a schedule that takes turns.
    alike = held({("body", 1): 5.0}, leave=[("body", 2)])
    assert first_wrong.first_wrong_backward(alike, ["encoder"]) is None
