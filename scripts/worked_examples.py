"""Applies the worked examples of docs/architecture.md to a fresh clone, one after the other.

    scripts/worked_examples.py            # each with its tests, the house, and lint
    scripts/worked_examples.py --quick    # only whether they still apply

Each may change at most two files besides its test. Exits with 1 at the first that does not hold.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PATCHES = ROOT / "docs" / "examples"
MAX_FILES = 2


def patches() -> list[Path]:
    return sorted(PATCHES.glob("*.patch"))


def files_of(patch: Path) -> tuple[list[str], list[str]]:
    """What a patch touches: files, and tests."""
    found = re.findall(r"^diff --git a/\S+ b/(\S+)$", patch.read_text(), re.MULTILINE)
    tests = [name for name in found if name.startswith("tests/")]
    return [name for name in found if name not in tests], tests


def clone(place: Path) -> Path:
    """What is committed, and the patches as they are now."""
    out = place / "clone"
    run("git", "clone", "--quiet", str(ROOT), str(out), cwd=place)
    return out


def install(place: Path, source: Path) -> Path:
    """A Python that has what this one has, but our package from `source`."""
    venv.create(place / "venv", with_pip=False)
    python = place / "venv" / "bin" / "python"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = place / "venv" / "lib" / version / "site-packages"
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    run(str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "-e",
        str(source), cwd=place)  # fmt: skip
    return python


def run(*command: str, cwd: Path) -> None:
    """Run it; SystemExit with its output where it fails."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{(done.stdout + done.stderr)[-6000:]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="do not run their tests")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source = clone(Path(folder))
        for patch in patches():
            changed, tests = files_of(patch)
            if len(changed) > MAX_FILES or not tests:
                sys.exit(f"{patch.name}: {len(changed)} files, at most {MAX_FILES}; tests: {tests}")
            run("git", "apply", "--index", str(patch), cwd=source)
            if not args.quick:
                python = str(install(Path(folder), source))
                run(
                    python,
                    "-m",
                    "pytest",
                    "-q",
                    *tests,
                    "tests/project/test_imports.py",
                    cwd=source,
                )
                run(python, "-m", "ruff", "check", ".", cwd=source)
                run(python, "-m", "ruff", "format", "--check", ".", cwd=source)
            print(f"{patch.name}: {', '.join(changed)}; {', '.join(tests)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
