"""Where ranks go another way than the single process inside of a function that both run."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.explainers.by_modules.in_code import branches as words
from sumgrad.diagnose.explainers.by_modules.in_code.branches import branches
from sumgrad.diagnose.modules.where.first_wrong import FirstWrong
from sumgrad.record.computed import (
    computed_as_json,
    computed_as_tensors,
    computed_from,
    computed_together,
)
from sumgrad.subjects.program.watched.computations import Computations

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(1)).double()


def surrogate(x, first):
    y = x.exp()
    if first:  # noqa: SIM108 - two lines
        gain = y.clamp(max=1.0) * 2
    else:
        gain = (y * 2).clamp(max=1.0)
    return gain.sum()


def prepared(x, swap):
    y = x * 3
    if swap:
        y = y.flip(1)
    return y.sum()


def alone(x):
    return (x * 5).sum()


def ran(*calls):
    with Computations(lambda: ((), 0)) as computations:
        for function, *given in calls:
            function(X, *given)
    return computations.computed()


def told(ranks, single, asked=lambda c: True):
    found = branches(dict(enumerate(ranks)), dict.fromkeys(range(len(ranks)), asked), single)
    return [(one.within.partition(" ")[2], one.ranks, [code for _, code in one.here],
             [code for _, code in one.there]) for one in found]  # fmt: skip


def test_lines_of_ranks_alone_and_of_the_single_process_alone():
    found = told([ran((surrogate, True)), ran((surrogate, True))], ran((surrogate, False)))
    assert found == [
        ("surrogate", (0, 1), ["gain = y.clamp(max=1.0) * 2"], ["gain = (y * 2).clamp(max=1.0)"])
    ]


def test_what_some_rank_runs_is_not_lacking():
    ranks = [ran((surrogate, True)), ran((surrogate, False))]
    found = told(ranks, ran((surrogate, False)))
    assert found == [("surrogate", (0,), ["gain = y.clamp(max=1.0) * 2"], [])]


def test_what_no_rank_runs_is_told_of_a_function_that_they_run():
    single = ran((prepared, True), (alone,))
    assert told([ran((prepared, False))], single) == [("prepared", (0,), [], ["y = y.flip(1)"])]


def test_functions_of_the_ranks_alone_and_equal_ways_are_no_branches():
    same = ran((surrogate, True), (prepared, True))
    assert told([same], same) == []
    assert told([ran((alone,))], ran((surrogate, True))) == []


class Shared:
    """Runs in one process; where it is cut, `exchanged` stands in for what that does."""

    def run(self, x, cut):
        y = x * 3
        if cut == "by another method":
            return self.exchanged(y)
        if not cut:
            y = y.flip(1)
        return y.sum()

    def exchanged(self, y):
        return y.cos().sum()


@pytest.mark.parametrize(("cut", "left_out"), [("by another method", False), ("alone", True)])
def test_a_method_of_that_class_stands_in_for_what_is_left_out(cut, left_out):
    shared = Shared()
    (found,) = branches({0: ran((shared.run, cut))}, {0: lambda c: True}, ran((shared.run, "")))
    assert [code for _, code in found.there][:1] == ["y = y.flip(1)"]
    assert not found.here
    assert found.is_left_out == left_out


def ring(y):
    return y.cos() * 0.5


def attended(x, how):
    y = x * 3
    if how == "ring":
        y = ring(y)
    elif how == "all":
        y = y.softmax(-1)
    return y.sum()


@pytest.mark.parametrize(("how", "left_out"), [("ring", False), ("none", True)])
def test_a_function_that_is_called_stands_in_for_what_is_left_out(how, left_out):
    """Once and again, as in two micro-batches; what its caller computes before is another thing."""
    single = ran((attended, "all"))
    (found,) = branches({0: ran((alone,), (attended, how), (alone,), (attended, how))},
                        {0: lambda c: True}, single)  # fmt: skip
    assert [code for _, code in found.there] == ["y = y.softmax(-1)"]
    assert found.is_left_out == left_out


def test_only_what_is_asked_for_is_looked_at():
    mine, single = ran((surrogate, True)), ran((surrogate, False))
    assert told([mine], single, asked=lambda c: False) == []


def test_the_function_is_written_and_read():
    with Computations(lambda: ((), 0)) as computations:
        alone(X)
    held = computations.computed()
    again = computed_from(computed_as_json(held), computed_as_tensors(held))
    assert [c.within for c in again.computations] == [c.within for c in held.computations]
    assert again.ran == held.ran
    assert held.computations[0].within.endswith(" alone")


@pytest.mark.parametrize(("kind", "inside", "modules", "num"), [
    ("backward", (), (), 1),
    ("backward", (), ("n",), 0),  # it is wrong between modules
    ("backward", ("m",), (), 0),
    ("not_reduced", (), (), 0),
])  # fmt: skip
def test_at_the_loss_what_is_in_no_module_is_looked_at(monkeypatch, kind, inside, modules, num):
    def of(first):
        with Computations(lambda: (inside, 0)) as computations:
            surrogate(X, first)
        return SimpleNamespace(computed=computations.computed(), calls=())

    found = FirstWrong(wrong="m", seen=(SimpleNamespace(rank=0),), beside=modules)
    monkeypatch.setattr(words, "looked", lambda case: "look")
    monkeypatch.setattr(words, "owners", lambda case: [])
    monkeypatch.setattr(words, "first_wrong_forward", lambda look: None)
    monkeypatch.setattr(words, "first_wrong_backward", lambda look, failing: found)
    monkeypatch.setattr(words, "asked_between", lambda *_, back: lambda c: False)
    case = SimpleNamespace(traces=SimpleNamespace(ranks={0: of(True)}, single=of(False)))
    said = words.with_branches(case, Diagnosis(cause="c", kind=kind, because=("b",))).because
    assert len(said) == num + 1
    assert said[-1] == "b"
    if num:
        assert said[0].startswith("in surrogate rank 0 calls torch functions at ")
        assert said[0].endswith("`gain = (y * 2).clamp(max=1.0)`, where no rank does")


def test_lines_whose_tensors_are_too_large_to_be_kept_ran_all_the_same():
    """As of the single process, which has all rows."""
    many = torch.zeros(40_000, 3)
    with Computations(lambda: ((), 0)) as computations:
        surrogate(many, True)
    single = computations.computed()
    assert single.computations == ()
    assert told([ran((surrogate, True))], single) == []
    together = computed_together([single, ran((prepared, True))])
    assert told([ran((surrogate, True), (prepared, True))], together) == []


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def applied(x, again):
    y = Doubled.apply(x)
    if again:
        y = Doubled.apply(y)
    return y.sum()


def test_what_applies_a_function_is_a_line_that_runs():
    with_large = ran((applied, True))
    assert "y = Doubled.apply(x)" in {
        code for lines in with_large.ran.values() for _, code in lines
    }
    assert told([ran((applied, False))], ran((applied, False))) == []
    assert told([ran((applied, True))], ran((applied, False))) == [
        ("applied", (0,), ["y = Doubled.apply(y)"], [])
    ]


class Handed(torch.autograd.Function):
    """As one whose backward reduces."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def entered(x, hand):
    y = x * 3
    if hand:
        y = Handed.apply(y)
    return y.sum()


