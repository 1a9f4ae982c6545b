"""Which of the runs of a script on one process tell the noise of the single run."""

from __future__ import annotations

import contextlib

import torch
from sumgrad.launch.script import running
from sumgrad.launch.script.single_runs import heard
from sumgrad.subjects.script.reference import Single


def run(*stepped):
    """A run whose optimizers step these parameters, one after the other."""
    weights = {"w": torch.ones(2, dtype=torch.float64), "b": torch.ones(1, dtype=torch.float64)}
    each = tuple({n: weights[n]} for n in stepped)
    return Single(
        params={n: tuple(t.shape) for n, t in weights.items()},
        dtype="float64",
        grads=each,
        after=each,
        buffers=(({}, ()),) * len(each),
        steps=({},) * len(each),
        unknown=(),
    )


def test_runs_that_end_before_it_or_step_in_another_order_tell_none():
    single = run("w", "b")
    assert len(heard(single, [run("w", "b"), "why"])) == 2
    assert heard(single, [run("b", "w")]) == []
    assert heard(single, [run("w")]) == []
    assert len(heard(single, [run("b", "w"), run("w", "b", "w")])) == 2


def test_where_a_script_raised_is_a_line_of_its_own():
    """Not ours that looks on, nor torch's, nor Python's."""
    ours, theirs = running.__file__, torch.__file__
    files = [("/home/me/train.py", 12), ("/home/me/model.py", 40), (theirs, 9), (ours, 49),
             (contextlib.__file__, 3), ("<frozen runpy>", 1)]  # fmt: skip
    stack = "".join(f'  File "{file}", line {line}, in f\n    x\n' for file, line in files)
    assert running._place_in(stack) == "/home/me/model.py:40"
    assert running._place_in(f'  File "{ours}", line 1, in f\n') is None
