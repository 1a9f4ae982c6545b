"""Choices that are others in a call of a rank than in the single process's call for the same."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.explainers.by_modules.forwards import settings
from sumgrad.diagnose.modules.values.seen import Seen
from sumgrad.diagnose.modules.weights.settings import turned_otherwise
from sumgrad.diagnose.modules.where.first_wrong import FirstWrong
from sumgrad.diagnose.modules.where.look import look_into
from sumgrad.record.trace import INTO, Call, Trace, Traces, read_trace, write_trace
from sumgrad.subjects.program.watched.watch import ModuleWatch
from torch import nn

LOOK = SimpleNamespace(sources={})
G = torch.Generator().manual_seed(13)
FIRST, SECOND = (torch.randn(4, 3, generator=G).double() for _ in range(2))


def trace(*held, settings=None, turned=(), batch=None):
    """held: what goes into `m` in each call, and whether it is computed again."""
    calls, outputs = [], []
    for number, (data, again) in enumerate(held):
        for name in (f"{INTO}m", "m.inner", "m"):
            calls.append(Call(module=name, number=number, part=0, operation=0, operation_back=0,
                              recomputed=again))  # fmt: skip
            outputs.append(data)
    return Trace(calls=tuple(calls), outputs=tuple(outputs), sources={}, batch=batch,
                 gradients=tuple(torch.ones_like(o) for o in outputs),
                 settings={"m": settings or {}},
                 turned={"m": turned} if turned else {})  # fmt: skip


BOTH = {"on": ("True", "False")}
SINGLE = trace((FIRST, False), (SECOND, False), settings=BOTH,
               turned=({"on": "True"}, {"on": "False"}), batch={"x": torch.arange(4)})  # fmt: skip


def told(*ranks, single=SINGLE, wrong=((0, 1),)):
    traces = Traces(tier="structure", step=0, ranks=dict(enumerate(ranks)), single=single)
    into = look_into(traces, "float64", (), "m")
    found = turned_otherwise(traces, "m", into, set(wrong))
    return [(o.attribute, o.rank, o.call, o.now, o.was, o.more, o.left) for o in found]


def rank(*values, again=(), settings=BOTH, held=None):
    held = held or (FIRST[:2], SECOND[:2], FIRST[2:])
    data = [(data, i in again) for i, data in enumerate(held[: len(values)])]
    return trace(*data, settings=settings, turned=tuple({"on": v} for v in values))


def test_a_choice_that_is_another_in_a_call_for_the_same():
    assert told(rank("True", "True")) == [("on", 0, 1, "True", "False", 0, False)]
    assert told(rank("True", "False")) == []
    assert told(rank("False", "False")) == []  # another call of it is not looked at
    two = told(rank("True", "True"), rank("True", "True"), wrong=((0, 1), (1, 1)))
    assert two == [("on", 0, 1, "True", "False", 1, False)]


def test_a_call_that_two_tensors_go_into_counts_once():
    def twice(one):
        into = [i for i, c in enumerate(one.calls) if c.module == f"{INTO}m"]
        return replace(one, calls=one.calls + tuple(replace(one.calls[i], part=1) for i in into),
                       outputs=one.outputs + tuple(one.outputs[i] for i in into),
                       gradients=one.gradients + tuple(one.gradients[i] for i in into))  # fmt: skip

    assert told(twice(rank("True", "True")), single=twice(SINGLE)) == [
        ("on", 0, 1, "True", "False", 0, False)
    ]


def test_it_may_be_left_so_by_what_was_computed_again():
    mine = rank("True", "False", "False", again=(1,))
    assert told(mine, wrong=((0, 2),)) == [("on", 0, 2, "False", "True", 0, True)]
    mine = rank("True", "False", "False")
    assert told(mine, wrong=((0, 2),)) == [("on", 0, 2, "False", "True", 0, False)]
    mine = rank("True", "True", "False", again=(1,))
    assert told(mine, wrong=((0, 2),)) == [("on", 0, 2, "False", "True", 0, False)]


def test_what_stays_so_all_the_time_is_told_elsewhere():
    single = trace((FIRST, False), (SECOND, False), settings={"on": ("False",)},
                   batch={"x": torch.arange(4)})  # fmt: skip
    mine = trace((FIRST[:2], False), (SECOND[:2], False), settings={"on": ("True",)})
    assert told(mine, single=single) == []
    turned = rank("False", "True")
    assert told(turned, single=single) == [("on", 0, 1, "True", "False", 0, False)]


def test_what_the_single_process_computes_in_both_ways_tells_nothing():
    single = replace(SINGLE, outputs=(FIRST,) * 6)
    assert told(rank("None", "None", held=(FIRST[:2], FIRST[:2])), single=single) == []


def test_what_goes_in_wrong_belongs_to_no_call():
    assert told(rank("True", "True", held=(FIRST[:2], SECOND[:2] + 1))) == []
    halves = torch.cat([FIRST[:1], SECOND[:1]])
    assert told(rank("True", "True", held=(FIRST[:2], halves))) == []


@pytest.mark.parametrize(("here", "there", "is_told"), [
    ("'gelu'", "'relu'", True),
    ("torch.float32", "torch.float64", True),
    ("None", "'relu'", True),
    ("3", "2", False),  # it may count
    ("'gelu'", "2", False),
])  # fmt: skip
def test_numbers_may_count_and_are_no_choice(here, there, is_told):
    single = replace(SINGLE, turned={"m": ({"on": "True"}, {"on": there})})
    assert bool(told(rank("True", here), single=single)) is is_told


def test_settings_that_change_are_kept_call_by_call(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].on, model[0].same = True, "x"
    watching = ModuleWatch(model)
    with watching:
        for on in (True, True, False, True):
            model[0].on = on
            model(torch.ones(1, 2))
    write_trace(tmp_path / "one", watching.trace())
    turned = read_trace(tmp_path / "one").turned
    assert turned == {"0": tuple({"on": str(on)} for on in (True, True, False, True))}


def said_of(monkeypatch, wrong, mine, because=("b",)):
    traces = Traces(tier="structure", step=0, ranks={0: mine}, single=SINGLE)
    s = Seen(rank=0, call=wrong, shape=(2, 3))
    found = FirstWrong(wrong=wrong.module, seen=(s,))
    monkeypatch.setattr(settings, "looked", lambda case: LOOK)
    monkeypatch.setattr(settings, "traces_looked_at", lambda case: traces)
    monkeypatch.setattr(settings, "first_wrong_forward", lambda look: found)
    monkeypatch.setattr(settings, "what_goes_into", lambda case, found: "right")
    monkeypatch.setattr(
        settings, "gone_into", lambda case, module: look_into(traces, "float64", (), module)
    )
    monkeypatch.setattr(settings, "sizes_of", lambda record: {"dp": 2})
    case = SimpleNamespace(traces=traces, failing_cells=[], record=0)
    return settings.with_settings(case, Diagnosis(cause="c", kind="k", because=because)).because


TEXT = ("m has on = True in call 1 on rank 0, and False in the single process's call that gets the "
        "same")  # fmt: skip


def test_it_comes_first_in_words_of_the_module_or_of_one_that_it_is_in(monkeypatch):
    mine = rank("True", "True")
    assert said_of(monkeypatch, mine.calls[5], mine) == (TEXT, "b")
    inner = mine.calls[4]
    assert inner.module == "m.inner"
    assert said_of(monkeypatch, inner, mine) == (TEXT, "b")
    first = mine.calls[1]
    assert said_of(monkeypatch, first, mine) == ("b",)  # inside of the call before
    assert said_of(monkeypatch, replace(inner, module="other"), mine) == ("b",)


def test_what_may_have_left_it_so_is_said(monkeypatch):
    mine = rank("True", "False", "False", again=(1,))
    (text, _) = said_of(monkeypatch, mine.calls[8], mine)
    assert text == (
        "m has on = False in call 2 on rank 0, and True in the single process's call that gets the "
        "same; so has the call before it, which is computed again in the backward and may have "
        "left it so"
    )


@pytest.mark.parametrize(("values", "owner", "first"), [
    (("'gelu'", "'relu'"), "m.w", True),
    (("3", "2"), "m.w", False),
    (("'gelu'", "'relu'"), "m.inner.w", False),  # a module around what is wrong
])  # fmt: skip
def test_a_choice_of_the_accused_comes_first(monkeypatch, values, owner, first):
    here, there = values
    traces = SimpleNamespace(
        single=SimpleNamespace(settings={"m": {"act": (there,)}, "m.inner": {}}, turned={}),
        ranks={0: SimpleNamespace(settings={"m": {"act": (here,)}, "m.inner": {}}, turned={})},
    )
    monkeypatch.setattr(settings, "looked", lambda case: LOOK)
    monkeypatch.setattr(settings, "first_wrong_forward", lambda look: None)
    monkeypatch.setattr(settings, "first_wrong_backward", lambda look, failing: None)
    monkeypatch.setattr(settings, "sizes_of", lambda record: {"dp": 2})
    case = SimpleNamespace(traces=traces, failing_cells=[SimpleNamespace(name=owner)], record=0)
    said = settings.with_settings(case, Diagnosis(cause="c", kind="k", because=("b",))).because
    text = f"m has act = {here} on rank 0, and {there} in the single process"
    assert said == ((text, "b") if first else ("b", text))


@pytest.mark.parametrize("around", ["m", ""])
@pytest.mark.parametrize(("into", "back", "modules", "first"), [
    ("wrong", False, (), True),
    ("right", False, (), False),
    ("right", True, (), True),  # between it and the loss
    ("right", True, ("other",), False),
])  # fmt: skip
def test_a_choice_of_the_module_around_comes_first_where_it_is_wrong_in_its_forward(
    monkeypatch, around, into, back, modules, first
):
    inner = f"{around}.inner".lstrip(".")
    own = {around: {"act": ("'gelu'",)}, inner: {}}, {around: {"act": ("'relu'",)}, inner: {}}
    here, there = (SimpleNamespace(settings=held, turned={}) for held in own)
    traces = SimpleNamespace(single=there, ranks={0: here})
    found = FirstWrong(wrong=inner, seen=(), beside=modules)
    assert found.modules == modules
    monkeypatch.setattr(settings, "looked", lambda case: LOOK)
    monkeypatch.setattr(settings, "first_wrong_forward", lambda look: None if back else found)
    monkeypatch.setattr(settings, "first_wrong_backward", lambda look, failing: found)
    monkeypatch.setattr(settings, "what_goes_into", lambda case, found: into)
    monkeypatch.setattr(settings, "_turned", lambda case, found: [])
    monkeypatch.setattr(settings, "sizes_of", lambda record: {"dp": 2})
    case = SimpleNamespace(traces=traces, failing_cells=[], record=0)
    said = settings.with_settings(case, Diagnosis(cause="c", kind="k", because=("b",))).because
    assert [text == "b" for text in said] == ([False, True] if first else [True, False])


@pytest.mark.parametrize(("name", "first"), [("gated", True), ("tp", False), ("use_ring", False)])
def test_a_switch_that_says_that_there_are_ranks_comes_last(monkeypatch, name, first):
    here, there = (SimpleNamespace(settings={"m": {name: (held,)}}, turned={})
                   for held in ("True", "False"))  # fmt: skip
    traces = SimpleNamespace(single=there, ranks={0: here})
    monkeypatch.setattr(settings, "looked", lambda case: LOOK)
    monkeypatch.setattr(settings, "first_wrong_forward", lambda look: None)
    monkeypatch.setattr(settings, "first_wrong_backward", lambda look, failing: None)
    monkeypatch.setattr(settings, "owners", lambda case: ["m"])
    monkeypatch.setattr(settings, "sizes_of", lambda record: {"dp": 2})
    case = SimpleNamespace(traces=traces, failing_cells=[], record=0)
    cause = Diagnosis(cause="c", kind="k", ranks=(0,), because=("b",))
    said = settings.with_settings(case, cause).because
    text = f"m has {name} = True on rank 0, and False in the single process"
    assert said == ((text, "b") if first else ("b", text))


def test_a_switch_comes_before_a_number_that_is_another(monkeypatch):
    has = {"m": {"size": ("3",), "act": ("'gelu'",)}, "m.inner": {}}
    was = {"m": {"size": ("2",), "act": ("'relu'",)}, "m.inner": {}}
    traces = SimpleNamespace(
        single=SimpleNamespace(settings=was, turned={}),
        ranks={0: SimpleNamespace(settings=has, turned={})},
    )
    monkeypatch.setattr(settings, "looked", lambda case: LOOK)
    monkeypatch.setattr(settings, "first_wrong_forward", lambda look: None)
    monkeypatch.setattr(settings, "first_wrong_backward", lambda look, failing: None)
    monkeypatch.setattr(settings, "sizes_of", lambda record: {"dp": 2})
    failing = [SimpleNamespace(name="m.inner.w")]
    case = SimpleNamespace(traces=traces, failing_cells=failing, record=0)
    said = settings.with_settings(case, Diagnosis(cause="c", kind="k")).because
    assert [text.split(" = ")[0] for text in said] == ["m has act", "m has size"]


def test_the_call_around_is_one_of_the_same_pass():
    """What is computed again ends after what is wrong, and is not around it."""
    mine = rank("True", "True", "False", again=(1,))
    wrong = mine.calls[1]
    assert (wrong.module, wrong.number) == ("m.inner", 0)
    order = (mine.calls[1], mine.calls[5], mine.calls[2])
    traces = SimpleNamespace(ranks={0: SimpleNamespace(calls=order)})
    s = Seen(rank=0, call=wrong, shape=(2, 3))
    assert settings._calls_around(traces, s, "m") == {0}