def test_what_hands_on_what_it_takes_is_no_other_way_of_a_forward():
    mine, single = ran((entered, True)), ran((entered, False))
    asked = {0: lambda c: True}
    assert branches({0: mine}, asked, single, back=False) == []
    (one,) = branches({0: mine}, asked, single)
    assert [code for _, code in one.here] == ["y = Handed.apply(y)"]
    (one,) = branches({0: ran((prepared, True))}, asked, ran((prepared, False)), back=False)
    assert [code for _, code in one.here] == ["y = y.flip(1)"]


@pytest.mark.parametrize(("line", "at"), [("y = y.flip(1)", 0), ("y = x * 3", 2), (None, 0)])
def test_another_line_that_gives_what_is_nowhere_comes_first(monkeypatch, line, at):
    traces = [SimpleNamespace(computed=ran((prepared, swap)), calls=()) for swap in (True, False)]
    mine = [c for c in traces[0].computed.computations if c.code == line]
    found = FirstWrong(wrong="m", seen=(SimpleNamespace(rank=0),))
    monkeypatch.setattr(words, "looked", lambda case: "look")
    monkeypatch.setattr(words, "first_wrong_forward", lambda look: found)
    monkeypatch.setattr(words, "asked_between", lambda *_, back: lambda c: True)
    lines = [SimpleNamespace(mine=c) for c in mine]
    monkeypatch.setattr(words, "first_lines", lambda *_, back: lines)
    case = SimpleNamespace(traces=SimpleNamespace(ranks={0: traces[0]}, single=traces[1]))
    shown = [words.line_and_code(c.line, c.code) for c in mine]
    because = ("a", *(f"see {text}" for text in shown), "c")
    said = words.with_branches(case, Diagnosis(cause="c", kind="forward", because=because)).because
    assert said[at].startswith("in prepared rank 0 calls torch functions at ")
    assert [text for text in said if not text.startswith("in prepared")] == [*because]


