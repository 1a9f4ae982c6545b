"""What was done to gradients between backward and optimizer, as one process sees it."""

from __future__ import annotations

import pytest
import torch
from sumgrad.launch.script.watched.rescaled import Rescaled
from sumgrad.subjects.script.models import Held
from torch import nn


@pytest.fixture
def seen(monkeypatch):
    """(model, what observes it, its parameters), after one backward."""
    for name in ("clip_grad_norm_", "clip_grads_with_norm_"):
        for module in (nn.utils, nn.utils.clip_grad):
            monkeypatch.setattr(module, name, getattr(nn.utils, name), raising=False)
    torch.manual_seed(0)
    model = nn.Linear(5, 3).double()
    held = [Held(name=n, param=p, index=None, shape=tuple(p.shape))
            for n, p in model.named_parameters()]  # fmt: skip
    rescaled = Rescaled(lambda: held)
    rescaled.install()
    model(torch.randn(4, 5).double()).square().mean().backward()
    rescaled.after_backward()
    return model, rescaled, held


def test_a_clip_of_torchs_is_seen_with_its_factor(seen):
    model, rescaled, held = seen
    for p in model.parameters():
        p.grad /= 8  # what is before the clip is no part of it
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    told = rescaled.taken(held)
    for factor, by_clip in told.values():
        assert factor == pytest.approx(1e-3 / (float(norm) + 1e-6), rel=1e-12)
        assert by_clip
    assert rescaled.taken(held) == {}


def test_a_clip_of_some_parameters_says_nothing_of_others(seen):
    """As a discriminator's does, between a generator's backwards."""
    model, rescaled, held = seen
    norm = float(nn.utils.clip_grad_norm_(iter([model.bias]), 1e-3))
    model.weight.grad *= 5
    rescaled.after_backward()  # another backward, for the weight
    model.weight.grad *= 2
    told = rescaled.taken(held)
    assert told["weight"] == [pytest.approx(2.0), False]
    assert told["bias"] == [pytest.approx(1e-3 / norm, rel=1e-4), True]


def test_other_changes_are_seen_against_the_backward(seen):
    model, rescaled, held = seen
    model.weight.grad *= 3
    assert rescaled.taken(held) == {"weight": [pytest.approx(3.0), False], "bias": [1.0, False]}


def test_what_is_no_multiple_has_no_factor_and_zeros_tell_nothing(seen):
    model, rescaled, held = seen
    model.bias.grad.zero_()
    rescaled.after_backward()
    model.weight.grad += model.weight.detach()
    assert rescaled.taken(held) == {"weight": [None, False]}


def test_gradients_that_stay_as_they_are_are_not_listed(seen):
    _, rescaled, held = seen
    assert rescaled.taken(held) == {}


def test_a_clip_that_is_called_for_the_norm_alone_is_followed_by_another(seen):
    """A rank's own norm is logged, then gradients are reduced, and clipped: that one is it."""
    model, rescaled, held = seen
    nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
    for p in model.parameters():
        p.grad += torch.arange(p.grad.numel()).reshape(p.grad.shape)  # others' come in
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), 1e-3))
    told = rescaled.taken(held)
    assert told.keys() == {"weight", "bias"}
    for factor, by_clip in told.values():
        assert factor == pytest.approx(1e-3 / (norm + 1e-6), rel=1e-12)
        assert by_clip
    nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
    model.weight.grad *= 2
    told = rescaled.taken(held)
    assert told == {"weight": [pytest.approx(2.0), False], "bias": [1.0, True]}


def test_what_no_backward_left_there_is_said(seen):
    model, rescaled, held = seen
    rescaled.taken(held)
    assert rescaled.unseen == []
    model.weight.grad = torch.ones(3, 5).double()  # as by torch.autograd.grad
    model.bias.grad = None
    rescaled.taken(held)
    assert rescaled.unseen == ["weight", "bias"]
    model.bias.requires_grad_(False)
    rescaled.taken(held)
    assert rescaled.unseen == ["weight"]
