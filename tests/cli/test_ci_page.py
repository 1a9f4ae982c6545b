"""docs/ci.md: its YAML is YAML, and its commands are commands that this version takes."""

from __future__ import annotations

import re
import shlex

import pytest
import yaml
from conftest import ROOT
from sumgrad.cli.arguments import make_parser

PAGE = (ROOT / "docs" / "ci.md").read_text()
BLOCKS = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.S)]


def commands(value):
    """Every command of sumgrad's in a block of YAML."""
    if isinstance(value, dict):
        for item in value.values():
            yield from commands(item)
    elif isinstance(value, list):
        for item in value:
            yield from commands(item)
    elif isinstance(value, str) and value.startswith("sumgrad "):
        yield value


SHOWN = [c for block in BLOCKS for c in commands(block)]
SHOWN += [line.partition("  #")[0] for line in re.findall(r"^    (sumgrad .*)$", PAGE, flags=re.M)]


def test_there_is_a_block_for_each_engine():
    github, gitlab, hook = BLOCKS
    assert [step.get("uses", "run").partition("@")[0] for step in github["jobs"]["gradients"][
        "steps"]] == ["actions/checkout", "actions/setup-python", "run", "run", "run",
                      "actions/upload-artifact"]  # fmt: skip
    assert gitlab["gradients"]["artifacts"]["reports"] == {"junit": "gradients.xml"}
    assert hook["repos"][0]["hooks"][0]["language"] == "system"
    assert len(SHOWN) == 6


@pytest.mark.parametrize("command", SHOWN)
def test_each_command_is_one(command):
    make_parser().parse_args(shlex.split(command)[1:])