def guarded(x, safe):
    if safe:
        try:
            x = x * 3
            return x + x.sin()
        finally:
            safe = False
    x = x * 3
    y = x + x.sin()
    return y * 2


def test_the_same_words_in_two_branches_are_no_other_way():
    assert told([ran((guarded, False))], ran((guarded, True))) == [
        ("guarded", (0,), ["return y * 2"], [])
    ]
    assert told([ran((guarded, True))], ran((guarded, False))) == [
        ("guarded", (0,), [], ["return y * 2"])
    ]


@pytest.mark.parametrize(("function", "single", "at"), [
    ((applied, True), (applied, False), 1),  # a Function alone: after all else
    ((prepared, True), (prepared, False), 0),
])  # fmt: skip
def test_functions_in_place_of_nothing_come_last(monkeypatch, function, single, at):
    traces = [SimpleNamespace(computed=ran(one), calls=()) for one in (function, single)]
    found = FirstWrong(wrong="m", seen=(SimpleNamespace(rank=0),))
    monkeypatch.setattr(words, "looked", lambda case: "look")
    monkeypatch.setattr(words, "owners", lambda case: [])
    monkeypatch.setattr(words, "first_wrong_forward", lambda look: None)
    monkeypatch.setattr(words, "first_wrong_backward", lambda look, failing: found)
    monkeypatch.setattr(words, "asked_between", lambda *_, back: lambda c: True)
    case = SimpleNamespace(traces=SimpleNamespace(ranks={0: traces[0]}, single=traces[1]))
    said = words.with_branches(case, Diagnosis(cause="c", kind="backward", because=("b",))).because
    assert [text.endswith("where the single process calls none") for text in said] == [
        at == 0,
        at == 1,
    ]


def cut_or_padded(x, short):
    x = x * 2
    if short:  # noqa: SIM108 - two lines
        x = x[:2]
    else:
        x = x.neg()
    return x.sum()


def whole(x, short):
    return ran((cut_or_padded, short))


def test_ranks_are_told_with_the_lines_that_they_run():
    single = ran((prepared, False))
    single = replace(single, ran={**single.ran, **dict.fromkeys(whole(X, True).ran, ())})
    found = told([whole(X, True), whole(X, False)], single)
    assert [(ranks, here) for _, ranks, here, _ in found] == [
        ((0, 1), ["x = x * 2", "return x.sum()"]), ((0,), ["x = x[:2]"]), ((1,), ["x = x.neg()"])
    ]  # fmt: skip
