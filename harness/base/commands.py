"""Command lines that can be pasted: they start this installation, from this directory."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from sumgrad.base.files import PACKAGE

MODULE_ENTRY = "__main__.py"  # sys.argv[0] under `python -m`


def sumgrad_command() -> list[str]:
    """`sumgrad`, where that is this installation's script, or `python -m sumgrad`."""
    script = Path(sys.executable).with_name("sumgrad")
    by_module = os.path.basename(sys.argv[0]) == MODULE_ENTRY
    if by_module or not script.exists():
        return _module("sumgrad")
    return [_name_of(script)]


def torchrun_prefix(num_ranks: int) -> list[str]:
    """`torchrun --standalone --nproc-per-node N run.py`."""
    script = Path(sys.executable).with_name("torchrun")
    start = [_name_of(script)] if script.exists() else _module("torch.distributed.run")
    ours = sys.argv[0] if os.path.basename(sys.argv[0]) == "run.py" else _run_script()
    return [*start, "--standalone", "--nproc-per-node", str(num_ranks), ours]


def command_line(words: Sequence[object]) -> str:
    """One line that a shell takes."""
    return shlex.join(str(word) for word in words)


def _run_script() -> str:
    return os.path.relpath(PACKAGE / "run.py")


def _module(name: str) -> list[str]:
    return [_name_of(Path(sys.executable)), "-m", name]


def _name_of(program: Path) -> str:
    """Its bare name where the shell finds this very file by it, else its path."""
    found = shutil.which(program.name)
    same = found is not None and os.path.abspath(found) == os.path.abspath(program)
    return program.name if same else str(program)
