"""What is kept for the backward, beside what a user's hooks give back."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.explainers.left_over.kept_otherwise import with_what_was_kept
from sumgrad.record.computed import Computed, computed_as_json, computed_from
from sumgrad.subjects.program.watched.computations import Computations
from sumgrad.subjects.program.watched.kept import Kept
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

X = torch.randn(4, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


class Offload:
    """Gives back what it was given, or its transpose."""

    def __init__(self, turned):
        self.turned = turned

    def pack(self, tensor):
        return tensor.detach().clone()

    def unpack(self, held):
        return held.t() if self.turned else held


def step(turned=False):
    offload = Offload(turned)
    x = X.clone().requires_grad_()
    with saved_tensors_hooks(offload.pack, offload.unpack):
        out = x @ X.sin()
    out.square().sum().backward()
    return x.grad


@pytest.mark.parametrize("turned", [False, True])
def test_what_comes_back_is_held_against_what_was_kept(turned):
    plain = step(turned)
    with Computations(lambda: ((), 0)) as computations:
        watched = step(turned)
    assert torch.equal(watched, plain)  # nothing is changed by looking
    unlike = computations.computed().unlike
    assert len(unlike) == turned
    for one in unlike:
        assert [text.rpartition(":")[0] for text in (one.line, one.pack, one.unpack)] == [
            __file__
        ] * 3
        lines = [int(text.rpartition(":")[2]) for text in (one.pack, one.unpack)]
        code = [Offload.pack.__code__, Offload.unpack.__code__]
        assert lines == [c.co_firstlineno for c in code]
    again = computed_from(computed_as_json(Computed(unlike=unlike)), {})
    assert again.unlike == unlike


def test_other_digits_are_something_else_and_a_shape_too():
    x = X.clone().requires_grad_()
    with Kept() as kept:
        with saved_tensors_hooks(lambda t: t.bfloat16(), lambda t: t.double()):
            (x * x).sum().backward()
        with saved_tensors_hooks(lambda t: t, lambda t: t.reshape(-1)):
            x.exp()
    assert len(kept.unlike) == 1


def test_torchs_own_hooks_and_those_behind_it_are_left_alone():
    before = saved_tensors_hooks.__enter__
    x = X.clone().requires_grad_()
    with Kept() as kept:
        checkpoint(lambda t: (t @ t).sin(), x, use_reentrant=False).sum().backward()
        with torch.autograd.graph.save_on_cpu():
            (x * x).sum().backward()
        with saved_tensors_hooks(partial(Offload(True).pack), Offload(True).unpack):
            (x @ x).sum().backward()  # where it stands is not known
    assert not kept.unlike
    assert saved_tensors_hooks.__enter__ is before


def case(*unlike, kind="backward"):
    ranks = {r: SimpleNamespace(computed=Computed(unlike=tuple(u))) for r, u in enumerate(unlike)}
    traces = SimpleNamespace(tier="structure", step=0, ranks=ranks)
    found = SimpleNamespace(traces=traces)
    return with_what_was_kept(found, Diagnosis(cause="open: what", kind=kind, because=("b",)))


def test_it_leads_where_the_backward_is_wrong():
    with Computations(lambda: ((), 0)) as computations:
        step(turned=True)
    (one,) = computations.computed().unlike
    told = case([], [one])
    assert told.cause.startswith("what autograd kept for the backward at tests/subjects/")
    assert "came back as something else on rank 1: it goes through the hooks" in told.cause
    assert (told.because, told.kind, told.ranks) == (("what",), "saved_input", (1,))
    assert case([], []).kind == "backward"
    assert case([one], [], kind="factor").kind == "factor"
