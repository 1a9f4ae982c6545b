"""The documentation as a site: every page in it, every link leads somewhere, nothing is fetched."""

from __future__ import annotations

import re
import subprocess
import sys

from conftest import ROOT


def test_the_site_is_built_without_network(tmp_path):
    words = ["-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True,
                          check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} | {"index", "convention"}
    assert pages <= {path.stem for path in tmp_path.glob("*.html")}
    front = (tmp_path / "index.html").read_text()
    assert all(f'href="{page}.html"' in front for page in pages - {"index"})  # each is in the menu
    for path in tmp_path.glob("*.html"):
        assert not re.search(r'(?:src|rel="stylesheet" href)="https?://', path.read_text()), path
    assert 'src="pictures/fail.svg"' in front
