"""A Function that gives something else than the derivative of its forward: which, and in words."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.explainers.by_modules.backwards import derivatives as words
from sumgrad.diagnose.explainers.by_modules.backwards import own_backward
from sumgrad.diagnose.modules.autograd.derivatives import no_derivatives, own_formulas
from sumgrad.diagnose.modules.where.first_wrong import FirstWrong
from sumgrad.record.adjoint import Adjoint
from sumgrad.record.computed import Computation, Computed
from sumgrad.record.derivative import Derivative, Off
from sumgrad.record.ways import Passed

AT, BACK = ("/x/a.py:7", "y = Own.apply(x)"), "/x/a.py:3"
MIXED = Off(differ=4, numel=12)
SCALED = Off(differ=12, numel=12, factors=(2.0,))
OWN = Passed(function="Own", written=BACK, own=True)


def one(agrees=False, *, function="Own", off=MIXED, argument="x", call=0, leaf=False):
    return Derivative(
        function=function, line=AT, written=BACK, call=call, argument=argument, agrees=agrees,
        off=None if agrees else off, leaf=leaf,
    )  # fmt: skip


def traces(*ranks, single=()):
    held = [SimpleNamespace(computed=Computed(derivatives=own)) for own in (*ranks, single)]
    return SimpleNamespace(ranks=dict(enumerate(held[:-1])), single=held[-1], adjoints=())


def case(*ranks, single=()):
    return SimpleNamespace(traces=traces(*ranks, single=single), known={})


def together(*given, argument="x", holders=(1,), leaf=False):
    """Of a Function that two ranks ran again; by direction, what the first's result makes of it is
    1, 2, 3, 4, and what the second's makes of it 1, 0, -1, 5."""
    slopes = ((1.0, 1.0), (2.0, 0.0), (3.0, -1.0), (4.0, 5.0))
    return Adjoint(
        function="Own", written=BACK, line=AT, call=0, argument=argument, leaf=leaf, ranks=(0, 1),
        holders=holders, slopes=slopes, given=tuple((float(x),) for x in given),
    )  # fmt: skip


def case_of(*adjoints):
    found = case((), ())
    found.traces.adjoints = adjoints
    return found


RIGHT, HALF, THIRD = (2, 2, 2, 9), (1, 1, 1, 4.5), (2 / 3, 2 / 3, 2 / 3, 3)


def test_what_all_ranks_say_together_counts_as_what_one_says():
    wrong = case_of(together(1, 2, 3, 4), together(*RIGHT, argument="y"))
    found = words.wrong_functions(wrong, [OWN], None)
    assert found.said.endswith("is not the derivative of its forward")
    first, second = found.because
    assert "by finite differences on all its ranks, in all 1 calls" in first
    assert "; for y it is;" in first
    assert second.endswith(
        "on rank 1 what it gives for x counts 1 times what rank 0's result was given, 0 times what "
        "rank 1's result was given; the derivative counts each once"
    )
    assert words.wrong_functions(case_of(together(1, 2, 3, 4, leaf=True)), [OWN], None) is None
    assert not words.are_the_derivative(wrong)
    assert words.are_the_derivative(case_of(together(*RIGHT))) == {("Own", BACK)}
    assert not words.are_the_derivative(case_of(together(*HALF)))  # nor is it accused
    assert words.wrong_functions(case_of(together(*HALF)), [OWN], None) is None


def test_where_moved_numbers_went_says_more(monkeypatch):
    mover = SimpleNamespace(function="Own", written=BACK, crossed=None, wrong=())
    monkeypatch.setattr(words, "wrong_movers", lambda _: {("Own", BACK): mover})
    monkeypatch.setattr(words, "_only_scales", lambda _: False)
    monkeypatch.setattr(words, "how_they_bring_back", lambda _: ["where they went"])
    for sure in (True, False):
        monkeypatch.setattr(words, "_is_sure", lambda _, sure=sure: sure)
        found = words.wrong_functions(case_of(together(1, 2, 3, 4)), [OWN], None)
        assert (found.because == ("where they went",)) == sure
        assert (words.OTHER_WAY in found.said) == sure


@pytest.mark.parametrize("told", [True, False])
def test_what_nothing_could_be_compared_with_is_not_said_to_be_right(monkeypatch, told):
    own = own_backward
    look = SimpleNamespace(
        seen={}, modules=["m"], sources={}, forward=lambda _: "right" if told else "untold"
    )
    cells = [SimpleNamespace(name="m.w", rank=0)]
    for name, given in (
        ("looked_by_rows", look), ("first_wrong_forward", None), ("first_wrong_backward", None),
        ("owners", ["m"]), ("own_makers", "F"), ("wrong_before_it_is_reduced", True),
        ("wrong_makers", None), ("lines_inside", []), ("made_by", []),
    ):  # fmt: skip
        monkeypatch.setattr(own, name, lambda *_, given=given: given)
    monkeypatch.setattr(own, "explained", lambda _, diagnosis: diagnosis)
    found = list(own.own_backward_goes_wrong(SimpleNamespace(failing_cells=cells), None))
    assert len(found) == told
    assert all("what all 1 modules that could be compared" in one.cause for one in found)


