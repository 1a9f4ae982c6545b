"""Runs tests on one mutant in a forked child, in which an import hook serves the changed source.

The parent imports what is slow (torch, Triton, pytest) once and nothing of sumgrad; it runs no
tensor operation, so that forking is safe. A child that does not end in time is ended with its
whole process group.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import linecache
import os
import select
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

WARM = (
    "torch", "torch._dynamo", "torch.distributed", "torch.distributed.tensor",
    "torch.distributed.fsdp", "torch.testing", "triton", "triton.language", "numpy", "pytest",
    "_pytest.assertion.rewrite", "hypothesis", "hypothesis.strategies", "pydantic", "rich.console",
    "safetensors.torch", "jinja2", "yaml",
)  # fmt: skip
Source = tuple[str, Path, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Killed:
    """What a child found. by: the first test that failed, or None; words: why, shortened."""

    by: str | None
    words: str
    num_tests: int
    seconds: float
    timed_out: bool


def prepare(root: Path, scratch: Path) -> None:
    """Import what every child needs. One thread, Triton's interpreter, scratch for what is kept."""
    os.environ |= {
        "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TRITON_INTERPRET": "1",
        "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(scratch),
        "HYPOTHESIS_STORAGE_DIRECTORY": str(scratch / "hypothesis"),
    }  # fmt: skip
    sys.dont_write_bytecode = True
    os.chdir(root)
    for name in WARM:
        importlib.import_module(name)
    loaded = [name for name in sys.modules if name.partition(".")[0] == "sumgrad"]
    assert not loaded, loaded


def run_tests(tests: list[str], source: Source | None, *, timeout_s: float) -> Killed:
    """Run pytest on these arguments until the first failure, in a child with a changed module."""
    started = time.monotonic()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _child(tests, source, writing)
    os.close(writing)
    data, timed_out = _read(reading, started + timeout_s)
    os.close(reading)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # and whatever a test left running
    os.waitpid(pid, 0)
    seconds = time.monotonic() - started
    if timed_out:
        return Killed(by="timeout", words="", num_tests=0, seconds=seconds, timed_out=True)
    found = json.loads(data) if data else {"by": "the process died", "words": "", "num": 0}
    return Killed(
        by=found["by"], words=found["words"], num_tests=found["num"], seconds=seconds,
        timed_out=False,
    )  # fmt: skip


def _read(fd: int, deadline: float) -> tuple[bytes, bool]:
    """Everything until the child closes its end, or the deadline."""
    data = b""
    while (left := deadline - time.monotonic()) > 0:
        if not select.select([fd], [], [], left)[0]:
            break
        part = os.read(fd, 1 << 16)
        if not part:
            return data, False
        data += part
    return data, True


class _First:
    """A pytest plugin: the first failure, and how many tests passed."""

    def __init__(self) -> None:
        self.by: str | None = None
        self.words, self.num = "", 0

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.num += report.when == "call" and report.passed
        self._note(report)

    def pytest_collectreport(self, report: Any) -> None:
        self._note(report)

    def _note(self, report: Any) -> None:
        if report.failed and self.by is None:
            self.by, self.words = report.nodeid, str(report.longrepr)[-2000:]


def _child(tests: list[str], source: Source | None, writing: int) -> None:
    code = 1
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        import pytest

        if source is not None:
            sys.meta_path.insert(0, Changed(*source))
        first = _First()
        code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests],
                               plugins=[first]))  # fmt: skip
        by = first.by or (None if code == 0 else f"pytest ended with {code}")
        found = {"by": by, "words": first.words, "num": first.num}
        os.write(writing, json.dumps(found).encode()[: 1 << 16])
    except BaseException as error:
        found = {"by": f"{type(error).__name__} while pytest started", "words": "", "num": 0}
        os.write(writing, json.dumps(found).encode())
    finally:
        os._exit(code)


class Changed(importlib.abc.MetaPathFinder):
    """Finds one module, whose source is another. Triton reads it again: so does linecache."""

    def __init__(self, name: str, path: Path, source: str) -> None:
        self.name, self.path, self.source = name, path, source

    def find_spec(
        self, name: str, path: Any, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self.name:
            return None
        file, lines = str(self.path), self.source.splitlines(keepends=True)
        linecache.cache[file] = (len(self.source), None, lines, file)
        loader = _Loader(name, file, self.source)
        return importlib.util.spec_from_file_location(name, file, loader=loader)


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, file: str, source: str) -> None:
        super().__init__(name, file)
        self.changed = source

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.changed, self.path, "exec", dont_inherit=True)
