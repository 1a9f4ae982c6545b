"""torch's own check of the custom operators: schema, fake tensors, autograd, compiled tracing."""

from __future__ import annotations

import pytest
import torch
from sumgrad.kernels import custom_ops
from sumgrad.kernels.layer_norm import layer_norm
from sumgrad.kernels.linear import linear
from sumgrad.kernels.rms_norm import rms_norm
from sumgrad.kernels.swiglu import swiglu


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).requires_grad_()


CASES = {
    "swiglu": (custom_ops.swiglu_op, swiglu, lambda: (draw(5, 6), draw(5, 6, seed=1))),
    "rms_norm": (custom_ops.rms_norm_op, rms_norm, lambda: (draw(5, 6), draw(6), 1e-6)),
    "layer_norm": (
        custom_ops.layer_norm_op, layer_norm, lambda: (draw(5, 6), draw(6), draw(6, seed=1), 1e-5)
    ),
    "linear": (custom_ops.linear_op, linear, lambda: (draw(5, 6), draw(3, 6), draw(3))),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_opcheck(name):
    operator, _, inputs = CASES[name]
    torch.library.opcheck(operator, inputs())


@pytest.mark.parametrize("name", CASES)
def test_the_same_bits_as_the_function(name):
    _, function, inputs = CASES[name]
    leaves = inputs()
    tensors = [t for t in leaves if isinstance(t, torch.Tensor)]
    registered = getattr(torch.ops.sumgrad, name)(*leaves)
    first = registered[0] if isinstance(registered, tuple) else registered
    second = function(*tensors)
    assert torch.equal(first, second)
    seed = torch.ones_like(first)
    for a, b in zip(
        torch.autograd.grad(first, tensors, seed),
        torch.autograd.grad(second, tensors, seed),
        strict=True,
    ):
        assert torch.equal(a, b)


def test_what_does_not_fit_is_refused_not_read_past_its_end():
    ones = torch.ones
    for call in (
        lambda: torch.ops.sumgrad.linear(ones(2, 8), ones(3, 4), ones(3)),
        lambda: torch.ops.sumgrad.rms_norm(ones(4, 8), ones(4), 1e-6),
        lambda: torch.ops.sumgrad.layer_norm(ones(4, 8), ones(8), ones(4), 1e-6),
        lambda: torch.ops.sumgrad.swiglu(ones(8), ones(4)),
    ):
        with pytest.raises(ValueError, match="got shape"):
            call()
