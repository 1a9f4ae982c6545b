"""Hooks of modules that make something else of what is right, and what modules have set."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.explainers.by_modules import backward, beside
from sumgrad.diagnose.explainers.by_modules.forwards import hooked, settings, wrong_outputs
from sumgrad.diagnose.modules.autograd.hooked import hooks_that_change
from sumgrad.diagnose.modules.how_wrong.elsewhere import numbers_elsewhere, zeroed
from sumgrad.diagnose.modules.values.seen import Seen
from sumgrad.diagnose.modules.weights.settings import set_otherwise
from sumgrad.diagnose.modules.where.first_wrong import FirstWrong
from sumgrad.diagnose.modules.where.paths import paths_of
from sumgrad.record.trace import INTO, LOSS, Call, Trace, read_trace, write_trace
from sumgrad.subjects.program.watched.settings import settings_of
from sumgrad.subjects.program.watched.watch import ModuleWatch
from torch import nn

ROWS = torch.arange(12.0).reshape(3, 4).double() + 1
LINE = ("model.py:7", "def steer(layer, args, output):")


class Doubled(nn.Module):
    """In place, so that what is kept must be a copy."""

    def forward(self, x):
        return x * 2


def add_one(module, args, output):
    output += 1


def flipped(module, args, kwargs):
    return tuple(-a for a in args), {k: -v for k, v in kwargs.items()}


def traced(*, hook=None, pre=None, x=ROWS):
    model = nn.Sequential(Doubled())
    if hook is not None:
        model[0].register_forward_hook(hook)
    if pre is not None:
        model[0].register_forward_pre_hook(pre, with_kwargs=True)
    watching = ModuleWatch(model)
    with watching:
        model(x.clone())
        model(x + 1)
    return watching.trace(batch={"x": x})


def test_what_hooks_see_is_kept_as_it_was(tmp_path):
    write_trace(tmp_path / "one", traced(hook=add_one, pre=flipped))
    trace = read_trace(tmp_path / "one")
    told = {(h.module, h.number, h.part): h.value for h in trace.hooked}
    assert told.keys() == {(m, i, 0) for m in ("0", f"{INTO}0") for i in (0, 1)}
    assert torch.equal(told[f"{INTO}0", 0, 0], ROWS)
    assert torch.equal(told["0", 1, 0], -2 * (ROWS + 1))
    given = {(c.module, c.number): o for c, o in zip(trace.calls, trace.outputs, strict=True)}
    assert torch.equal(given["0", 1], -2 * (ROWS + 1) + 1)  # and the output is as it left
    (line,), (pre,) = trace.hooks["0"], trace.hooks[f"{INTO}0"]
    assert line[0].startswith(__file__)
    assert line[1] == "def add_one(module, args, output):"
    assert pre[1].startswith("def flipped(")


def test_without_hooks_nothing_more_is_kept():
    trace = traced()
    assert (trace.hooked, trace.hooks) == ((), {})


def seen(module, number, rank=0):
    call = Call(module=module, number=number, part=0, operation=0, operation_back=None,
                recomputed=False)  # fmt: skip
    return Seen(rank=rank, call=call, shape=(3, 4), forward="wrong")


def traces_of(rank, single):
    return SimpleNamespace(ranks={0: rank}, single=single)


@pytest.mark.parametrize("in_single", [True, False])
def test_a_hook_is_named_where_what_it_sees_is_right(in_single):
    """Whether the single process has the hook, too, or none."""
    single = traced(hook=lambda *_: None) if in_single else traced()
    found = hooks_that_change(traces_of(traced(hook=add_one), single), [seen("0", 1)], "float64")
    assert [code for _, code in found] == ["def add_one(module, args, output):"]


def test_a_hook_is_not_named_where_what_it_sees_is_wrong_already():
    mine = traced(hook=add_one, x=ROWS + 0.5)
    assert hooks_that_change(traces_of(mine, traced()), [seen("0", 1)], "float64") == ()


def test_a_hook_is_not_named_where_some_wrong_call_is_not_known():
    mine = traced(hook=add_one)
    assert hooks_that_change(traces_of(mine, traced()), [seen("0", 2)], "float64") == ()
    assert hooks_that_change(traces_of(mine, traced()), [seen("0", 1), seen("1", 1)], "x") == ()


def rolled(by, zeros=False):
    class Rolled(nn.Module):
        def forward(self, x):
            out = x.roll(by, 1)
            if zeros:
                out[:, -1] = 0
            return out

    model = nn.Sequential(Rolled())
    model[0].register_forward_hook(lambda module, args, output: output + 1)
    watching = ModuleWatch(model)
    x = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(2)).double()
    with watching:
        model(x)
    return watching.trace(batch={"x": x})


@pytest.mark.parametrize(("by", "zeros", "named"), [(1, False, True), (2, False, False),
                                                    (1, True, False)])  # fmt: skip
def test_a_hook_is_not_named_where_what_it_sees_stands_elsewhere_or_is_zero(by, zeros, named):
    """A forward that rolls too far, or writes zeros, gives vectors that are all known."""
    odd = replace(seen("0", 0), shape=(2, 5, 3))
    found = hooks_that_change(traces_of(rolled(by, zeros), rolled(1)), [odd], "float64")
    assert bool(found) == named


@pytest.mark.parametrize(("rows", "named"), [([0, 1, 2], True), ([1, 0, 2], False), (None, True)])
def test_a_hook_is_not_named_where_it_sees_other_rows_than_went_in(rows, named):
    told = None if rows is None else torch.tensor(rows)
    traces = traces_of(traced(hook=add_one), traced(hook=lambda *_: None))
    found = hooks_that_change(traces, [seen("0", 1)], "float64", {(0, 1): told})
    assert bool(found) == named


def test_a_copy_of_a_module_in_the_step_is_no_call_of_it():
    model = nn.Sequential(nn.Linear(4, 4, dtype=torch.float64))
    model[0].register_forward_hook(add_one)
    watching = ModuleWatch(model)
    with watching:
        teacher = copy.deepcopy(model)
        teacher(ROWS)
        model(ROWS)
    trace = watching.trace(batch={"x": ROWS})
    assert [c.number for c in trace.calls if c.module == "0"] == [0]
    assert [h.number for h in trace.hooked] == [0]


@pytest.mark.parametrize(("entered", "into", "said"), [
    (False, "right", "what the forward of m returns is right, and another after its forward hook "
                     "saw it, on rank 0: model.py:7 `def steer(layer, args, output):`"),
    (True, "wrong", "what m is called with is right, and another after its forward pre-hook saw "
                    "it, on rank 0: model.py:7 `def steer(layer, args, output):`"),
    (False, "untold", None),
])  # fmt: skip
def test_hooks_in_words(monkeypatch, entered, into, said):
    asked = []
    monkeypatch.setattr(hooked, "traces_looked_at", lambda case: "traces")
    odd = (seen(f"{INTO}m", 0),) if entered else ()
    monkeypatch.setattr(hooked, "into_the_calls", lambda case, found: [])
    monkeypatch.setattr(hooked, "entered_wrong", lambda case, found: odd)
    monkeypatch.setattr(hooked, "what_goes_into", lambda case, found: into)
    monkeypatch.setattr(
        hooked, "hooks_that_change", lambda traces, of, dtype, rows: asked.append(of) or (LINE,)
    )
    spec = SimpleNamespace(tiers={"t": "float64"})
    case = SimpleNamespace(tier="t", record=SimpleNamespace(spec=spec))
    found = FirstWrong(wrong="m", seen=(seen("m", 0),))
    told = hooked.changed_by_hooks(case, SimpleNamespace(sources={}), found)
    assert told == ([] if said is None else [said])
    assert asked == ([] if said is None else [odd or found.seen])


class Settled(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads, self.scaling, self.mode, self.nothing = 4, {"default": 0.5}, "sum", None
        self.table, self._private, self.words = torch.zeros(2), 3, "x" * 100
        self.sizes, self.deep, self.inner = (2, 3), {"a": [1]}, nn.Linear(2, 2)


def test_plain_values_are_kept_in_words():
    assert settings_of(Settled()) == {
        "heads": "4", "scaling": "{'default': 0.5}", "mode": "'sum'", "nothing": "None",
        "sizes": "(2, 3)",
    }  # fmt: skip
    assert settings_of(nn.Embedding(4, 2, padding_idx=1))["padding_idx"] == "1"


def test_values_are_kept_as_they_are_when_a_module_is_called(tmp_path):
    model = nn.Sequential(Doubled())
    watching = ModuleWatch(model)
    with watching:
        for times in range(6):
            model[0].times = times // 2
            model(ROWS)
    write_trace(tmp_path / "one", watching.trace())
    assert read_trace(tmp_path / "one").settings["0"]["times"] == ("0", "1", "2")


def settings_traces(single, *ranks):
    traces = [Trace(calls=(), outputs=(), gradients=(), sources={}, settings=s) for s in ranks]
    one = Trace(calls=(), outputs=(), gradients=(), sources={}, settings=single)
    return SimpleNamespace(single=one, ranks=dict(enumerate(traces)))


def told(single, *ranks, near=None, sizes=(2,)):
    found = set_otherwise(settings_traces(single, *ranks), near or {"m": 0, "n": 1}, sizes)
    return [(o.attribute, o.now, o.was, o.modules, o.ranks) for o in found]


def test_what_is_set_otherwise_is_told():
    was, now = {"m": {"pad": ("None",)}}, {"m": {"pad": ("2",)}}
    assert told(was, was, now) == [("pad", ("2",), ("None",), ("m",), (1,))]
    assert told(was, was, {"other": {"pad": ("2",)}}) == []
    assert told(was, now, near={"n": 0}) == []
    both = {"m": {"pad": ("2", "None")}}
    assert told(was, both) == []  # it had the right one, too


def test_shares_of_a_count_and_names_of_ranks_differ_by_right():
    was = {"m": {"heads": ("4",), "tp_rank": ("0",), "cut": ("1",)}}
    assert told(was, {"m": {"heads": ("2",), "tp_rank": ("1",), "cut": ("2",)}}) == []
    odd = told(was, {"m": {"heads": ("3",), "cut": ("3",)}})
    assert [one[:2] for one in odd] == [("heads", ("3",)), ("cut", ("3",))]


def test_what_differs_from_call_to_call_is_told_of_the_accused_alone():
    was = {"m": {"count": ("0",)}, "n": {"count": ("0",)}}
    now = {"m": {"count": ("1", "2")}, "n": {"count": ("1", "2")}}
    assert told(was, now) == [("count", ("1", "2"), ("0",), ("m",), (0,))]
    apart = [{"n": {"count": (str(i),)}} for i in (1, 2)]
    assert told(was, *apart) == []


def test_a_scale_that_moves_on_is_told_of_the_accused_beside_right_values():
    was, now = {"m": {"scale": ("1.0", "2.0")}}, {"m": {"scale": ("1.0", "4.5")}}
    assert told(was, now) == [("scale", ("1.0", "4.5"), ("1.0", "2.0"), ("m",), (0,))]
    assert told(now, was | {"m": {"scale": ("1.0",)}}) == []  # all of its values are there
    assert told(was, now, near={"m": 1}) == []
    counts = {"m": {"scale": ("1", "3")}}
    assert told({"m": {"scale": ("1", "2")}}, counts) == []
    many = {"m": {"scale": tuple(f"{i}.0" for i in range(12))}}
    assert told(many, {"m": {"scale": ("1.0", "77.0")}}) == []  # there may have been more
    meter = {"m": {"scale": ("1.0", "4.51234")}}
    assert told(was, meter) == []  # nobody sets so many digits


def test_a_switch_that_is_turned_is_told_also_beside_right_values():
    was, now = {"m": {"on": ("True",)}}, {"m": {"on": ("True", "False")}}
    for near in ({"m": 0}, {"m": 2}):
        assert told(was, was, now, near=near) == [
            ("on", ("True", "False"), ("True",), ("m",), (1,))
        ]
    assert told(now, now) == []  # it is turned there, too
    count = {"m": {"on": ("1", "2")}}
    assert told({"m": {"on": ("1",)}}, count, near={"m": 2}) == []
    apart = [now, {"m": {"on": ("False", "True")}}]
    assert told(was, *apart, near={"m": 2}) == []  # each in its own way


def test_what_a_module_is_configured_by_is_kept_of_the_first_that_has_it(tmp_path):
    model = nn.Sequential(Doubled(), Doubled())
    config = SimpleNamespace(on=True, scale=0.5, sizes=[1], _own=1, name="x" * 100)
    model.config = model[1].config = config
    watching = ModuleWatch(model)
    with watching:
        model(ROWS)
        config.on = False
        model(ROWS)
    write_trace(tmp_path / "one", watching.trace())
    found = read_trace(tmp_path / "one").settings
    assert found[""] == {"config.on": ("True", "False"), "config.scale": ("0.5",)}
    assert not any(name.startswith("config") for name in found["1"])


def test_of_many_values_the_first_are_written_out():
    assert settings._values(("1",)) == "1"
    assert settings._values(tuple("123456")).endswith(", then 6")
    assert settings._values(tuple("1234567")).endswith(", then 6, ...")


LOOK = SimpleNamespace(sources={})


def test_settings_in_words(monkeypatch):
    was, now = {"": {"flag": ("False",)}, "m": {}}, {"": {"flag": ("True",)}, "m": {}}
    traces = settings_traces(was, now, now)
    monkeypatch.setattr(settings, "looked", lambda case: LOOK)
    monkeypatch.setattr(settings, "first_wrong_forward", lambda look: None)
    monkeypatch.setattr(settings, "first_wrong_backward", lambda look, failing: None)
    monkeypatch.setattr(settings, "sizes_of", lambda record: {"dp": 2})
    case = SimpleNamespace(traces=traces, failing_cells=[SimpleNamespace(name="m.w")], record=0)
    said = settings.with_settings(case, Diagnosis(cause="c", kind="k")).because
    assert said == (
        "the model itself has flag = True on rank 0-1, and False in the single process",
    )
    case.traces = None
    assert settings.with_settings(case, Diagnosis(cause="c", kind="k")).because == ()


@pytest.mark.parametrize(
    ("now", "was", "first"),
    [
        ("0.0", "-inf", True),
        ("0.85", "0.6", True),
        ("(1, 2)", "(2, 1)", True),
        ("(1, 2)", "(2, 1, 3)", False),
        ("[0, 1]", "[2, 3]", False),
        ("3", "7", False),
        ("None", "0.5", False),
        ("'b'", "'a'", True),
        ("'b'", "None", True),  # a choice, which leads no report
    ],
)
def test_another_constant_of_the_module_that_is_wrong_comes_first(monkeypatch, now, was, first):
    there, own = {"m": {"c": (was,)}}, {"m": {"c": (now,)}}
    look = SimpleNamespace(sources={"m": "Net at /home/me/net.py:3"})
    monkeypatch.setattr(settings, "looked", lambda case: look)
    monkeypatch.setattr(settings, "first_wrong_forward", lambda look: None)
    monkeypatch.setattr(settings, "first_wrong_backward", lambda look, failing: None)
    monkeypatch.setattr(settings, "sizes_of", lambda record: {"dp": 2})
    failing = [SimpleNamespace(name="m.w")]
    traces = settings_traces(there, own, own)
    case = SimpleNamespace(traces=traces, failing_cells=failing, record=0)
    diagnosis = Diagnosis(cause="c", kind="k", ranks=(0, 1), because=("b",))
    said = settings.with_settings(case, diagnosis).because
    text = f"m has c = {now} on rank 0-1, and {was} in the single process"
    assert said == ((text, "b") if first else ("b", text))
    told = settings.with_settings(case, replace(diagnosis, kind="open"))
    assert (told.cause == text) == (first and was != "None")
    look.sources["m"] = "Net at /home/me/site-packages/lib/net.py:3"
    assert settings.with_settings(case, replace(diagnosis, kind="open")).cause == "c"


@pytest.mark.parametrize(
    ("source", "now", "first"),
    [
        ("Net at /home/me/net.py:3", "True", True),
        ("Net at /home/me/site-packages/lib/net.py:3", "True", False),
        ("Linear", "True", False),
        ("Net at /home/me/net.py:3", "off", False),
    ],
)
def test_the_opposite_of_a_switch_of_the_users_own_comes_first(monkeypatch, source, now, first):
    was, own = {"": {"on": ("False",)}, "m": {}}, {"": {"on": (now,)}, "m": {}}
    look = SimpleNamespace(sources={"": source})
    monkeypatch.setattr(settings, "looked", lambda case: look)
    monkeypatch.setattr(settings, "first_wrong_forward", lambda look: None)
    monkeypatch.setattr(settings, "first_wrong_backward", lambda look, failing: None)
    monkeypatch.setattr(settings, "sizes_of", lambda record: {"dp": 2})
    failing = [SimpleNamespace(name="m.w")]
    case = SimpleNamespace(traces=settings_traces(was, own, own), failing_cells=failing, record=0)
    diagnosis = Diagnosis(cause="c", kind="k", ranks=(0, 1), because=("b",))
    said = settings.with_settings(case, diagnosis).because
    text = f"the model itself has on = {now} on rank 0-1, and False in the single process"
    assert said == ((text, "b") if first else ("b", text))


@pytest.mark.parametrize(
    ("name", "kind", "leads"),
    [
        ("on", "forward", True),
        ("on", "open", True),
        ("on", "double_reduction", False),  # what is done is known
        ("is_sharded", "forward", False),  # on by right, where there are ranks
        ("use_ring", "forward", False),
        ("is_last", "open", False),
    ],
)
def test_a_switch_that_is_the_opposite_leads_where_only_a_place_is_known(
    monkeypatch, name, kind, leads
):
    was, own = {"": {name: ("False",)}, "m": {}}, {"": {name: ("True",)}, "m": {}}
    look = SimpleNamespace(sources={"": "Net at /home/me/net.py:3"})
    found = SimpleNamespace(wrong="m", ranks=(0,), modules=())
    monkeypatch.setattr(settings, "looked", lambda case: look)
    monkeypatch.setattr(settings, "first_wrong_forward", lambda look: found)
    monkeypatch.setattr(settings, "what_goes_into", lambda case, found: "untold")
    monkeypatch.setattr(settings, "_turned", lambda case, found: [])
    monkeypatch.setattr(settings, "sizes_of", lambda record: {"dp": 2})
    case = SimpleNamespace(traces=settings_traces(was, own), failing_cells=[], record=0)
    told = settings.with_settings(case, Diagnosis(cause="c", kind=kind, ranks=(0,)))
    text = f"the model itself has {name} = True on rank 0, and False in the single process"
    assert (told.cause, told.because) == ((text, ("c",)) if leads else ("c", (text,)))
    assert settings.is_set_otherwise(case, found) == (name == "on")
    case.traces = None
    assert not settings.is_set_otherwise(case, found)


@pytest.mark.parametrize(("ranks", "first"), [((1,), True), ((0, 1), False)])
def test_a_switch_that_is_turned_on_just_the_wrong_ranks_comes_first(monkeypatch, ranks, first):
    was, now = {"": {"on": ("True",)}}, {"": {"on": ("True", "False")}}
    monkeypatch.setattr(settings, "looked", lambda case: LOOK)
    monkeypatch.setattr(settings, "first_wrong_forward", lambda look: None)
    monkeypatch.setattr(settings, "first_wrong_backward", lambda look, failing: None)
    monkeypatch.setattr(settings, "sizes_of", lambda record: {"dp": 2})
    failing = [SimpleNamespace(name="m.w")]
    case = SimpleNamespace(traces=settings_traces(was, was, now), failing_cells=failing, record=0)
    diagnosis = Diagnosis(cause="c", kind="k", ranks=ranks, because=("b",))
    said = settings.with_settings(case, diagnosis).because
    text = "the model itself has on = True, then False on rank 1, and True in the single process"
    assert said == ((text, "b") if first else ("b", text))


def borders(monkeypatch, states, hooks=None, calls=(), stack=None):
    """of the modules a -> b -> c -> the loss, by what reaches them."""
    monkeypatch.setattr(beside, "named", lambda look, module: module)
    order = tuple(states)
    takes = {LOSS: order[-1:], **{m: (n,) for n, m in pairwise(order)}}
    look = SimpleNamespace(modules=order, backward=states.get, paths=paths_of(order, takes))
    traces = SimpleNamespace(
        ranks={0: SimpleNamespace(hooks=hooks or {}, calls=calls, stack=stack)}
    )
    parts = [m for m, state in states.items() if state == "part"]
    return beside._border(SimpleNamespace(traces=traces), look, parts)


def test_the_border_of_gradients_that_are_parts(monkeypatch):
    said = borders(monkeypatch, {"a": "part", "b": "part", "c": "right"})
    start = ("; the first of them on the way back is b, and of what it goes into, c, they are "
             "whole: where a sum belongs in between it is missing")  # fmt: skip
    end = ", else where these parameters' gradients are put together"
    assert said == start + end
    hooks = {f"{INTO}c": (LINE,)}
    said = borders(monkeypatch, {"a": "part", "b": "part", "c": "right"}, hooks)
    line = "model.py:7 `def steer(layer, args, output):`"
    assert said == f"{start} (a forward pre-hook there: {line}){end}"


@pytest.mark.parametrize(("lines", "said"), [
    ([LINE, LINE], " (c is called at model.py:7 `def steer(layer, args, output):`)"),
    ([LINE, ("/x/model.py:8", "c(x)")], ""),
])  # fmt: skip
def test_the_line_that_calls_what_lies_behind_the_border(monkeypatch, lines, said):
    calls = [SimpleNamespace(module="c", at=i) for i in range(len(lines))]
    found = borders(monkeypatch, {"a": "part", "c": "right"}, calls=calls,
                    stack=lambda call: SimpleNamespace(lines=(lines[call.at],)))  # fmt: skip
    assert f"it is missing{said}, else" in found


def test_of_a_module_and_its_inside_the_module_is_the_border(monkeypatch):
    """What a gives goes into c, and on from there into d."""
    monkeypatch.setattr(beside, "named", lambda look, module: module)
    states = {"a.in": "part", "a": "part", "c": "right", "d": "right"}
    takes = {LOSS: ("d",), "d": ("c", "a", "a.in"), "c": ("a", "a.in"), "a": (), "a.in": ()}
    order = tuple(states)
    look = SimpleNamespace(modules=order, backward=states.get, paths=paths_of(order, takes))
    case = SimpleNamespace(traces=None)
    said = beside._border(case, look, ["a.in", "a"])
    start = "; the first of them on the way back is a, and of what it goes into, c, they are whole"
    assert said.startswith(start)


@pytest.mark.parametrize(("is_told", "said"), [(True, ["p", "b", "t"]), (False, ["b", "t", "p"])])
def test_where_a_sum_is_missing_comes_before_what_is_right(monkeypatch, is_told, said):
    look = SimpleNamespace(modules=("m",), seen={"m": []}, forward=lambda m: "right",
                           backward=lambda m: "right")  # fmt: skip
    for name, value in {
        "looked_by_rows": lambda case: look,
        "first_wrong_forward": lambda look: None,
        "first_wrong_backward": lambda look, owners: None,
        "shares_at_the_loss": lambda look: ("m", [SimpleNamespace(factor=1.0)]),
        "owners": lambda case: [],
        "_in_parts": lambda case, look, diagnosis: (is_told, ["p"]),
    }.items():
        monkeypatch.setattr(beside, name, value)
    told = beside.beside(None, Diagnosis(cause="c", kind="skipped_collective", because=("b",)))
    assert [text[0] for text in told.because] == said


@pytest.mark.parametrize(("kind", "is_told"), [("skipped_collective", True), ("factor", False)])
def test_where_a_sum_is_missing_is_told_of_what_nobody_reduces(monkeypatch, kind, is_told):
    monkeypatch.setattr(beside, "_border", lambda case, look, parts: "; the border")
    seen = {"a": [SimpleNamespace(backward="right"), SimpleNamespace(backward="part", axis="tp")]}
    look = SimpleNamespace(modules=("a",), backward=lambda m: "part", seen=seen)
    told, (text,) = beside._in_parts(None, look, Diagnosis(cause="c", kind=kind))
    assert (told, text.endswith("summed over tp; the border")) == (is_told, is_told)
    look.backward = lambda m: "right"
    assert beside._in_parts(None, look, Diagnosis(cause="c", kind=kind)) == (False, [])


@pytest.mark.parametrize("states", [
    {"a": "part", "b": "untold", "c": "part"},
    {"a": "right", "b": "right", "c": "part"},
    {"a": "right", "b": "right", "c": "right"},
])  # fmt: skip
def test_no_border_where_there_is_not_one(monkeypatch, states):
    assert borders(monkeypatch, states) == ""


@pytest.mark.parametrize(("factors", "said"), [
    ([2.0, 2.0], ""),
    ([2.0, 3.0], " but for factors of single vectors, of 2 to 3 on rank 0 in call 0,"),
    ([math.nan, 3.0], ""),
    (None, ""),
])  # fmt: skip
def test_factors_of_single_vectors_are_said_of_what_is_right_but_for_them(factors, said):
    told = None if factors is None else torch.tensor(factors)
    one = replace(seen("m", 0), backward="right", factors=told)
    look = SimpleNamespace(seen={"m": [one]})
    found = FirstWrong(wrong="n", seen=(), beside=("m",))
    assert backward._but_for_factors(look, found) == said


@pytest.mark.parametrize(("factors", "said"), [
    ([[2.0], [2.0], [2.0]], ""),
    ([[2.0], [3.0], [2.0]], " but for one factor on each rank, 2 on rank 0, 2, 3 on rank 1,"),
    ([[2.0, 2.0], [3.0, 1.0]], ""),  # a micro-batch has one of its own
    ([[1.0], None], ""),
])  # fmt: skip
def test_factors_of_ranks_are_said_where_they_are_not_alike(factors, said):
    every = [
        replace(seen("m", 0), rank=rank, backward="right",
                factors=None if f is None else torch.tensor([f, f]))
        for rank, own in enumerate(factors) for f in own or [None]
    ]  # fmt: skip
    look = SimpleNamespace(seen={"m": every})
    found = FirstWrong(wrong="n", seen=(), beside=("m",))
    assert backward._but_for_factors(look, found) == said


class Pair(nn.Module):
    def __init__(self, inplace):
        super().__init__()
        self.norm, self.act = nn.LayerNorm(4, dtype=torch.float64), nn.ReLU(inplace=inplace)

    def forward(self, x):
        h = self.norm(x)
        return self.act(h).sum(1), h


def in_place(inplace):
    model = Pair(inplace)
    watching = ModuleWatch(model)
    with watching:
        model(ROWS * torch.tensor([1.0, -1, 2, 0.5]).double())
    return watching.trace(batch={"x": ROWS})


@pytest.mark.parametrize("inplace", [True, False])
def test_a_tensor_that_another_module_changed_is_told(monkeypatch, tmp_path, inplace):
    write_trace(tmp_path / "one", in_place(inplace))
    trace, single = read_trace(tmp_path / "one"), in_place(False)
    at = next(i for i, c in enumerate(trace.calls) if (c.module, c.part) == ("", 1))
    odd = Seen(rank=0, call=trace.calls[at], shape=(3, 4), forward="wrong",
               wrong=torch.arange(3))  # fmt: skip
    traces = traces_of(trace, single)
    monkeypatch.setattr(wrong_outputs, "named", lambda look, module: module)
    case = SimpleNamespace(traces=traces)
    said = wrong_outputs.changed_in_place(case, None, FirstWrong(wrong="", seen=(odd,)))
    told = "on rank 0 in call 0 it is the tensor that norm gave, which act then changed in place"
    assert said == ([told] if inplace else [])
    assert zeroed(traces, [odd], "float64") == inplace
    assert not numbers_elsewhere(traces, [odd], "float64") or not inplace
