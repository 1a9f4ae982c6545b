"""From where what is wrong is called, what made what goes in, and what it does not enter."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from sumgrad.base.files import is_librarys
from sumgrad.diagnose.explainers.by_modules.forwards import in_between
from sumgrad.diagnose.explainers.by_modules.in_code import called_from
from sumgrad.diagnose.explainers.by_modules.looked import as_a_hint
from sumgrad.diagnose.modules.values.seen import Seen
from sumgrad.diagnose.modules.where.first_wrong import FirstWrong
from sumgrad.record.trace import INTO, LOSS, Call, Stack, Trace, read_trace, write_trace
from sumgrad.subjects.program.watched.computations import Computations
from sumgrad.subjects.program.watched.watch import ModuleWatch
from torch import nn

LIBRARY = ("/v/site-packages/lib/model.py:9", "y = self.head(h)")
LONG, SHORT = ("/x/step.py:5", "long(x)"), ("/x/step.py:7", "short(x)")
STEP = ("/x/step.py:20", "loss = model(x)")


def case_of(*calls, module="lm.head"):
    """calls: (stack, forward, backward, gradient). All of rank 0."""
    stacks = tuple(dict.fromkeys(stack for stack, *_ in calls))
    kept = [
        Call(module=module, number=i, part=0, operation=0, operation_back=0, recomputed=False,
             stack=stacks.index(stack))
        for i, (stack, *_) in enumerate(calls)
    ]  # fmt: skip
    trace = Trace(
        calls=tuple(kept),
        outputs=(torch.ones(1, 2),) * len(kept),
        gradients=tuple(None if g is None else torch.full((1, 2), g) for *_, g in calls),
        sources={}, stacks=stacks,
    )  # fmt: skip
    seen = tuple(
        Seen(rank=0, call=call, shape=(1, 2), forward=f, backward=b, in_order=True)
        for call, (_, f, b, _) in zip(kept, calls, strict=True)
    )
    case = SimpleNamespace(traces=SimpleNamespace(ranks={0: trace}))
    return case, SimpleNamespace(seen={module: seen}), seen


def said(*calls, back=False):
    case, look, seen = case_of(*calls)
    wrong = tuple(s for s in seen if (s.backward if back else s.forward) == "wrong")
    return called_from.called_from(case, look, FirstWrong(wrong="lm.head", seen=wrong), back=back)


def at(*lines, inside=()):
    return Stack(lines=lines, inside=inside)


def test_a_line_that_all_wrong_calls_come_from_and_no_right_one():
    wrong = (at(LONG, STEP), "wrong", "untold", None)
    right = (at(LIBRARY, SHORT, STEP), "right", "untold", None)
    assert said(wrong, right) == [
        "all calls of lm.head that are seen to be wrong come from step.py:5 `long(x)`, and none "
        "that is right does"
    ]
    assert said(wrong) == []  # nothing to tell it from
    assert said(wrong, (at(LONG, STEP), "right", "untold", None)) == []
    assert said(wrong, right, (at(SHORT, STEP), "wrong", "untold", None)) == []


def test_a_librarys_call_is_told_by_the_line_outside():
    wrong = (at(LIBRARY, SHORT, STEP), "wrong", "untold", None)
    assert said(wrong) == ["lm.head is called from step.py:7 `short(x)`"]
    assert said(wrong, (at(LIBRARY, LONG, STEP), "wrong", "untold", None)) == [
        "lm.head is called from step.py:20 `loss = model(x)`"
    ]
    assert said((at(LIBRARY), "wrong", "untold", None)) == []


@pytest.mark.parametrize(("gradient", "told"), [(0.0, True), (1.0, False), (None, True)])
def test_a_gradient_of_zeros_is_right_on_every_way(gradient, told):
    """There is a right one elsewhere; that one from the same line is right only if it is some."""
    calls = [
        (at(LONG), "right", "wrong", 1.0),
        (at(SHORT), "right", "right", 1.0),
        (at(LONG), "right", "right", gradient),
    ]
    assert bool(said(*calls, back=True)) == told
    if told:
        (text,) = said(*calls, back=True)
        assert text.endswith("and none where a gradient that is not zero is right does")


def test_a_call_that_stands_for_several_terms_is_found_by_its_place():
    """In a look its operation may be another's."""
    calls = [(at(LONG), "right", "wrong", 1.0), (at(SHORT), "right", "right", 1.0)]
    case, look, seen = case_of(*calls)
    merged = replace(seen[1], call=replace(seen[1].call, operation_back=7))
    look.seen["lm.head"] = (seen[0], merged)
    found = FirstWrong(wrong="lm.head", seen=seen[:1])
    assert called_from.called_from(case, look, found, back=True)


