"""Which torch on which Python: makes each environment, runs a selection in it, keeps the result.

    scripts/versions.py 2.11.0 2.15.0 --python python3.11 --python /usr/bin/python3.14
    scripts/versions.py lowest --python python3.11     # every dependency at its lower bound

Needs uv (`pip install uv`), the package index, and about 8 GB a torch while it runs; environments
are deleted. The result goes into docs/data/versions.json, cell by cell; cells that were run before
and are not asked for stay, and what is not there was not run. Exit 1 if a command of a cell fails.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "docs/data/versions.json"
PROGRAMS = ("three_pool", "ddp", "fsdp2", "megatron", "pipeline")
TESTS = (
    "tests/ledger/test_misbehaviour.py",
    "tests/ledger/test_unrecorded.py",
    "tests/plugin/test_plugin.py",
    "tests/operators/test_custom_ops.py",
)
ASK = (
    "import json, platform, importlib.metadata as m\n"
    "names = ('torch', 'triton', 'numpy', 'pyyaml', 'pydantic', 'rich', 'safetensors', 'jinja2')\n"
    "from sumgrad.ledger.delegation import unrecorded_operations\n"
    "print(json.dumps({'python': platform.python_version(), 'glibc': platform.libc_ver()[1],\n"
    "    'installed': {n: m.version(n) for n in names},\n"
    "    'not recorded': sorted(unrecorded_operations())}))"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("torch", nargs="+", help="a version of torch, or `lowest`")
    parser.add_argument("--python", action="append", required=True, help="an interpreter")
    parser.add_argument("--no-tests", action="store_true", help="the shipped Programs only")
    parser.add_argument("--uv", default="uv", help="the uv to install with")
    args = parser.parse_args()
    failed = False
    for python in args.python:
        for torch in args.torch:
            cell = measure(args.uv, python, torch, tests=not args.no_tests)
            keep(cell)
            failed |= not cell["passed"]
    return int(failed)


def measure(uv: str, python: str, torch: str, *, tests: bool) -> dict[str, Any]:
    """One environment from nothing to the selection's results."""
    folder = Path(tempfile.mkdtemp(prefix="sumgrad-versions-"))
    try:
        cell: dict[str, Any] = {"asked": torch, "python": version_of(python)}
        print(f"torch {torch}, Python {cell['python']}: installing", flush=True)
        installed = install(uv, python, torch, folder / "env")
        if installed is not None:
            return {**cell, "passed": False, "install": installed}
        bin_ = folder / "env/bin"
        done = run(bin_ / "python", "-c", ASK)
        if done.returncode:
            return {**cell, "passed": False, "import": last_line(done)}
        cell |= json.loads(done.stdout.splitlines()[-1])
        cell["runs"] = {name: run_program(bin_, name, folder) for name in PROGRAMS}
        cell["tests"] = run_tests(bin_) if tests else "not run"
        runs = all(code == 0 for code in cell["runs"].values())
        cell["passed"] = runs and (not tests or cell["tests"]["exit code"] == 0)
        return {**cell, "machine": f"{platform.machine()}, {os.cpu_count()} cores"}
    finally:
        shutil.rmtree(folder)


def install(uv: str, python: str, torch: str, env: Path) -> str | None:
    """Make the environment; returns what went wrong, in the installer's last words."""
    wanted = ["--resolution", "lowest-direct"] if torch == "lowest" else [f"torch=={torch}"]
    tools = ["pytest>=9", "pytest-xdist>=3.8", "hypothesis>=6.150"]
    for command in (
        [uv, "venv", "--quiet", "--python", python, str(env)],
        [uv, "pip", "install", "--quiet", "--python", str(env / "bin/python"),
         "--editable", str(ROOT), *tools, *wanted],
    ):  # fmt: skip
        done = run(*command)
        if done.returncode:
            return " ".join(done.stderr.split())[-600:]
    return None


def run_program(bin_: Path, name: str, folder: Path) -> int:
    """The exit code of one run of a shipped topology."""
    command = [bin_ / "sumgrad", "run", ROOT / f"topologies/{name}.yaml", "--quiet"]
    done = run(*command, "--out", folder / name)
    print(f"  {name}: exit {done.returncode}", flush=True)
    return done.returncode


def run_tests(bin_: Path) -> dict[str, Any]:
    """pytest's own counts of the selection."""
    command = [bin_ / "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
    done = run(*command)
    print(f"  {last_line(done)}", flush=True)
    counts = {word: int(n) for n, word in re.findall(r"(\d+) ([a-z]+)", last_line(done))}
    failures = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    return {"exit code": done.returncode, **counts, "failures": failures}


def keep(cell: dict[str, Any]) -> None:
    """Put a cell into the result, in place of the same one measured before."""
    cells = json.loads(RESULT.read_text())["cells"] if RESULT.exists() else []
    key = (cell["asked"], cell["python"])
    cells = [c for c in cells if (c["asked"], c["python"]) != key] + [cell]
    cells.sort(key=lambda c: (c["asked"], c["python"]))
    RESULT.write_text(json.dumps({"command": "scripts/versions.py", "cells": cells}, indent=1))


def version_of(python: str) -> str:
    ask = "import platform; print(platform.python_version())"
    return subprocess.check_output([python, "-c", ask], text=True).strip()


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = (done.stdout + done.stderr).strip().splitlines()
    return lines[-1] if lines else f"exit {done.returncode}"


if __name__ == "__main__":
    sys.exit(main())
