"""Modules that are called in another mode than in the single process."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sumgrad.diagnose.explainers.by_modules import forward
from sumgrad.record.trace import read_trace, write_trace
from sumgrad.subjects.program.watched.watch import ModuleWatch
from torch import nn


def test_the_modes_of_a_module_are_kept(tmp_path):
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    watching = ModuleWatch(model)
    with watching:
        model(torch.randn(4, 2)).sum().backward()
        model[1].eval()
        model(torch.randn(4, 2)).sum().backward()
    write_trace(tmp_path / "one", watching.trace())
    modes = read_trace(tmp_path / "one").modes
    assert modes == {"": ("training",), "0": ("training",), "1": ("training", "eval")}


@pytest.mark.parametrize(
    ("ranks", "single", "into", "said"),
    [
        ([("training",), ("training",)], ("eval",), "right",
         ["it is in training mode there, and in eval mode in the single process"]),
        ([("eval",), ("eval", "training")], ("training",), "right",
         ["it is in eval and in training mode there, and in training mode in the single process"]),
        ([("training",), ("training",)], ("eval",), "wrong", []),
        ([("training",), ("training",)], ("training",), "right", []),
        ([("training",), ("eval",)], ("eval", "training"), "right", []),
        ([(), ()], ("eval",), "right", []),  # as older runs wrote it down
        ([("training",), ("training",)], (), "right", []),
    ],
)  # fmt: skip
def test_another_mode_is_said_where_what_goes_in_is_right(monkeypatch, ranks, single, into, said):
    monkeypatch.setattr(forward, "what_goes_into", lambda case, found: into)
    traces = SimpleNamespace(
        ranks={i: SimpleNamespace(modes={"norm": modes}) for i, modes in enumerate(ranks)},
        single=SimpleNamespace(modes={"norm": single}),
    )
    case = SimpleNamespace(traces=traces)
    found = SimpleNamespace(ranks=(0, 1), wrong="norm")
    assert forward._in_another_mode(case, found) == said
