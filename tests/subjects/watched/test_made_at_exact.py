"""Which line made a tensor, or wrote into it; which gradient a backward is handed."""

from __future__ import annotations

from dataclasses import replace

import torch
from sumgrad.record.trace import read_trace, write_trace
from sumgrad.subjects.program.watched.computations import Computations
from sumgrad.subjects.program.watched.made_at import MadeAt
from sumgrad.subjects.program.watched.watch import ModuleWatch
from torch import nn

A, B, C = ("/x/a.py:1", "a"), ("/x/a.py:2", "b"), ("/x/a.py:3", "c")


def test_the_later_of_what_made_it_and_what_wrote_into_it():
    lines, base = MadeAt(), torch.zeros(4)
    lines.made(base, A)
    assert lines.of(base) == A
    lines.written(base[:2], B)
    assert lines.of(base) == B
    view = base[1:]
    lines.made(view, C)
    assert lines.of(view) == C  # the cut came after it
    lines.written(base, A)
    assert lines.of(view) == A
    assert lines.of(torch.ones(2)) == ("", "")  # by no line that is known


def test_what_had_written_into_the_memory_of_a_view_before_it_was_made():
    lines, base = MadeAt(), torch.zeros(4)
    lines.made(base, A)
    assert lines.before(base) == ("", "")
    lines.written(base[:2], B)
    assert lines.before(base) == ("", "")  # after it was made
    view = base[1:]
    lines.made(view, C)
    assert lines.before(view) == B
    lines.written(view, A)
    assert lines.before(view) == ("", "")
    copy = base.clone()
    lines.made(copy, C)
    assert lines.before(copy) == ("", "")


def test_memory_that_is_given_out_again_is_new():
    lines, base = MadeAt(), torch.zeros(4)
    lines.made(base, A)
    lines.made(base, C)  # what returns what it was given makes nothing
    lines.written(base, B)
    assert lines.of(base) == B
    other = torch.zeros(4)
    view = other[1:]
    lines.made(view, C)
    lines._written[other.data_ptr()] = lines._written[base.data_ptr()]  # as if it had its address
    assert lines.before(view) == B
    del base
    assert lines.before(view) == ("", "")


def test_lines_of_a_step_that_fills_a_buffer():
    def step():
        buffer = torch.zeros(4)
        buffer[:2].copy_(torch.ones(2))
        return buffer

    with Computations(lambda: ((), 0)) as computations:
        made = computations.made_at(step())
    assert made[1] == "buffer[:2].copy_(torch.ones(2))"


def test_a_gradient_that_is_handed_to_a_backward(tmp_path):
    layer = nn.Linear(3, 3)
    watching = ModuleWatch(layer)
    with watching, Computations(watching.now) as computations:
        watching.made_at, computations.starts = computations.made_at, watching.starts
        out = layer(torch.ones(2, 3))
        back = torch.full((2, 3), 2.0)
        out.backward(back)
        layer(torch.ones(2, 3)).sum().backward()  # autograd begins with ones of its own
    write_trace(tmp_path / "one", watching.trace())
    (one,) = read_trace(tmp_path / "one").started
    trace = watching.trace()
    assert (trace.calls[one.call].module, trace.calls[one.call].number) == ("", 0)
    assert one.line[1] == "out.backward(back)"
    assert one.made[1] == "back = torch.full((2, 3), 2.0)"


def test_lines_that_put_something_in_place_of_a_gradient(tmp_path):
    layer = nn.Linear(3, 3)
    watching = ModuleWatch(layer)
    with watching, Computations(watching.now) as computations:
        computations.name_of = watching.name_of
        layer(torch.ones(2, 3)).sum().backward()
        held = layer.weight.grad
        layer.weight.grad = None
        for _ in range(2):
            layer.weight.grad = held * 2
        other = torch.zeros(3, requires_grad=True)
        other.grad = torch.ones(3)  # of no parameter
    trace = replace(watching.trace(), computed=computations.computed())
    write_trace(tmp_path / "one", trace)
    (one,) = read_trace(tmp_path / "one").computed.set_grads
    assert (one.name, one.line[1]) == ("weight", "layer.weight.grad = held * 2")


def test_lines_that_find_no_gradient(tmp_path):
    layer = nn.Linear(3, 3)
    watching = ModuleWatch(layer)
    with watching, Computations(watching.now) as computations:
        computations.name_of = watching.name_of
        for _ in range(2):
            layer(torch.ones(2, 3)).sum().backward()
            never = layer.bias.grad
            layer.bias.grad = None
            none = layer.bias.grad
            if torch.is_tensor(never) and layer.weight.grad is None:
                raise AssertionError
            layer.weight.grad = None
    assert none is None
    trace = replace(watching.trace(), computed=computations.computed())
    write_trace(tmp_path / "one", trace)
    (line,) = read_trace(tmp_path / "one").computed.found_none
    assert line[1] == "none = layer.bias.grad"


def test_data_are_kept_with_the_line_that_made_them(tmp_path):
    layer = nn.Embedding(5, 2)
    watching = ModuleWatch(layer)
    with watching, Computations(watching.now) as computations:
        watching.made_at = computations.made_at
        layer(torch.arange(6).reshape(2, 3) % 5)
        layer(torch.tensor([[1, 2]]))
    write_trace(tmp_path / "one", watching.trace())
    trace = read_trace(tmp_path / "one")
    assert trace.entered == ("", "")
    assert [code for _, code in trace.entered_at] == [
        "layer(torch.arange(6).reshape(2, 3) % 5)",
        "layer(torch.tensor([[1, 2]]))",
    ]
