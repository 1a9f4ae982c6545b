"""docs/ci.md: its YAML is YAML, and its commands are commands that this version takes."""

from __future__ import annotations

import re
import shlex
import subprocess

import pytest
import yaml
from conftest import ROOT
from sumgrad.cli.arguments import Parser, add_run_flags, make_parser

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


def test_the_jobs_of_clusters_start_what_there_is():
    """Their commands are torchrun's, and what follows the module is what harness/run.py takes."""
    folder = ROOT / "examples" / "clusters"
    job = yaml.safe_load((folder / "pytorchjob.yaml").read_text())
    hosts = job["spec"]["pytorchReplicaSpecs"]
    (container,) = hosts["Master"]["template"]["spec"]["containers"]
    assert hosts["Worker"] == hosts["Master"]
    shells = [(folder / name).read_text() for name in ("slurm.sbatch", "torchrun.sh")]
    texts = [text.replace("\\\n", " ") for text in shells]
    commands = [container["command"]]
    commands += [shlex.split(re.search(r"torchrun --nnodes.*", text)[0]) for text in texts]
    parser = Parser(prog="x")
    parser.add_argument("--topology")
    add_run_flags(parser)
    for words in commands:
        after = words[words.index("-m") + 1 :]
        assert after[0] == "sumgrad.run"
        assert parser.parse_args(after[1:]).timeout == 300.0


@pytest.mark.parametrize("name", ["slurm.sbatch", "torchrun.sh"])
def test_the_scripts_of_clusters_are_bash(name):
    subprocess.run(["bash", "-n", ROOT / "examples" / "clusters" / name], check=True)
