"""What a step leaves beside gradients: frozen parameters put back, buffers kept, by their size."""

from __future__ import annotations

import torch
from sumgrad.subjects.program import frozen, unseen
from sumgrad.subjects.program.frozen import Frozen
from sumgrad.subjects.program.unseen import buffers_after
from torch import nn


def frozen_model() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(3, 3), nn.Linear(2, 2)).requires_grad_(False)
    model[2].requires_grad_(True)
    return model


def test_what_is_not_trained_is_put_back():
    model = frozen_model()
    first = [p.detach().clone() for p in model.parameters()]
    held = Frozen(model)
    assert [*held.said()["frozen"]] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert all(before == after for before, after in held.said()["frozen"].values())
    with torch.no_grad():
        for param in model.parameters():
            param.data.add_(1)
    said = held.said()
    assert all(before != after for before, after in said["frozen"].values())
    assert said["frozen_left"] == []
    held.put_back()
    now = [p.detach() for p in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(now[:4], first[:4], strict=True))
    assert torch.equal(now[4], first[4] + 1)


def test_what_is_too_large_is_not_put_back_and_said(monkeypatch):
    """The smallest are: biases of 2 and 3, a weight of 4; one of 9 is not."""
    monkeypatch.setattr(frozen, "MOST_COPIED", 17)
    model = frozen_model()
    held = Frozen(model)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1)
    assert held.said()["frozen_left"] == ["1.weight"]
    held.put_back()
    now = held.said()["frozen"]
    assert [name for name, (before, after) in now.items() if before != after] == ["1.weight"]


def test_a_large_buffer_is_kept_where_it_is_changed(monkeypatch):
    monkeypatch.setattr(unseen, "KEPT_UNCHANGED", 2)
    monkeypatch.setattr(unseen, "MOST_KEPT", 4)
    model = nn.Module()
    for name, size in (("small", 2), ("large", 3), ("other", 3), ("huge", 5), ("wanted", 5)):
        model.register_buffer(name, torch.zeros(size))
    before = {name: b.clone() for name, b in model.named_buffers()}
    for name in ("large", "huge"):
        getattr(model, name).add_(1)
    held, changed = buffers_after(model, before, lambda name: name == "wanted")
    assert changed == ["large", "huge"]
    assert [*held] == ["small", "large", "wanted"]
    assert torch.equal(held["large"], torch.ones(3))
