"""What became of a gradient line by line: lines that really ran, on what backwards really gave."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose import own_gradients
from sumgrad.diagnose.explainers.by_modules.backwards.hooks import lines_of_hooks, with_hooks
from sumgrad.diagnose.explainers.by_modules.in_code.computed import A_LINE
from sumgrad.diagnose.explainers.left_over import history as in_words
from sumgrad.diagnose.explainers.of_factors.by_rank import in_weights
from sumgrad.diagnose.modules.autograd.history import history_of, multiplied_in
from sumgrad.diagnose.own_gradients import Columns
from sumgrad.record.computed import Computation, Computed, SetGrad
from sumgrad.subjects.program.watched.computations import Computations
from torch.nn.utils import clip_grad_norm_

G = torch.Generator().manual_seed(3)
GAVE = torch.randn(2, 2, 6, 7, generator=G, dtype=torch.float64)  # of two ranks, two passes each
FIRST, SECOND = GAVE[0].unbind(0)
BOTH, OTHERS = GAVE.sum(1).unbind(0)
AT = torch.arange(42)
ONES = torch.ones(2, 2, dtype=torch.float64)


def columns(end, rank=0):
    wanted = SimpleNamespace(size=1.0, scale=1.0, threshold=1e-12, value=end)
    cell = SimpleNamespace(rank=rank, name="w", measured=end, wanted=wanted)
    return Columns(
        cell=cell, sources=((0,), (1,)), passes=2, own=GAVE.reshape(4, 42),
        measured=end.reshape(-1), wanted=end.reshape(-1), place=AT,
    )  # fmt: skip


def history(function):
    """Of what a function does to what this rank's two backwards gave, and ends with."""
    with Computations(lambda: ((), 0)) as computations:
        end = function()
    return history_of(columns(end), computations.computed())


def told(one):
    return [
        (
            h.computation.part,
            h.gives,
            [pytest.approx(w, abs=1e-9) for w in h.weights[0].tolist()],
            h.elements,
        )
        for h in one.held
    ]


def overwritten():
    """Gradients that are kept and not copied, and the second backward's in the same memory."""
    grad = FIRST.clone()
    kept = [grad]
    grad.copy_(SECOND)
    kept.append(grad)
    return kept[0] * 2 + kept[1] * 3


def test_a_source_that_ran_fewer_backwards_has_no_weights_of_others():
    table = torch.tensor([[1.0, 0.0], [1.0, 2.0], [1.0, 0.0]])
    sources = ((0,), (1,), (2,))
    assert in_weights(sources, table, (1, 2, 1)) == "1 of rank 0, 2, (1, 2 by backward) of rank 1"
    assert in_weights(sources[:1], table[:1]) == "(1, 0 by backward) of rank 0"


def test_ranks_that_gave_the_same_are_not_counted_again():
    ones = torch.ones(3, 1)
    assert in_weights(((0, 1), (2,)), ones[:2]) == "1 of rank 0, 2 (rank 0-1 gave the same)"
    said = in_weights(((0, 3), (1, 2), (4,)), ones * torch.tensor([[1.0], [1.0], [2.0]]))
    assert said == "1 of rank 0-1 (rank 0, 3 and rank 1-2 each gave the same), 2 of rank 4"


def test_what_takes_a_kind_or_a_shape_alone_takes_no_gradient():
    one = history(lambda: FIRST.new_zeros(6, 7) + torch.zeros_like(FIRST) + SECOND * 2)
    assert [part for part, gives, *_ in told(one) if not gives] == ["SECOND * 2"]