def test_a_factor_that_may_be_meant_beside_more_than_a_factor_is_shown_and_no_cause():
    found = words.wrong_functions(case_of(together(*THIRD)), [OWN], None)
    assert found.said == ""
    assert found.because[1].endswith("on rank 1 what it gives for x is 1/3 times the derivative")
    assert words.wrong_functions(case_of(together(*THIRD)), [OWN], 1 / 3).said
    assert words.wrong_functions(case_of(together(*THIRD)), [OWN], 1 / 2) is None


def test_what_is_no_derivative_in_the_single_process_either_is_meant_so():
    wrong = no_derivatives(traces((one(),), (one(True, argument="y"), one())))
    assert [(o.function, [rank for rank, _ in o.wrong]) for o in wrong.values()] == [
        ("Own", [0, 1])
    ]
    assert not no_derivatives(traces((one(),), single=(one(),)))
    assert no_derivatives(traces((one(),), single=(one(True),)))
    assert no_derivatives(traces((one(),), single=(one(function="Other"),)))
    assert not no_derivatives(traces((one(True),)))


@pytest.mark.parametrize(
    ("told", "scale"),
    [
        ((one(off=SCALED),), 2.0),
        ((one(off=SCALED), one(True, argument="y")), 2.0),
        ((one(off=SCALED), one(off=Off(differ=2, numel=2, factors=(2.00001, 2.0)))), 2.0),
        ((one(off=SCALED), one(off=Off(differ=2, numel=2, factors=(3.0,)))), None),
        ((one(off=SCALED), one()), None),
        ((one(off=SCALED), one(off=None)), None),
        ((one(off=Off(differ=2, numel=2, factors=(1.0, 0.0))),), None),
    ],
)
def test_a_scale_is_the_one_factor_of_all_that_is_wrong(told, scale):
    (formula,) = own_formulas(traces(told).ranks).values()
    assert formula.scale == scale


@pytest.mark.parametrize(
    ("off", "ratio", "accused"),
    [
        (MIXED, None, True),
        (MIXED, 2.0, False),  # it is off by a factor alone
        (SCALED, None, False),  # by more than that
        (SCALED, 2.0, True),
        (SCALED, 3.0, False),
    ],
)
def test_what_only_scales_is_accused_of_that_factor_alone(off, ratio, accused):
    found = words.wrong_functions(case((one(off=off),)), [OWN], ratio)
    assert (found is not None) == accused
    if found is not None:
        assert found.said == (
            "the backward of Own (backward at a.py:3) is not the derivative of its forward"
        )
        assert len(found.because) == 2


def test_what_a_parameter_alone_is_given_wrong_is_no_tensors_way():
    at = case((one(argument="w", leaf=True), one(True)))
    assert words.wrong_functions(at, [OWN], None) is None
    assert words.wrong_functions(at, [OWN], None, of_parameters=True)


@pytest.mark.parametrize("state", ["right", "wrong", "untold"])
def test_an_argument_that_gets_what_is_right_is_no_mistake(monkeypatch, state):
    value = torch.arange(12.0).reshape(4, 3)
    calls = SimpleNamespace(computations=[SimpleNamespace(takes=("a shape", 5))], values={5: value})
    once = [value]  # what stands at one place alone
    states = SimpleNamespace(
        backward=lambda rank, number: state if number == 5 else "wrong",
        beside=lambda *_: (once[0], once[0]),
    )
    lines = SimpleNamespace(computed=lambda rank: calls, states=states)
    monkeypatch.setattr(words, "known_lines", lambda _: lines)

    def found(off=MIXED, **place):
        return words.wrong_functions(case((replace(one(off=off), **place),)), [OWN], None)

    assert (found(place=0, at=1) is None) == (state == "right")
    once[0] = value[:2]
    assert found(place=0, at=1)  # some of it is repeated, and any gradient would do
    assert found(place=0, at=0)  # no tensor that is known
    assert found(place=0, at=2)
    assert found()  # told of several
    scaled = case((replace(one(off=SCALED), place=0, at=1),))
    assert words.wrong_functions(scaled, [OWN], 2.0)  # right but for a factor


def test_factors_of_each_calls_own_are_a_scale_too():
    half = Off(differ=2, numel=2, factors=(0.5,))
    at = case((one(off=SCALED),), (one(off=half),))
    assert words.wrong_functions(at, [OWN], None) is None
    assert words.wrong_functions(at, [OWN], 2.0) is None


def test_only_what_is_on_the_way_and_the_users_own_is_accused():
    at = case((one(),))
    assert not words.wrong_functions(at, [], None)
    assert not words.wrong_functions(at, [Passed(function="Own", written=BACK)], None)
    assert not words.wrong_functions(at, [Passed(function="Mul", own=True)], None)
    assert words.are_the_derivative(case((one(True),))) == {("Own", BACK)}
    assert words.are_the_derivative(case((one(True),), (one(),))) == set()


