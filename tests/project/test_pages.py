"""The examples of docs/ do what their pages say: every block of Python and YAML, every command."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from sumgrad.cli.arguments import make_parser
from sumgrad.subjects.program.protocol import is_program
from sumgrad.topology.pools import load_topology

PAGES = {path.stem: path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))}


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGES[page], flags=re.S | re.M)


def run(*words: str, at: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *words], cwd=at, env=env, capture_output=True, text=True, check=False
    )


def test_no_block_is_left_out():
    """A new one needs its test here; pages whose blocks have one elsewhere are named."""
    elsewhere = {"ci"}
    found = {
        (name, language): len(blocks(name, language))
        for name in PAGES
        for language in ("python", "yaml")
        if name not in elsewhere and blocks(name, language)
    }
    assert found == {
        ("commands", "python"): 1, ("commands", "yaml"): 1, ("kernels", "python"): 3,
        ("programs", "python"): 1,
    }  # fmt: skip


def test_every_command_of_every_page_is_one():
    lines = [
        line
        for text in PAGES.values()
        for line in re.findall(
            r"^    (sumgrad \w.*?)(?:\s+#.*)?$", text.replace("\\\n", " "), flags=re.M
        )
    ]
    assert len(lines) >= 26
    for line in lines:
        make_parser().parse_args(shlex.split(line)[1:])


def test_the_topology_of_the_commands_page_loads(tmp_path):
    (tmp_path / "mine.yaml").write_text(blocks("commands", "yaml")[0])
    topology = load_topology(tmp_path / "mine.yaml")
    assert (topology.name, topology.world_size) == ("mine", 5 + 3 + 7 + 11)


def test_the_protocol_of_the_programs_page_is_the_protocol():
    held: dict[str, type] = {}
    exec(blocks("programs", "python")[0], held)
    assert is_program(held["MyStep"])


@pytest.mark.distributed
def test_the_test_of_the_commands_page_passes_on_its_ranks(tmp_path):
    text = f"import pytest\nimport torch\n\n\n{blocks('commands', 'python')[0]}"
    (tmp_path / "test_reduction.py").write_text(text)
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_reduction.py", at=tmp_path)
    assert (done.returncode, "1 passed" in done.stdout) == (0, True), done.stdout + done.stderr


def test_the_operator_of_the_kernels_page_is_judged(tmp_path):
    """torch's own gradient of the weight depends on how rows are laid out: red, and listed."""
    (tmp_path / "test_mine.py").write_text(blocks("kernels", "python")[1])
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_mine.py", at=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "my_norm" in done.stdout
    assert re.search(r"\bw\b.*differ|dw", done.stdout), done.stdout


def test_the_tree_of_the_kernels_page_has_the_same_bits_in_any_order(tmp_path):
    """Its lines as they stand, with other micro-batches in place of its dots."""
    interpreted, use = blocks("kernels", "python")[2], blocks("kernels", "python")[0]
    first, last = use.split("...", 1)
    text = f"""{interpreted}
import torch

torch.manual_seed(0)
weight = torch.randn(6, 5, requires_grad=True)
lengths = [37, 16, 1, 50]
data = {{s: (torch.randn(lengths[s % 4], 5), torch.randn(lengths[s % 4], 6)) for s in range(12)}}


def of(samples):
    return [torch.cat([data[s][i] for s in samples]) for i in (0, 1)]


def more(samples):
    x, dy = of(samples)
    layout = Layout.packed([lengths[s % 4] for s in samples], samples=samples, num_samples=12)
    linear(x, weight, layout=layout, sinks={{"weight": tree}}).backward(dy)


roots = []
for others in ([[0, 1, 2, 3], [8, 9, 10, 11]], [[11], [8, 3, 0], [10, 9], [2, 1]]):
    x, dy = of([4, 5, 6, 7])
{_indented(first)}
    for samples in others:
        more(samples)
    root = {last.split("root = ")[1]}
    roots.append(root)
assert weight.grad is None
assert root.dtype == torch.float32 and root.shape == weight.shape
assert torch.equal(*roots)
wanted = sum(dy.double().T @ x.double() for x, dy in data.values())
assert float((root - wanted).abs().max()) < 1e-4
"""
    (tmp_path / "use.py").write_text(text)
    done = run("use.py", at=tmp_path)
    assert done.returncode == 0, done.stderr


def _indented(text: str) -> str:
    return "".join(f"    {line}\n" if line.strip() else "\n" for line in text.splitlines())


def test_the_page_of_causes_counts_the_bugs_that_there_are():
    number = len(list((ROOT / "tests" / "bugs").glob("*.py")))
    assert f"`tests/bugs` has {number} Programs" in (ROOT / "docs" / "causes.md").read_text()