def test_what_was_kept_and_overwritten_is_seen_where_it_is_taken():
    one = history(overwritten)
    assert told(one) == [
        ("FIRST.clone()", False, [1.0, 0.0], None),
        ("grad.copy_(SECOND)", False, [0.0, 1.0], None),
        ("kept[0] * 2", True, [0.0, 2.0], None),
        ("kept[1] * 3", False, [0.0, 1.0], None),
        ("kept[1] * 3", True, [0.0, 3.0], None),
        ("kept[0] * 2 + kept[1] * 3", False, [0.0, 2.0], None),
        ("kept[0] * 2 + kept[1] * 3", False, [0.0, 3.0], None),
        ("kept[0] * 2 + kept[1] * 3", True, [0.0, 5.0], None),
    ]
    assert one.end is not None
    assert one.end[0].tolist() == pytest.approx([0.0, 5.0], abs=1e-9)


def copied_over():
    grad = BOTH.clone()
    beside = SECOND * 3
    grad.copy_(SECOND)
    return grad * 2 + beside


def test_what_a_copy_overwrites_is_not_taken():
    one = history(copied_over)
    assert [t for t in told(one) if "copy_" in t[0]] == [
        ("grad.copy_(SECOND)", False, [0.0, pytest.approx(1.0)], None)
    ]


def flat_buffer():
    """A buffer of several parameters, which something that no line shows changes."""
    buffer = torch.cat([torch.ones(5).double(), BOTH.reshape(-1), torch.ones(3).double()])
    with torch._C.DisableTorchFunction():
        buffer[5:47] += OTHERS.reshape(-1)
    return (buffer / 2)[5:47].view(6, 7)


def test_it_is_followed_into_a_buffer_and_through_what_no_line_shows():
    one = history(flat_buffer)
    shown = [(h.computation.part, h.gives, h.weights.tolist(), h.elements) for h in one.held]
    own, both = [[1.0, 1.0], [0.0, 0.0]], [[1.0, 1.0], [1.0, 1.0]]
    assert [(g, at) for _, g, _, at in shown] == [(False, None), (False, (5, 47)), (True, (5, 47))]
    for (_, _, found, _), wanted in zip(shown, (own, both, 0.5 * torch.ones(2, 2)), strict=True):
        assert torch.allclose(torch.tensor(found), torch.as_tensor(wanted).float())
    assert shown[2][0] == "buffer / 2"


def clipped():
    param = torch.nn.Parameter(torch.zeros(6, 7, dtype=torch.float64))
    param.grad = BOTH.clone()
    clip_grad_norm_([param], 0.5)
    return param.grad * 1


def test_torchs_clip_is_seen_at_the_line_that_calls_it():
    one = history(clipped)
    factor = 0.5 / float(BOTH.norm())
    first, clip = one.held
    assert first.weights[0].tolist() == pytest.approx([1, 1])
    assert clip.computation.part == "clip_grad_norm_([param], 0.5)"
    assert clip.weights[0].tolist() == pytest.approx([factor] * 2, rel=1e-5)


def test_what_is_no_sum_of_what_the_backwards_gave_is_not_told():
    squared = history(lambda: (BOTH**2) * 3)
    assert [h.computation.part for h in squared.held] == ["BOTH**2"]  # takes it
    assert history(lambda: torch.ones(6, 7).double() * 3).held == ()
    what_was_there = torch.full((6, 7), 1e-300, dtype=torch.float64)  # as in an empty buffer
    assert history(lambda: what_was_there * 1).held == ()


def scaled_for_every_name():
    held = torch.zeros(50, dtype=torch.float64)
    held[:42] = BOTH.reshape(-1)
    grad = held[:42].view(6, 7)
    assert grad.numel() == 42
    for _ in ("words", "head"):
        grad.mul_(1e-3)
    return grad


