"""`pytest -m distributed`: the step of my_step.py on real ranks."""

import pytest


@pytest.mark.distributed
def test_every_gradient_is_right(sumgrad_check):
    sumgrad_check("my_step.yaml").assert_pass()  # a topology beside this file
