"""What is written of an error that ends a rank."""

from __future__ import annotations

import pytest
from sumgrad.launch.guard import _one_line


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("a  b\n c"), "ValueError: a b c"),
        (KeyError(), "KeyError"),
        (RuntimeError("x" * 500), f"RuntimeError: {'x' * 386}"),
        (RuntimeError("Cannot use ReduceOp.PREMUL_SUM with Gloo"),
         "RuntimeError: Cannot use ReduceOp.PREMUL_SUM with Gloo (Gloo has none: let FSDP2 sum by "
         "set_force_sum_reduction_for_comms(True), beside set_gradient_divide_factor)"),
        (ValueError("SyncBatchNorm layers only work with GPU modules"),
         "ValueError: SyncBatchNorm layers only work with GPU modules (on CPU tensors it works "
         "without DDP, with gradients reduced by hand)"),
    ],
)  # fmt: skip
def test_an_error_is_one_line_with_what_a_user_can_do(error, said):
    assert _one_line(error) == said
