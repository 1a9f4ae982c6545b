"""What a checkpoint computes again: what goes into it then, and what has no graph before."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from sumgrad.diagnose.explainers.by_modules.backwards.way_back import in_some_calls
from sumgrad.diagnose.explainers.by_modules.forward import _right_again
from sumgrad.diagnose.explainers.by_modules.forwards import wrong_outputs
from sumgrad.diagnose.explainers.by_modules.forwards.wrong_outputs import no_slice
from sumgrad.diagnose.explainers.by_modules.in_code import recomputed
from sumgrad.diagnose.modules.values.seen import Seen
from sumgrad.diagnose.modules.where.first_wrong import FirstWrong
from sumgrad.diagnose.modules.where.look import _without_trials
from sumgrad.record.trace import INTO, Call, Trace

FIRST, OTHER = torch.arange(12.0).reshape(3, 4), torch.arange(12.0, 24.0).reshape(3, 4)


def call(number: int, *, module: str = "m", again: bool = False, back: int | None = None) -> Call:
    return Call(module=module, number=number, part=0, operation=0, operation_back=back,
                recomputed=again)  # fmt: skip


def seen(one: Call, state: str = "right") -> Seen:
    return Seen(rank=0, call=one, shape=(3, 4), forward=state)


@pytest.mark.parametrize(
    ("entered", "state", "said"),
    [
        (FIRST, "right", "what goes into it then is the same"),
        (FIRST * (1 + 1e-9), "right", "what goes into it then is the same"),
        (OTHER, "right",
         "all that goes into it then is found in what goes into it in the single process, and on "
         "rank 0 it is not what went into it before: look at what is kept, or gathered, for the "
         "second time"),
        (OTHER, "wrong", "what goes into m then is another already"),
        (OTHER, "untold", None),
    ],
)  # fmt: skip
def test_what_goes_in_again_is_held_beside_what_went_in(monkeypatch, entered, state, said):
    calls = call(0, module=f"{INTO}m"), call(1, module=f"{INTO}m", again=True)
    trace = SimpleNamespace(calls=calls, outputs=(FIRST, entered))
    monkeypatch.setattr(recomputed, "gone_into", lambda *_: [seen(calls[0]), seen(calls[1], state)])
    monkeypatch.setattr(recomputed, "traces_looked_at", lambda _: SimpleNamespace(ranks={0: trace}))
    monkeypatch.setattr(recomputed, "numbers_elsewhere", lambda *_: False)
    case = SimpleNamespace(
        tier="t", record=SimpleNamespace(spec=SimpleNamespace(tiers={"t": "float64"}))
    )
    found = FirstWrong(wrong="m", seen=(seen(call(1, again=True), "wrong"),))
    assert recomputed._goes_in_again(case, found) == ([said] if said else [])


def of(*calls: Call) -> tuple[SimpleNamespace, FirstWrong]:
    look = SimpleNamespace(seen={"m": [seen(c) for c in calls]})
    return look, FirstWrong(wrong="m", seen=(seen(calls[-1]),))


def test_a_first_pass_without_a_graph_is_that_of_a_reentrant_checkpoint():
    assert recomputed.without_a_first_graph(*of(call(0), call(1, again=True, back=3))) == [
        "on rank 0 it is computed again in the backward (call 1), and no gradient reaches what it "
        "gave before that: a reentrant checkpoint has no graph of its first pass, so what is taken "
        "from there other than by what the checkpoint gives, as through a cache or a list, is cut "
        "off"
    ]
    with_graph = of(call(0, back=4), call(1, again=True))
    assert recomputed.is_computed_again(*with_graph)
    assert recomputed.without_a_first_graph(*with_graph) == []
    once = of(call(0), call(1))
    assert not recomputed.is_computed_again(*once)
    assert recomputed.without_a_first_graph(*once) == []


def test_others_are_said_to_get_a_gradient_where_they_get_one():
    look, found = of(call(1, back=2), call(0))
    assert in_some_calls(look, found) == ", in call 0 of 2 on rank 0; in the others one does"
    look, found = of(call(1), call(0))
    assert in_some_calls(look, found) == ", in call 0 of 2 on rank 0"


def test_what_is_right_when_it_is_computed_again_is_said():
    first = seen(call(0), "wrong")
    look = SimpleNamespace(seen={"m": [first, seen(call(1, again=True))]})
    found = FirstWrong(wrong="m", seen=(first,))
    assert _right_again(look, found) == [
        "on rank 0 it is computed again in the backward, and is right then: look at what differs "
        "between the two (no_grad, a mode, a state)"
    ]
    look.seen["m"][1] = seen(call(1, again=True), "wrong")
    assert _right_again(look, found) == []
    assert _right_again(SimpleNamespace(seen={"m": [first]}), found) == []


def test_a_first_pass_is_no_trial_of_a_pipeline():
    """A call that is wrong and gets no gradient is dropped where right ones get one, but not where
    the rank computes it again."""
    wrong, right = seen(call(0), "wrong"), seen(call(2, back=1))
    assert _without_trials([wrong, right]) == [right]
    again = seen(call(1, again=True, back=1))
    assert _without_trials([wrong, again, right]) == [wrong, again, right]


def test_of_several_outputs_the_wrong_one_is_named():
    one = replace(seen(call(0), "wrong"), wrong=torch.arange(3))
    two = replace(one, call=replace(one.call, part=1))
    look = SimpleNamespace(seen={"m": [seen(call(0)), two]})
    said = no_slice(look, FirstWrong(wrong="m", seen=(two,)))
    assert said.startswith("the second of the 2 outputs of m is no slice of the single process's: ")
    alone = SimpleNamespace(seen={"m": [one]})
    assert no_slice(alone, FirstWrong(wrong="m", seen=(one,))).startswith("the output of m is no")


def test_another_output_that_stands_there_is_named(monkeypatch):
    """Of two outputs the second is what the first should be."""
    calls = tuple(replace(call(0, back=0), part=p) for p in (0, 1))
    single = Trace(calls=calls, outputs=(FIRST.double(), OTHER.double()), gradients=(None, None),
                   sources={}, batch={"x": FIRST})  # fmt: skip
    first = "each vector that stands there is one of the first output of the single process"
    for given, said in ((FIRST, [first]), (OTHER + 1, [])):
        mine = replace(single, outputs=(FIRST.double(), given.double()))
        traces = SimpleNamespace(single=single, ranks={0: mine})
        monkeypatch.setattr(wrong_outputs, "traces_looked_at", lambda _, traces=traces: traces)
        case = SimpleNamespace(
            tier="t", record=SimpleNamespace(spec=SimpleNamespace(tiers={"t": "float64"}))
        )
        found = FirstWrong(wrong="m", seen=(replace(seen(calls[1], "wrong"), shape=(3, 4)),))
        assert wrong_outputs.another_output(case, found) == said


def layers(again: dict[str, int], reached: str = "ab") -> tuple[SimpleNamespace, FirstWrong]:
    """Layers 0 to 2, each with a and b, that run once; again: how often each runs once more."""
    found: dict[str, list[Seen]] = {}
    for module in (f"layers.{i}.{part}" for i in range(3) for part in "ab"):
        back = 1 if module[-1] in reached else None
        calls = [call(0, module=module, back=back)]
        calls += [call(n + 1, module=module, again=True) for n in range(again.get(module, 0))]
        found[module] = [seen(c) for c in calls]
    look = SimpleNamespace(modules=[*found], seen=found, sources={})
    last = found["layers.2.a"][-1]
    return look, FirstWrong(wrong="layers.2.a", seen=(replace(last, forward="wrong"),))


def test_a_layer_that_is_computed_again_in_place_of_others():
    cause = recomputed.in_place_of_others(*layers({"layers.2.a": 3, "layers.2.b": 3}))
    assert cause is not None
    assert cause.cause == (
        "layers.2.a is computed again in the backward in place of layers.0.a, layers.1.a, on rank 0"
    )
    assert cause.because[0] == (
        "on rank 0 it runs 3 times in the backward, and in the forward 1; layers.0.a, layers.1.a "
        "ran there and are not computed again"
    )


def test_it_is_said_of_ranks_where_it_is_so_alone():
    look, found = layers({"layers.2.a": 3})
    assert recomputed.in_place_of_others(look, found) is not None
    other, _ = layers({"layers.2.a": 1, "layers.1.a": 1, "layers.0.a": 1})
    for module, seen_there in other.seen.items():
        look.seen[module] += [replace(s, rank=1) for s in seen_there]
    both = replace(found, seen=(*found.seen, replace(found.seen[0], rank=1)))
    assert recomputed.in_place_of_others(look, both) is None


@pytest.mark.parametrize(
    ("again", "reached"),
    [
        ({"layers.2.a": 1, "layers.1.a": 1, "layers.0.a": 1}, "ab"),  # each its own
        ({"layers.2.a": 2, "layers.1.a": 1}, "b"),  # none reaches the other: it need not run
        ({"layers.2.a": 3, "layers.0.a": 1}, "ab"),  # that one runs again itself
        ({"layers.2.a": 4}, "ab"),  # more often than others lack it
        ({"layers.2.a": 1}, "ab"),
    ],
)
def test_a_layer_that_is_computed_again_for_itself(again, reached):
    assert recomputed.in_place_of_others(*layers(again, reached)) is None


def test_of_a_module_that_no_gradient_reaches_no_call_is_a_trial():
    """As of a target network: a wrong call beside right ones is a wrong one."""
    wrong, right = seen(call(1), "wrong"), seen(call(0))
    assert _without_trials([right, wrong]) == [right, wrong]
