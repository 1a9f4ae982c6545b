"""The worked examples of docs/architecture.md still apply, and each fits in two files and a test.

`scripts/worked_examples.py` runs their tests too.
"""

from __future__ import annotations

import re
import subprocess

import worked_examples
from conftest import ROOT


def test_they_apply_one_after_the_other(tmp_path):
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in {
        f for patch in worked_examples.patches() for f in worked_examples.files_of(patch)[0]
    }:
        if (ROOT / name).exists():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_bytes((ROOT / name).read_bytes())
    for patch in worked_examples.patches():
        done = subprocess.run(
            ["git", "apply", str(patch)], cwd=tree, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr


def test_each_fits_in_two_files_and_brings_its_test():
    assert len(worked_examples.patches()) == 6
    for patch in worked_examples.patches():
        changed, tests = worked_examples.files_of(patch)
        assert 1 <= len(changed) <= 2, patch.name
        assert tests, patch.name


def test_the_page_shows_every_one_of_them():
    page = (ROOT / "docs" / "architecture.md").read_text()
    shown = re.findall(r"\(examples/([^)]+)\)", page)
    assert sorted(shown) == [patch.name for patch in worked_examples.patches()]
