"""Draws README's picture: what `sumgrad diff` prints of a script that divides twice.

    python scripts/picture.py          # run it, keep its verdict as data, draw
    python scripts/picture.py --draw   # draw from the data

A test holds that docs/pictures/fail.svg is what this draws from docs/data/readme_verdict.json.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text
from sumgrad.base.verdict import Verdict
from sumgrad.report.terminal import print_report

ROOT = Path(__file__).resolve().parent.parent
DATA, PICTURE = ROOT / "docs/data/readme_verdict.json", ROOT / "docs/pictures/fail.svg"
COMMAND = ["sumgrad", "diff", "--ranks", "3", "--", "examples/scripts/ddp.py", "--batch",
           "{12/ranks}", "--bug", "divided by world size again"]  # fmt: skip
WIDTH = 122
FRAME = """<svg viewBox="-14 -10 {terminal_width} {terminal_height}" \
xmlns="http://www.w3.org/2000/svg" role="img" aria-label="what sumgrad prints of a wrong gradient">
<style>
.{unique_id}-matrix {{ font: {char_height}px ui-monospace, Menlo, Consolas, monospace; \
line-height: {line_height}px; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" /></clipPath>{lines}</defs>
<rect x="-14" y="-10" width="100%" height="100%" rx="8" fill="#1a1b1e"/>
<g clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}<g class="{unique_id}-matrix">{matrix}</g></g>
</svg>
"""


def drawn(data: dict) -> str:
    """The report of a stored verdict as an SVG."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(Text("$ sumgrad diff --ranks 3 -- ddp.py --batch {12/ranks}", style="dim"))
    console.print()
    verdict = Verdict(status=data["status"], tiers=(), diagnoses=(), coefficients=(), data=data)
    print_report(verdict, console)
    svg = console.export_svg(code_format=FRAME, unique_id="fail")
    return re.sub(
        r'(viewBox="-14 -10) ([\d.]+) ([\d.]+)',
        lambda m: f"{m[1]} {float(m[2]) + 28:.0f} {float(m[3]) + 14:.0f}",
        svg,
    )


def shortened(data: dict) -> dict:
    """Without what changes from run to run."""
    outcomes = [{**o, "seconds": 0.0, "ended_at": 0.0, "output": ""} for o in data["outcomes"]]
    return {**data, "outcomes": outcomes, "versions": {},
            "reproduce": " ".join([*COMMAND[:5], "ddp.py", *COMMAND[6:8]])}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--draw", action="store_true", help="from the data")
    if not parser.parse_args().draw:
        with tempfile.TemporaryDirectory() as out:
            result = Path(out) / "verdict.json"
            command = [sys.executable, "-m", *COMMAND[:2], "--json", str(result), *COMMAND[2:]]
            subprocess.run(command, cwd=ROOT, check=False, stdout=subprocess.DEVNULL)
            data = shortened(json.loads(result.read_text()))
        DATA.write_text(json.dumps(data, indent=1) + "\n")
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(drawn(json.loads(DATA.read_text())))


if __name__ == "__main__":
    main()
