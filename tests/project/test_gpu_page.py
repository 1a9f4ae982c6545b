"""docs/gpu.md says what the data says."""

from __future__ import annotations

import json
from pathlib import Path

import gpu_page
from conftest import ROOT

DATA = ROOT / "docs" / "data"


def test_the_page_is_made_from_the_data(tmp_path: Path):
    gpu_page.write_page(DATA, tmp_path / "gpu.md")
    assert (tmp_path / "gpu.md").read_text() == (ROOT / "docs" / "gpu.md").read_text()


def test_another_machines_data_makes_a_section_of_its_own(tmp_path: Path):
    bench = json.loads((DATA / "gpu_nvidia_h200_bench.json").read_text())
    bench["device"] = "another_one"
    bench["same_bits_at_real_sizes"]["linear float32"] = False
    (tmp_path / "gpu_another_one_bench.json").write_text(json.dumps(bench))
    gpu_page.write_page(tmp_path, tmp_path / "gpu.md")
    text = (tmp_path / "gpu.md").read_text()
    assert "## ANOTHER ONE, torch" in text
    assert "- other bits: linear float32\n" in text
    assert "Checks on CUDA ranks" not in text  # none were run there
    rate = next(m for m in bench["measured"] if m["operator"] == "rms_norm backward")
    assert f"{rate['amount'] / rate['seconds'] / 1e9:.0f} GB/s" in text