def test_a_line_that_multiplies_twice_is_told_beside_right_ones_that_it_multiplies_once(
    monkeypatch,
):
    twice = history(scaled_for_every_name)
    assert twice.end is not None
    assert twice.end[0].tolist() == pytest.approx([1e-6] * 2, rel=1e-9)  # far below 1, and a sum
    assert "numel" not in [h.computation.function for h in twice.held]
    (found,) = multiplied_in(twice).items()
    assert (found[0].part or found[0].code) == "grad.mul_(1e-3)"
    assert found[1] == pytest.approx([1e-3, 1e-3])
    once = replace(twice, name="right", held=twice.held[:-1])
    case = SimpleNamespace(failing_cells=(), traces=None)
    monkeypatch.setattr(in_words, "_longest", lambda _: twice)
    monkeypatch.setattr(in_words, "_of_right_ones", lambda *_: [once, replace(twice, name="no")])
    cause = Diagnosis(cause="c", kind="factor", because=("b",))
    said, _, rest = in_words.with_history(case, cause).because
    assert said.endswith("multiplies w twice by 0.001 on rank 0, and right, which is right, once")
    assert rest == "b"
    monkeypatch.setattr(in_words, "_of_right_ones", lambda *_: [])
    assert in_words.with_history(case, cause).because[0].endswith("by 0.001 on rank 0")
    monkeypatch.setattr(in_words, "_longest", lambda _: once)
    assert len(in_words.with_history(case, cause).because) == 2
    unlike = replace(twice, held=(*twice.held[:-1], replace(twice.held[-1], weights=7 * ONES)))
    monkeypatch.setattr(in_words, "_longest", lambda _: unlike)
    assert len(in_words.with_history(case, cause).because) == 2


def test_weights_of_minus_one_are_weights():
    less = history(lambda: (FIRST - SECOND) * 1)
    assert less.end is not None
    assert less.end[0].tolist() == [pytest.approx(1), pytest.approx(-1)]
    assert history(lambda: -FIRST * 1).end[0].tolist() == [pytest.approx(-1), 0]


def test_a_fit_of_exactly_nothing_less_one_is_minus_one(monkeypatch):
    fit = SimpleNamespace(values=[0.0, 1.0, None, 1.0], residual=torch.zeros(42).double())
    monkeypatch.setattr(own_gradients, "fit_deviation", lambda *_: fit)
    unit = own_gradients.weights_of([columns(FIRST)]).got  # no other fits, and nothing is left
    assert unit.tolist() == [pytest.approx(-abs(float(unit[0]))), 0, 0, 0]
    assert float(unit[0])


def rounded():
    return (BOTH * 2).bfloat16().double()


def test_an_end_that_is_no_such_sum_is_told_and_only_where_it_can_be():
    one = history(rounded)
    assert [h.gives for h in one.held] == [False, True]
    assert one.end is None
    assert one.changes
    assert not history(lambda: BOTH * 1).changes  # it ends with what it had
    short = columns(rounded())
    few = replace(short, own=short.own[:, :15], measured=short.measured[:15],
                  wanted=short.wanted[:15], place=AT[:15])  # fmt: skip
    with Computations(lambda: ((), 0)) as computations:
        assert len(BOTH * 2)
    assert history_of(short, computations.computed()).held
    assert not history_of(few, computations.computed()).held


CASE = SimpleNamespace(failing_cells=(), traces=None)


def test_the_words_have_the_lines_and_what_no_line_shows(monkeypatch):
    one = history(overwritten)
    monkeypatch.setattr(in_words, "_longest", lambda _: one)
    cause = Diagnosis(cause="c", kind="weights_of_ranks", because=("b",))
    said, rest = in_words.with_history(CASE, cause).because
    assert rest == "b"
    assert "in it `kept[0] * 2` gives (0, 2 by backward) of rank 0" in said
    assert "; 2 more" in said
    assert "at the end" not in said
    ended = replace(one, end=torch.eye(2).double())
    monkeypatch.setattr(in_words, "_longest", lambda _: ended)
    said = in_words.with_history(CASE, cause).because[0]
    assert said.endswith("at the end of the step it is (1, 0 by backward) of rank 0, (0, 1 by "
                         "backward) of rank 1")  # fmt: skip
    monkeypatch.setattr(in_words, "_longest", lambda _: replace(one, end=None))
    assert "it is not seen to be a sum of that" in in_words.with_history(CASE, cause).because[0]
    forward = Diagnosis(cause="c", kind="forward", because=("b",))
    assert in_words.with_history(CASE, forward) is forward