def test_a_wrong_call_outside_of_a_module_does_not_go_into_it():
    calls = [(at(LONG, inside=("",)), "right", "wrong", 1.0)]
    case, _, seen = case_of(*calls)
    found = FirstWrong(wrong="lm.head", seen=seen, beside=("lm", "other"))
    assert called_from.without_modules_not_entered(case, found).beside == ("other",)
    alone = FirstWrong(wrong="lm.head", seen=seen, beside=("lm",))
    assert called_from.without_modules_not_entered(case, alone).beside == (LOSS,)
    case, _, seen = case_of((at(LONG, inside=("", "lm")), "right", "wrong", 1.0))
    found = FirstWrong(wrong="lm.head", seen=seen, beside=("lm",))
    assert called_from.without_modules_not_entered(case, found) is found


def test_what_made_what_goes_in_is_told(monkeypatch):
    made = Stack(lines=(STEP,), made=("/x/step.py:3", "after = obs[:, 1:]"))
    case, _, seen = case_of((made, "wrong", "untold", None), module=f"{INTO}net")
    monkeypatch.setattr(in_between, "gone_into", lambda *_: list(seen))
    assert in_between.made_before(case, seen) == [
        "on rank 0 in call 0 what goes in was made at step.py:3 `after = obs[:, 1:]`"
    ]
    other = replace(seen[0], call=replace(seen[0].call, part=1))
    monkeypatch.setattr(in_between, "gone_into", lambda *_: [*seen, other])
    assert in_between.made_before(case, [other]) == [
        "on rank 0 in call 0 the second tensor that goes in was made at step.py:3 "
        "`after = obs[:, 1:]`"
    ]
    assert in_between.made_before(case, ()) == []
    case, _, seen = case_of((at(STEP), "wrong", "untold", None), module=f"{INTO}net")
    assert in_between.made_before(case, seen) == []


def test_lines_and_modules_of_each_call_are_kept(tmp_path):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x):
            return self.inner(x * 2.0)

    model = Model()
    watching = ModuleWatch(model)
    with watching, Computations(watching.now) as computations:
        watching.made_at = computations.made_at
        model(torch.ones(2, 3))
        model.inner(torch.ones(2, 3))
    write_trace(tmp_path / "one", watching.trace())
    trace = read_trace(tmp_path / "one")
    calls = [c for c in trace.calls if c.module == f"{INTO}inner"]
    first, second = (trace.stack(call) for call in calls)
    assert [code for _, code in first.lines[:2]] == [
        "return self.inner(x * 2.0)",
        "model(torch.ones(2, 3))",
    ]
    assert first.made[1] == "return self.inner(x * 2.0)"
    assert all(line.rpartition(":")[0] == __file__ for line, _ in first.lines[:2])
    assert (first.inside, second.inside) == (("", "inner"), ("inner",))
    assert second.lines[0][1] == "model.inner(torch.ones(2, 3))"
    assert Trace(calls=(), outputs=(), gradients=(), sources={}).stack(calls[0]) == Stack()


def test_which_files_are_a_librarys():
    assert is_librarys("/v/lib/python3.11/site-packages/transformers/x.py:3")
    assert is_librarys("/usr/lib/python3/dist-packages/x.py")
    assert not is_librarys("/home/me/site/packages.py")


@pytest.mark.parametrize("error", [ValueError, LookupError, RuntimeError])
def test_a_hint_that_fails_is_no_hint(error):
    def fails(x):
        if x:
            raise error("of a shape that nobody thought of")
        return ["a hint"]

    assert as_a_hint(fails)(0) == ["a hint"]
    assert as_a_hint(fails)(1) == []
    with pytest.raises(TypeError):
        as_a_hint(fails)()