@pytest.mark.parametrize(
    ("off", "said"),
    [
        (MIXED, "differs from it in at least 4 of 12 numbers"),
        (
            Off(differ=4, numel=12, where=((0, (1, 2)), (1, (0,))), zero=True),
            "differs from it in at least 4 of 12 numbers, these at 1-2 of dimension 0 and 0 of "
            "dimension 1, which are zero",
        ),
        (Off(differ=4, numel=12, moved=True), "has the numbers of the derivative in other places"),
        (Off(differ=4, numel=12, factors=(-0.5000001,)), "is -1/2 times the derivative"),
        (
            Off(differ=4, numel=12, factors=(1.0, -1e-9)),
            "is 1 times its first result's, 0 times its second result's share of the derivative",
        ),
    ],
)
def test_in_which_way_in_words(off, said):
    told = (one(True, argument="y"), one(off=None), one(off=off, call=3), one(off=off, call=4))
    formulas = [*no_derivatives(traces((), told)).values()]
    first, second = words.how_they_are_off(formulas)
    assert first == (
        "what the backward of Own gives for x is not the derivative of its forward, by finite "
        "differences, in all 3 calls that were looked at; for y it is; it is called "
        "at a.py:7 `y = Own.apply(x)`"
    )
    assert second == f"for one, in call 3 of a.py:7 on rank 1 what it gives for x {said}"
    assert words.functions_in_words(formulas) == "Own (backward at a.py:3)"


def test_in_how_many_calls():
    told = (one(call=0), one(call=0, argument="y"), one(True, call=1), one(call=2))
    (text, _) = words.how_they_are_off([*no_derivatives(traces(told, told[2:3])).values()])
    assert (
        "finite differences, in at least 1 of 4 calls that were looked at; it is called at" in text
    )
    told = (one(call=0), one(True, call=1), one(call=2))
    (text, _) = words.how_they_are_off([*no_derivatives(traces(told, told[2:3])).values()])
    assert "in at least 3 of 4 calls that were looked at; it is called at" in text


def test_a_surrogate_is_none_in_the_single_process_either():
    at = case((one(),), single=(one(function="Fire"), one(True, function="Gate")))
    found = words.wrong_functions(at, [OWN], None)
    assert found.because[-1].startswith("that of Fire, which the single process runs, is none")
    for single in ((), (one(True, function="Fire"),), (one(),)):
        found = words.wrong_functions(case((one(),), single=single), [OWN], None)
        assert found is None or "is none either" not in "".join(found.because)


def test_where_no_numbers_are_known_no_more_is_said():
    formulas = [*no_derivatives(traces((one(off=None),))).values()]
    assert len([*words.how_they_are_off(formulas)]) == 1


def test_beside_a_cause_that_leaves_it_open(monkeypatch):
    monkeypatch.setattr(words, "looked", lambda _: None)

    def beside(at, **more):
        held = Diagnosis(**{"cause": "the backward", "kind": "backward", **more})
        return words.with_formulas(at, held).because

    assert len(beside(case((one(),)))) == 2
    assert beside(case((one(),)), because=("last",))[-1] == "last"
    assert beside(case((one(),)), kind="factor", because=("first",))[0] == "first"
    assert not beside(case((one(),)), kind="forward")
    assert not beside(case((one(off=SCALED),)))
    assert not beside(case((one(True),)))
    assert not beside(case((one(),)), cause=f"it is {words.SAID}")
    assert not beside(SimpleNamespace(traces=None))
    monkeypatch.setattr(words, "looked", lambda _: "look")
    monkeypatch.setattr(words, "owners", lambda _: [])
    at = FirstWrong(wrong="m", seen=(), beside=("n",))
    monkeypatch.setattr(words, "first_wrong_backward", lambda *_: at)
    monkeypatch.setattr(words, "first_lines", lambda *_, back: [])
    assert not beside(case((one(),)))  # it goes wrong elsewhere

    def called(*inside):
        c = Computation(function="Own", line="", code="", takes=(), made_at=(), written=BACK,
                        inside=inside)  # fmt: skip
        own = Computed(derivatives=(one(),), computations=(c,))
        held = {0: SimpleNamespace(computed=own)}
        single = SimpleNamespace(computed=Computed())
        found = SimpleNamespace(ranks=held, single=single, adjoints=())
        return SimpleNamespace(traces=found, known={})

    said = beside(called(), kind="loss_weights", because=("first",))
    assert (len(said), said[-1]) == (3, "first")  # rows are weighed otherwise there
    assert beside(called("m"), kind="loss_weights", because=("first",)) == ("first",)
    assert len(beside(called())) == 0
    at = FirstWrong(wrong="m", seen=())
    assert len(beside(called())) == 2  # what is wrong is the loss
