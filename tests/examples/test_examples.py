"""Every page of examples/ is a clean step: PASS, or UNKNOWN by a choice that the verdict names.

What needs a library that is not installed is skipped: `pip install -e .[examples]`, then
`pytest -m examples`. All seeds: scripts/clean_steps.py.
"""

from __future__ import annotations

import clean_steps
import pytest
from conftest import ROOT

pytestmark = pytest.mark.examples
SLOW = ("CompiledModel", "CompiledDDP")  # a minute each; the script runs them
STEPS = [s for s in clean_steps.steps() if s.workload is not None and s.name not in SLOW]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_a_page_is_a_clean_step(step, sumgrad_launcher):
    if lacking := clean_steps.missing(step):
        pytest.skip(f"needs {', '.join(lacking)}: pip install -e .[examples]")
    row = clean_steps.check(step, 0, sumgrad_launcher)
    assert clean_steps.as_it_should_be(row), row


def test_every_page_is_in_the_table():
    named = {step.workload.rpartition("/")[2] for step in STEPS}
    pages = {path.name for path in (ROOT / "examples").glob("*.py")}
    assert pages == {name.partition(":")[0] for name in named}
