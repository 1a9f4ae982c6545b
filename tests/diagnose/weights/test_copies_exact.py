"""What a gradient lacks, and that a copy of the output got: cut graphs that really ran."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.explainers.by_modules.backwards.gradient_of_others import (
    copies_in_words,
    lost_on_the_way,
)
from sumgrad.diagnose.explainers.of_others.copies_of_parameters import with_copies_of_parameters
from sumgrad.diagnose.modules.weights.copies import lost_at_copies
from sumgrad.diagnose.modules.where.look import look_at
from sumgrad.record.trace import Traces, read_trace, write_trace
from sumgrad.subjects.program.watched.computations import Computations
from sumgrad.subjects.program.watched.watch import ModuleWatch
from torch import nn

G = torch.Generator().manual_seed(4)
X = torch.randn(6, 3, generator=G, dtype=torch.float64)
W = [torch.randn(4, generator=G, dtype=torch.float64) for _ in range(3)]
OWN = slice(1, 4)


class First(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.Linear(3, 4).double()

    def forward(self, x):
        return self.linear(x)


def uses(h, number):
    return (h @ W[number]).tanh().sum()


def traced(step):
    model = First()
    with ModuleWatch(model) as watch, Computations(watch.now) as computations:
        step(model)
    return watch.trace({"x": X}), computations.computed()


def whole(model):
    h = model(X)
    sum(uses(h, number) for number in range(3)).backward()


def cut(times, handed, scale=1.0):
    """Each use has a backward of its own, on a copy; `handed` of these gradients go back."""

    def step(model):
        h = model(X[OWN])
        copy = h.detach().requires_grad_()
        came = []
        for number in times:
            (scale * uses(copy, number)).backward()
            came.append(copy.grad)
            copy.grad = None
        rest = [n for n in range(3) if n not in times]
        own = sum(scale * uses(h, n) for n in rest)
        back = [came[times.index(n)] for n in handed]
        back = sum(back) if back else torch.zeros_like(h)
        torch.autograd.backward([own, h] if rest else [h], [None, back] if rest else [back])

    return step


def found_in(tmp_path, mine, other=None):
    traces = {}
    for rank, step in enumerate([mine, other or whole]):
        trace, computed = traced(step)
        object.__setattr__(trace, "computed", computed)
        write_trace(tmp_path / str(rank), trace)  # as it is read by a judge
        traces[rank] = read_trace(tmp_path / str(rank))
    single, computed = traced(whole)
    object.__setattr__(single, "computed", computed)
    both = Traces(tier="structure", step=0, ranks={0: traces[0]}, single=single)
    seen = look_at(both, "float64", ()).seen["linear"]
    return both, [s for s in seen if s.backward == "wrong"]


@pytest.mark.parametrize(
    ("times", "handed", "scale", "lost"),
    [
        ((0, 1, 2), (2,), 1.0, (2, 3)),
        ((0, 1), (), 1.0, (2, 2)),
        ((1,), (), 0.25, (1, 1)),
        ((0, 1, 2), (0, 1, 2), 1.0, None),  # all is right
    ],
)
def test_what_is_not_handed_back_is_found_at_the_copy(tmp_path, times, handed, scale, lost):
    both, wrong = found_in(tmp_path, cut(times, handed, scale))
    _, found = lost_at_copies(both, wrong, scale) or (None, [])
    told = [(one.rank, one.backwards, one.of) for one in found]
    assert told == ([] if lost is None else [(0, *lost)])
    assert bool(wrong) == (lost is not None)


def test_what_is_wrong_by_something_else_lacks_nothing_at_a_copy(tmp_path):
    def step(model):
        h = model(X[OWN])
        copy = h.detach().requires_grad_()
        uses(copy, 0).backward()
        torch.autograd.backward([uses(h, 1) + uses(h, 2), h], [None, copy.grad * 0.5])

    both, wrong = found_in(tmp_path, step)
    assert wrong
    assert lost_at_copies(both, wrong) is None


def test_a_copy_that_was_handed_back_in_part_explains_nothing(tmp_path):
    """Of two backwards none of the first and half of the second: that is no backward forgotten."""

    def step(model):
        h = model(X[OWN])
        copy, came = h.detach().requires_grad_(), []
        for number in (0, 1):
            uses(copy, number).backward()
            came.append(copy.grad)
            copy.grad = None
        torch.autograd.backward([uses(h, 2), h], [None, came[1] * 0.5])

    both, wrong = found_in(tmp_path, step)
    assert wrong
    assert lost_at_copies(both, wrong) is None


def test_the_words_name_the_copy_and_how_many_backwards(tmp_path, monkeypatch):
    both, wrong = found_in(tmp_path, cut((0, 1, 2), (2,)))
    module = "sumgrad.diagnose.explainers.by_modules.backwards.gradient_of_others.traces_looked_at"
    monkeypatch.setattr(module, lambda case: both)
    found = SimpleNamespace(seen=tuple(wrong), over_all=False, modules=())
    (said,) = lost_on_the_way(None, None, found)
    assert said.startswith("on rank 0 in call 0 it lacks exactly what reached its copy on rank 0 "
                           "(made at tests/diagnose/weights/test_copies_exact.py:")  # fmt: skip
    assert said.endswith("`copy = h.detach().requires_grad_()`) in 2 of 3 backwards and is not "
                         "handed back")  # fmt: skip
    (nowhere,) = lost_at_copies(both, wrong)[1]
    assert copies_in_words([replace(nowhere, made=("", ""))]).startswith(
        "its copy on rank 0 (the one that tests/diagnose/weights/test_copies_exact.py:"
    )
    found.over_all = True
    assert lost_on_the_way(None, None, found) == []


def test_a_parameter_whose_copy_got_what_it_lacks():
    """As an expert that is lent: of three uses two are of copies, and one is handed back."""
    drawn = torch.Generator().manual_seed(9)
    weight = torch.randn(4, 3, generator=drawn, dtype=torch.float64)
    wanted = torch.autograd.functional.jacobian(lambda w: used(w, (0, 1, 2)), weight)

    def lent(numbers):
        with Computations(lambda: ((), 0)) as computations:
            own, copy = weight.clone().requires_grad_(), weight.detach().clone().requires_grad_()
            used(own, (0,)).backward()
            came = []
            for number in (1, 2):
                used(copy, (number,)).backward()
                came.append(copy.grad)
                copy.grad = None
            measured = own.grad + sum(came[n - 1] for n in numbers)
        return measured, computations.computed()

    def told(numbers, kind="lost_rows"):
        measured, computed = lent(numbers)
        ranks = {0: SimpleNamespace(computed=computed)}
        traces = SimpleNamespace(tier="t", step=0, ranks=ranks,
                                 single=SimpleNamespace(params={"w": weight}))  # fmt: skip
        cell = SimpleNamespace(name="w", rank=0, measured=measured, index=None,
                               wanted=SimpleNamespace(value=wanted))  # fmt: skip
        case = SimpleNamespace(traces=traces,
                               has_plan=False, exact=True, failing_cells=[cell])  # fmt: skip
        cause = Diagnosis(cause="c", kind=kind, because=("b",))
        return with_copies_of_parameters(case, cause).because

    said, rest = told((1,))
    assert rest == "b"
    assert said.startswith("w on rank 0 lacks exactly what reached its copy on rank 0 (made at ")
    assert said.endswith(") in 1 of 2 backwards and is not handed back")
    assert told((1, 2)) == ("b",)
    assert told((1,), "forward") == ("b",)


def used(weight, numbers):
    return sum(((X + n) @ weight.t()).tanh().sum() for n in numbers)
