"""What is said of a wrong forward, and what is idle beside something that says more."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.explainers.by_modules import forward
from sumgrad.diagnose.explainers.by_modules.backwards.derivatives import SAID
from sumgrad.diagnose.explainers.by_modules.backwards.passed import _torchs_formulas
from sumgrad.diagnose.explainers.by_modules.forwards import entering, in_between
from sumgrad.diagnose.explainers.by_modules.in_code import computed
from sumgrad.diagnose.explainers.by_modules.in_code.lines import in_words
from sumgrad.diagnose.explainers.by_modules.rows.odd_data import OddData
from sumgrad.diagnose.modules.in_code.lines import AtLine
from sumgrad.diagnose.modules.values.matching import Match
from sumgrad.diagnose.modules.values.seen import Seen
from sumgrad.diagnose.modules.where.first_wrong import FirstWrong
from sumgrad.diagnose.modules.where.paths import paths_of
from sumgrad.record.computed import Computation
from sumgrad.record.trace import Call
from sumgrad.record.ways import Passed

CASE = SimpleNamespace(traces=None)


def seen(rank, state="wrong", *, module="m", ordered=True, number=0):
    call = Call(module=module, number=number, part=0, operation=0, operation_back=0,
                recomputed=False)  # fmt: skip
    return Seen(rank=rank, call=call, shape=(2, 3), forward=state, in_order=ordered)


def right_ranks(*held):
    look = SimpleNamespace(seen={"m": held})
    case = SimpleNamespace(traces=None)
    return list(forward._ranks_that_are_right(case, look, FirstWrong(wrong="m", seen=()), ()))


def test_a_rank_is_right_where_all_its_calls_are_row_by_row():
    assert right_ranks(seen(0), seen(1, "right")) == ["on rank 1 it is right"]
    assert right_ranks(seen(0), seen(1, "right"), seen(1, "untold", number=1)) == []
    assert right_ranks(seen(0), seen(1, "right", ordered=False)) == []
    where = Match(found=torch.ones(1, 2, dtype=torch.bool), columns=(0, 3),
                  picked=torch.tensor([1]), empty=torch.zeros(1, dtype=torch.bool))  # fmt: skip
    part = replace(seen(1, "right"), where=where)
    assert right_ranks(seen(0), replace(part, shape=(1, 3))) == ["on rank 1 it is right"]
    assert right_ranks(seen(0), part) == ["on rank 1 it is right, where a gradient reaches it"]


@pytest.mark.parametrize(
    ("state", "ordered", "ranks", "right"),
    [("right", True, (0,), [1]), ("right", False, (0, 1), []), ("untold", True, (0, 1), [])],
)
def test_only_ranks_where_it_enters_wrong_are_told_of(state, ordered, ranks, right, monkeypatch):
    into = [seen(0), seen(1, state, ordered=ordered)]
    monkeypatch.setattr(entering, "gone_into", lambda *_: into)
    found, entered = entering.where_it_enters_wrong(
        CASE, FirstWrong(wrong="m", seen=(seen(0), seen(1)))
    )
    assert (found.ranks, entered) == (ranks, right)


@pytest.mark.parametrize(
    ("first", "ordered", "numbers", "goes_in"),
    [
        ("right", True, {0}, "right"),
        ("wrong", True, {0, 1}, "wrong"),
        ("untold", True, {0, 1}, "wrong"),
        ("right", False, {0, 1}, "wrong"),
    ],
)
def test_what_is_wrong_in_its_first_call_makes_what_goes_into_the_next(
    monkeypatch, first, ordered, numbers, goes_in
):
    """As of a cell whose state goes into it again."""
    into = [seen(0, first, ordered=ordered), seen(0, number=1)]
    monkeypatch.setattr(entering, "gone_into", lambda *_: into)
    monkeypatch.setattr(entering, "looked", lambda _: None)
    both = FirstWrong(wrong="m", seen=(seen(0), seen(0, number=1)))
    found, entered = entering.where_it_enters_wrong(CASE, both)
    assert ({s.call.number for s in found.seen}, entered) == (numbers, [])
    assert entering.what_goes_into(CASE, found) == goes_in


@pytest.mark.parametrize(
    ("state", "beside"), [("wrong", ("before",)), ("right", ("m.in", "before"))]
)
def test_what_runs_inside_comes_after_what_goes_in(monkeypatch, state, beside):
    monkeypatch.setattr(entering, "gone_into", lambda *_: [seen(0, state)])
    one = FirstWrong(wrong="m", seen=(seen(0),), beside=("m.in", "before"))
    assert entering.where_it_enters_wrong(CASE, one)[0].beside == beside


def output(monkeypatch, *, lacking=(), enters=False):
    for name, said in (("_lacking_below", [*lacking]), ("_without_a_graph", []),
                       ("another_output", []), ("picked_in_words", []), ("features_in_words", []),
                       ("in_other_places", []), ("scaled_in_words", []),
                       ("cut_in_words", []), ("changed_in_place", [])):  # fmt: skip
        monkeypatch.setattr(forward, name, lambda *_, said=said: said)
    monkeypatch.setattr(forward, "no_slice", lambda *_: "no slice")
    look = SimpleNamespace(paths=paths_of(("m",), {}), forward=lambda _: "wrong")
    found = FirstWrong(wrong="m", seen=(seen(0),))
    return list(forward._output(CASE, look, found, ["look there"], enters=enters))


def test_where_to_look_is_idle_beside_what_is_missing(monkeypatch):
    assert output(monkeypatch) == ["no slice", "look there"]
    assert output(monkeypatch, lacking=["some is missing"]) == ["some is missing", "no slice"]
    assert output(monkeypatch, enters=True) == []


def line(**more):
    mine = Computation(function="mul", line="/x/step.py:7", code="a * b", takes=(0, 1),
                       made_at=(("", ""),) * 2, gives=(2,), site="7")  # fmt: skip
    return AtLine(rank=0, mine=mine, place=0, **more)


def lines_on_the_way(monkeypatch, lines=(), made=(), *, run=(), leads=False):
    monkeypatch.setattr(in_between, "first_lines", lambda *_, back: list(lines))
    monkeypatch.setattr(in_between, "entered_wrong", lambda *_: ())
    monkeypatch.setattr(in_between, "arguments_there", lambda *_: [])
    monkeypatch.setattr(in_between, "masked_in_words", lambda *_: [])
    monkeypatch.setattr(in_between, "kept_in_words", lambda *_: [])
    monkeypatch.setattr(in_between, "kept_for_the_call", lambda *_: [])
    monkeypatch.setattr(in_between, "made_before", lambda *_: list(made))
    monkeypatch.setattr(in_between, "run_in_words", lambda *_: list(run))
    monkeypatch.setattr(in_between, "lines_between", lambda *_: ["lines"])
    look = SimpleNamespace(seen={"m": [seen(0)]})
    found = FirstWrong(wrong="m", seen=(seen(0),))
    return list(in_between.in_between(CASE, look, found, ["parts"], leads=leads))


def test_lines_in_between_are_idle_beside_the_one(monkeypatch):
    assert lines_on_the_way(monkeypatch) == ["lines", "parts"]
    assert lines_on_the_way(monkeypatch, [line()], made=["made"], leads=True) == ["parts"]
    assert lines_on_the_way(monkeypatch, [line()])[1:] == ["parts"]
    assert lines_on_the_way(monkeypatch, [line(told=False)])[1:] == ["lines", "parts"]


def test_what_ranks_ran_says_more_than_the_last_line_of_it(monkeypatch):
    assert lines_on_the_way(monkeypatch, made=["made"], run=["run"]) == ["run", "parts"]
    assert lines_on_the_way(monkeypatch, [line()], made=["made"], run=["run"])[1:] == ["parts"]


def test_what_is_computed_inside_of_what_goes_in_follows_from_that(monkeypatch):
    own = line(told=False)
    inside = replace(own, mine=replace(own.mine, inside=("", "m")))
    assert lines_on_the_way(monkeypatch, [inside], made=["made"])[::2] == ["made", "parts"]
    assert lines_on_the_way(monkeypatch, [own], made=["made"])[1:] == ["made", "parts"]


def test_what_made_what_goes_in_comes_before_what_a_library_makes_of_it(monkeypatch):
    assert lines_on_the_way(monkeypatch, made=["made"]) == ["made", "parts"]
    assert len(lines_on_the_way(monkeypatch, [line()], made=["made"])) == 2  # the line, and parts
    own = line()
    of_library = replace(own, mine=replace(own.mine, line="/v/site-packages/lib/model.py:3"))
    assert lines_on_the_way(monkeypatch, [of_library], made=["made"]) == ["made", "parts"]
    assert len(lines_on_the_way(monkeypatch, [of_library])) == 2


@pytest.mark.parametrize(("below", "told"), [("right", False), ("untold", True)])
def test_that_nothing_leads_to_it_is_said_where_nothing_right_does(below, told, monkeypatch):
    monkeypatch.setattr(forward, "what_goes_into", lambda *_: "untold")
    look = SimpleNamespace(
        paths=paths_of(("near", "m"), {"m": ("near",)}), sources={}, seen={},
        forward=lambda m: below if m == "near" else "wrong",
    )  # fmt: skip
    text, _ = forward._start_of_forward(CASE, look, FirstWrong(wrong="m", seen=(seen(0),)))
    assert ("no module that leads to it is known to be right" in text) == told


def test_beside_a_line_an_open_end_says_no_more(monkeypatch):
    monkeypatch.setattr(computed, "lines_that_differ", lambda _: [SimpleNamespace(rank=0, place=3)])
    monkeypatch.setattr(computed, "_in_words", lambda *_: "a line")
    monkeypatch.setattr(computed, "_sent_from", lambda *_: ["made there"])
    monkeypatch.setattr(computed, "kept_in_words", lambda _, rank, place: [f"kept {rank} {place}"])
    first = "made there", "kept 0 3", "w is wrong"
    for kind, because in (("open", first), ("forward", (*first, "no factor"))):
        asked = Diagnosis(cause="open: w is wrong", kind=kind, because=("no factor",))
        assert computed.with_the_line(CASE, asked).because == because


def test_a_line_comes_after_a_function_that_is_proved_wrong(monkeypatch):
    monkeypatch.setattr(computed, "lines_that_differ", lambda _: [SimpleNamespace(rank=0, place=3)])
    monkeypatch.setattr(computed, "_at_the_loss", lambda _: True)
    monkeypatch.setattr(computed, "_in_words", lambda *_: "a line")
    monkeypatch.setattr(computed, "_where_from", lambda *_: ["made there"])
    proved = f"wrong from there: the backward of F is {SAID}"
    asked = Diagnosis(cause=proved, kind="backward", because=("how",))
    told = computed.with_the_line(CASE, asked)
    assert (told.cause, told.because) == (proved, ("how", "a line", "made there"))


@pytest.mark.parametrize(("inside", "leads"), [(True, False), (False, True)])
def test_what_a_module_is_handed_comes_before_the_lines_in_it(monkeypatch, inside, leads):
    monkeypatch.setattr(
        computed, "lines_that_differ", lambda _: [SimpleNamespace(rank=0, mine=0, place=3)]
    )
    monkeypatch.setattr(computed, "_in_words", lambda *_: "a line")
    monkeypatch.setattr(computed, "_sent_from", lambda *_: ["made there"])
    monkeypatch.setattr(computed, "kept_in_words", lambda *_: [])
    monkeypatch.setattr(computed, "looked", lambda _: "look")
    monkeypatch.setattr(computed, "first_wrong_forward", lambda _: "found")
    monkeypatch.setattr(computed, "is_handed_before", lambda *_: inside)
    asked = Diagnosis(cause=f"x is another {computed.ROWS_ALONE}", kind="forward", because=("b",))
    told = computed.with_the_line(CASE, asked)
    assert (told.cause == "a line") == leads
    assert "a line" in (told.cause, told.because[0])


def test_of_torchs_own_formula_what_it_kept_is_looked_at():
    said = list(in_words([line(back=True, at=(1,))]))
    assert said[0].endswith("is right on rank 0, and that of its second argument is wrong")
    assert said[1].startswith("it is torch's own formula: look at what changes what it kept")
    one = line(back=True, at=(1,))
    own = replace(one, mine=replace(one.mine, written="/x/step.py:3"))
    assert len(list(in_words([own]))) == 1


def test_arguments_in_a_line_are_called_by_their_names():
    one = line(back=True, at=(0, 1))
    (said, _) = in_words([replace(one, mine=replace(one.mine, keys=("", "weight")))])
    assert "that of its arguments first, weight is wrong" in said


@pytest.mark.parametrize("unwanted", [True, False])
def test_places_are_asked_for_where_what_comes_back_belongs_nowhere(unwanted):
    passed = [Passed(function="Scatter", line="/x/step.py:9", code="x.scatter(1, at, y)")]
    (said,) = _torchs_formulas(passed, unwanted=unwanted)
    assert ("is right where no place is written twice" in said) == unwanted
    assert ("look for what autograd does not see" in said) == (not unwanted)


@pytest.mark.parametrize(("beside", "begins"), [(True, "nothing else"), (False, "no function")])
def test_of_functions_that_are_right_it_is_not_said_that_there_are_none(beside, begins):
    passed = [Passed(function="Scatter", line="/x/step.py:9", code="x.scatter(1, at, y)")]
    (said,) = _torchs_formulas(passed, unwanted=False, beside=beside)
    assert said.startswith(f"{begins} with a backward of its own runs there")


@pytest.mark.parametrize(("back", "said"), [(3, []), (None, ["these may be"])])
def test_what_no_gradient_reaches_may_be_a_halo(monkeypatch, back, said):
    monkeypatch.setattr(forward, "what_goes_into", lambda *_: "wrong")
    one = seen(0)
    one = replace(one, wrong=torch.tensor([1]), call=replace(one.call, operation_back=back))
    look = SimpleNamespace(sources={}, seen={"m": [one]}, modules=("m",))
    _, told = forward._start_of_forward(CASE, look, FirstWrong(wrong="m", seen=(one,)))
    assert [text[:12] for text in told] == said


def test_beside_factors_a_line_tells_of_its_ranks_too(monkeypatch):
    monkeypatch.setattr(computed, "lines_that_differ", lambda _: [SimpleNamespace(rank=2, place=0)])
    monkeypatch.setattr(computed, "_in_words", lambda *_: "a line")
    monkeypatch.setattr(computed, "_sent_from", lambda *_: ["made there"])
    monkeypatch.setattr(computed, "kept_in_words", lambda *_: [])
    asked = Diagnosis(cause="c", kind="loss_weights", ranks=(1,), because=("b",))
    told = computed.with_the_line(CASE, asked)
    assert (told.cause, told.ranks, told.because) == ("c", (1, 2), ("a line", "made there", "b"))


@pytest.mark.parametrize(("module", "is_sure", "because"), [
    ("m", True, ("the data", "it is called from", "no slice")),
    ("m", False, None),  # it may be meant
    ("around", True, ("the data",)),
    ("around", False, ("the data",)),
])  # fmt: skip
def test_data_that_are_surely_others_come_before_what_is_made_of_them(
    monkeypatch, module, is_sure, because
):
    idle = ("where_it_enters_wrong", "_start_of_forward", "_parts_below", "collective_at_fault",
            "misplaced_in_words", "_lacking_below", "scaled_outside", "changed_by_hooks",
            "joined_in_words", "too_much", "in_place_of_in_words", "handed_other_weights",
            "whole_on_each", "reading", "lines_that_differ", "solved_in_words",
            "handed_for_wrong_rows_in_words", "reordered_in_words", "is_set_otherwise",
            "lines_are_left_out", "_of_other_classes", "_in_another_mode", "_right_again",
            "called_on_ranks_alone", "handed_otherwise", "_output", "held_beside",
            "_ranks_that_are_right", "in_between")  # fmt: skip
    for name in idle:
        monkeypatch.setattr(forward, name, lambda *_, **__: ())
    found = FirstWrong(wrong="m", seen=(seen(0),))
    monkeypatch.setattr(forward, "where_it_enters_wrong", lambda *_: (found, ()))
    monkeypatch.setattr(forward, "_start_of_forward", lambda *_: ("it goes wrong in m", ()))
    monkeypatch.setattr(forward, "_parts_below", lambda *_: ((), ""))
    monkeypatch.setattr(forward, "collective_at_fault", lambda *_, **__: None)
    monkeypatch.setattr(forward, "no_slice", lambda *_: "no slice")
    monkeypatch.setattr(forward, "called_from", lambda *_, **__: ["it is called from"])
    odd = OddData(module=module, said=("the data",), is_sure=is_sure)
    monkeypatch.setattr(forward, "odd_data", lambda *_: odd)
    look = SimpleNamespace(modules=("m",), seen={"m": [seen(0, "right")]}, sources={})
    told = forward._forward(CASE, look, found)
    if because is None:
        assert told.cause == "it goes wrong in m"
        assert told.because == ("it is called from", "the data")
        monkeypatch.setattr(forward, "solved_in_words", lambda *_: ["a line: were it another"])
        monkeypatch.setattr(forward, "in_between", lambda *_, leads: ["lines"][leads:])
        told = forward._forward(CASE, look, found)
        assert told.cause == "a line: were it another"
        assert told.because == ("as seen from modules: it goes wrong in m", "it is called from",
                                "the data")  # fmt: skip
        monkeypatch.setattr(forward, "lines_that_differ", lambda _: ["a line that is known"])
        assert forward._forward(CASE, look, found).cause == "it goes wrong in m"
    else:
        assert told.cause == f"in the forward what enters {module} is another already on some ranks"
        assert told.because == because