def test_lines_that_set_a_gradient_are_told_of_wrong_parameters(monkeypatch):
    monkeypatch.setattr(in_words, "_longest", lambda _: None)
    cause = Diagnosis(cause="c", kind="micro_batches", because=("b",))
    set_at = ("/x/step.py:8", "p.grad = main[p]")
    held = tuple(SetGrad(name=name, line=set_at) for name in ("a", "right", "b"))
    empty = ("/x/step.py:5", "if p.grad is not None:")
    trace = SimpleNamespace(computed=SimpleNamespace(set_grads=held, found_none=(empty,)))
    zeros = SetGrad(name="b", line=("/x/step.py:9", "p.grad = torch.zeros_like(p)"))
    filled = SimpleNamespace(computed=SimpleNamespace(set_grads=(zeros,), found_none=()))
    cells = [SimpleNamespace(name=name, measured=torch.ones(2)) for name in ("a", "b")]
    case = SimpleNamespace(failing_cells=cells, traces=SimpleNamespace(ranks={0: trace, 1: filled}))
    line = f"{A_LINE} step.py:3"
    told = in_words.with_history(case, replace(cause, because=(line, "b"))).because
    assert (told[0], told[-1], len(told)) == (line, "b", 4)
    cells[1].measured = torch.zeros(2)
    (said,) = in_words.with_history(
        SimpleNamespace(failing_cells=cells, traces=SimpleNamespace(ranks={1: filled})), cause
    ).because[:-1]
    assert said == "the .grad of b is set at step.py:9 `p.grad = torch.zeros_like(p)`"
    cells[1].measured = torch.ones(2)
    assert in_words.with_history(case, cause).because == (
        "step.py:5 `if p.grad is not None:` reads the .grad of parameters, and finds none each "
        "time",
        "the .grad of a, b is set at step.py:8 `p.grad = main[p]`",
        "b",
    )
    assert in_words.with_history(CASE, cause) is cause


def test_lines_of_hooks_in_words():
    def lines(*numbers):
        return tuple(
            (0, Computation(function="mul", line=f"/x/a.py:{n}", code=f"line({n})", takes=(0,),
                            made_at=()))
            for n in numbers
        )  # fmt: skip

    def said(*ranks):
        held = {r: SimpleNamespace(computed=Computed(hooks=own)) for r, own in enumerate(ranks)}
        return lines_of_hooks(SimpleNamespace(traces=SimpleNamespace(ranks=held)))

    what = "what hooks of the step compute while the backward runs: "
    assert said(lines(3, 5), lines(5)) == [f"{what}a.py:3 `line(3)`; :5 `line(5)`"]
    (many,) = said(lines(1, 2, 3, 4, 5, 6, 7))
    assert many == (
        f"{what}a.py:1 `line(1)`; :2 `line(2)`; :3 `line(3)`; ...; :5 `line(5)`; :6 `line(6)`; "
        f":7 `line(7)`"
    )
    assert not said((), ())
    assert not lines_of_hooks(SimpleNamespace(traces=None))


def test_hooks_are_told_beside_what_comes_after_the_forward_once():
    one = Computation(function="mul", line="/x/a.py:3", code="line(3)", takes=(0,), made_at=())
    trace = SimpleNamespace(computed=Computed(hooks=((0, one),)))
    case = SimpleNamespace(traces=SimpleNamespace(ranks={0: trace}))
    told = with_hooks(case, Diagnosis(cause="c", kind="param_factors", because=("b",)))
    assert told.because == ("b", "what hooks of the step compute while the backward runs: a.py:3 "
                                 "`line(3)`")  # fmt: skip
    assert with_hooks(case, told) is told
    forward = Diagnosis(cause="c", kind="forward")
    assert with_hooks(case, forward) is forward
