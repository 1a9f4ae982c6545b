"""Tensors of an earlier call of the model that a later one computes with."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from sumgrad.diagnose.explainers.by_modules.in_code.kept import kept_for_the_call, kept_in_words
from sumgrad.diagnose.modules.in_code.kept_since import kept_since
from sumgrad.record.trace import INTO
from sumgrad.subjects.program.watched.computations import Computations
from sumgrad.subjects.program.watched.watch import ModuleWatch
from torch import nn

ROWS = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
ALIKE, MADE_BEFORE = "alike", "made before"


class Net(nn.Module):
    """x plus a table of the first value of each row, made in the call or, as `keep` says, once."""

    def __init__(self, keep):
        super().__init__()
        self.keep, self.table = keep, None
        self.linear = nn.Linear(5, 5).double()

    def forward(self, x, table=None):
        if table is None:
            table = self.table
            if table is None:
                table = self.first(x)[:, None] * torch.arange(x.shape[1])
                self.table = table if self.keep else None
        return self.linear(x) + table.cos()[..., None]

    def first(self, x):
        return torch.ones(len(x), dtype=x.dtype) if self.keep == ALIKE else x[:, 0, 0]


def traced(keep, *parts, given=None):
    model = Net(keep)
    with ModuleWatch(model) as watching, Computations(watching.now) as computations:
        table = given if given is None or isinstance(given, nn.Parameter) else given.exp()
        for x in parts:
            out = model(x) if table is None else model(x, table)
            out.square().sum().backward()
    return replace(watching.trace({"x": ROWS}), computed=computations.computed())


def added(trace, call):
    """The place of the sum in that call."""
    places = [i for i, c in enumerate(trace.computed.computations)
              if c.function == "add" and c.inside]  # fmt: skip
    return places[call]


HALVES = ROWS[:2], ROWS[2:]
SINGLE = traced(False, *HALVES)


def test_a_table_of_the_first_call():
    mine = traced(True, *HALVES)
    one = kept_since(mine, SINGLE, added(mine, 1))
    assert (one.call, one.then, one.taken_then) == (1, 0, False)
    assert "torch.arange" in one.made[1]
    assert "table.cos()" in one.taken[1]
    assert kept_since(mine, SINGLE, added(mine, 0)) is None


def test_one_that_the_step_hands_in_each_time():
    table = ROWS[:2, :, 0]
    mine = traced(False, *HALVES, given=table)
    whole = traced(False, ROWS, given=ROWS[..., 0])
    one = kept_since(mine, whole, added(mine, 1))
    assert (one.call, one.then, one.taken_then) == (1, 0, True)
    assert (
        one.made[1]
        == "table = given if given is None or isinstance(given, nn.Parameter) else given.exp()"
    )


@pytest.mark.parametrize(("mine", "single"), [
    (traced(False, *HALVES), SINGLE),
    (traced(ALIKE, *HALVES), traced(ALIKE, HALVES[0])),  # the same there
    (traced(True, *HALVES), traced(True, *HALVES)),  # kept there, too
    (traced(True, *HALVES), traced(False, *HALVES, given=HALVES[0][..., 0])),
    (traced(False, *HALVES, given=nn.Parameter(ROWS[:2, :, 0])), traced(False, ROWS)),
])  # fmt: skip
def test_what_is_the_same_there_or_kept_there_too(mine, single):
    assert kept_since(mine, single, added(mine, 1)) is None


def test_what_a_call_has_just_given_is_not_kept():
    """A loss is made of it, outside; the single process has another there, of all rows at once."""
    mine, single = traced(False, *HALVES), traced(False, ROWS)
    places = [i for i, c in enumerate(mine.computed.computations) if c.function == "square"]
    assert [mine.computed.computations[place].inside for place in places] == [(), ()]
    assert [kept_since(mine, single, place) for place in places] == [None, None]


def test_what_was_made_for_a_call_is_not_kept():
    """Weights of each part's own rows, made before its call and used after it."""

    def weighed(*parts):
        model = Net(False)
        with ModuleWatch(model) as watching, Computations(watching.now) as computations:
            for x in parts:
                weights = x.exp()
                (model(x) * weights).sum().backward()
        return replace(watching.trace({"x": ROWS}), computed=computations.computed())

    mine = weighed(*HALVES, ROWS[:2])
    places = [i for i, c in enumerate(mine.computed.computations)
              if c.function == "mul" and not c.inside]  # fmt: skip
    assert len(places) == 3
    assert [kept_since(mine, weighed(ROWS), place) for place in places] == [None] * 3


def case(mine, single=SINGLE):
    return SimpleNamespace(traces=SimpleNamespace(ranks={2: mine}, single=single))


def test_in_words():
    mine = traced(True, *HALVES)
    (told,) = kept_in_words(case(mine), 2, added(mine, 1))
    assert "in call 1 of the model on rank 2 " in told
    assert " takes the very tensor that " in told
    assert " made in call 0, and the single process has another there" in told
    given = traced(False, *HALVES, given=ROWS[:2, :, 0])
    (told,) = kept_in_words(
        case(given, traced(False, ROWS, given=ROWS[..., 0])), 2, added(given, 1)
    )
    assert "that was taken there in call 0, made at " in told
    assert kept_in_words(case(mine), 2, added(mine, 0)) == []


@pytest.mark.parametrize("stage", [False, True])
def test_what_a_module_is_handed(stage):
    """A state that the second call of the recurrent module still has; a stage is all of the model
    that its rank calls."""
    found = []
    for keep in (True, False):
        model = Recurrent(keep)
        whole = nn.Sequential(model) if stage else model
        with ModuleWatch(whole) as watching, Computations(watching.now) as computations:
            watching.of_module = computations.of_module
            for x in HALVES:
                model(x).square().sum().backward()
        found.append(replace(watching.trace({"x": ROWS}), computed=computations.computed()))
    seen = tuple(
        SimpleNamespace(rank=0, call=c, forward="wrong", wrong=None, shape=(2, 3, 5))
        for c in found[0].calls
        if c.module.endswith("gru")
        and not c.module.startswith(INTO)
        and c.number == 1
        and c.part == 0
    )
    traces = SimpleNamespace(ranks={0: found[0]}, single=found[1])
    (told,) = kept_for_the_call(SimpleNamespace(traces=traces), seen[0].call.module, seen)
    assert "in call 1 of the model on rank 0 " in told
    assert "`self.state = state.detach()` made in call 0" in told


class Recurrent(nn.Module):
    def __init__(self, keep):
        super().__init__()
        self.keep, self.state = keep, None
        self.gru = nn.GRU(5, 5, batch_first=True).double()

    def forward(self, x):
        before = self.state if self.keep and self.state is not None else x.new_zeros(1, len(x), 5)
        y, state = self.gru(x, before)
        self.state = state.detach()
        return y
