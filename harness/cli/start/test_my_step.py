"""`pytest -m distributed`: the step of my_step.py on real ranks."""

from pathlib import Path

import pytest

TOPOLOGY = Path(__file__).with_name("my_step.yaml")


@pytest.mark.distributed
def test_every_gradient_is_right(sumgrad_check):
    verdict = sumgrad_check(TOPOLOGY)
    assert verdict.status == "pass", verdict
