"""Where a command's results go: the terminal, files, a workflow's log. What prints is here.

People read standard output, or standard error where standard output holds a result (`--json -`).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TextIO, cast

from sumgrad.base.errors import UserError
from sumgrad.base.files import json_text, write_bytes
from sumgrad.base.plain_text import shown
from sumgrad.base.verdict import Verdict
from sumgrad.report import FORMATS as REPORTS
from sumgrad.report import OF_GRIDS

if TYPE_CHECKING:
    from rich.console import Console
    from sumgrad.report.grid import Grid

WIDTH_ELSEWHERE = 200
MAX_ERROR, MAX_ERROR_LINES = 600, 12
FORMATS = ("json", *REPORTS)
STANDARD_OUTPUT = Path("-")
QUIET_S, REPEAT_S = 2.0, 15.0  # elsewhere than on a terminal: how long nothing is said


def checked(args: argparse.Namespace) -> argparse.Namespace:
    """Places for results are looked at before work starts, not after. Raises UserError."""
    problems = []
    for name in FORMATS:
        path = getattr(args, name, None)
        if path in (None, STANDARD_OUTPUT):
            continue
        if path.is_dir() or not os.access(path.absolute().parent, os.W_OK):
            problems.append(f"--{name} {path}: cannot be written")
    if sum(getattr(args, name, None) == STANDARD_OUTPUT for name in FORMATS) > 1:
        problems.append(f"only one of {', '.join(f'--{n}' for n in FORMATS)} can be `-`")
    if problems:
        raise UserError(problems)
    return args


def printable(problem: str) -> str:
    """A problem's few lines without what a terminal would obey, and bounded."""
    lines = problem.splitlines() or [""]
    more = ["..."] if len(lines) > MAX_ERROR_LINES else []
    return "\n".join([*(shown(line, MAX_ERROR) for line in lines[:MAX_ERROR_LINES]), *more])


def say(args: argparse.Namespace, text: str) -> None:
    """A line for people."""
    print(text, file=_stream(args), flush=True)


class UntilClosed:
    """A stream whose reader may have seen enough, as `head` has: the verdict, and so the exit code,
    stand."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._to_the_end():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._to_the_end():
            self._stream.flush()

    @contextlib.contextmanager
    def _to_the_end(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


def write_json(args: argparse.Namespace, data: Any) -> None:
    """To the file of --json, if there is one."""
    if args.json:
        _write(args.json, json_text(data))


def show(args: argparse.Namespace, what: Any) -> None:
    """Something of rich, unless only the last line is wanted."""
    if not args.quiet:
        console(args).print(what)


def show_verdict(verdict: Verdict, directory: Path, args: argparse.Namespace) -> None:
    """Every file that was asked for, the report, and the last line."""
    from sumgrad.report.github import workflow_lines
    from sumgrad.report.terminal import last_line, print_report

    _write_files(args, REPORTS, verdict)
    if args.github:
        _to_github(args, lambda root: list(workflow_lines(verdict, root=root)), REPORTS, verdict)
    if not args.quiet:
        print_report(verdict, console(args))
    write_json(args, verdict.data)
    say(args, last_line(verdict, directory))


def show_grid(grid: Grid, data: Any, args: argparse.Namespace) -> None:
    """The same of a matrix. data: as --json writes it."""
    from sumgrad.report.github import grid_lines
    from sumgrad.report.grid import render_grid

    _write_files(args, OF_GRIDS, grid)
    if args.github:
        _to_github(args, lambda _: list(grid_lines(grid)), OF_GRIDS, grid)
    show(args, render_grid(grid))
    write_json(args, data)
    say(args, f"sumgrad: {grid.summary}")


def _write_files(args: argparse.Namespace, renderers: dict[str, str], what: Any) -> None:
    for name, renderer in renderers.items():
        path = getattr(args, name)
        if path is not None:
            _write(path, _rendered(renderer, what))


def _rendered(renderer: str, what: Any) -> str:
    module, _, function = renderer.partition(":")
    text: str = getattr(importlib.import_module(module), function)(what)
    return text


def _to_github(
    args: argparse.Namespace,
    lines: Callable[[Path], list[str]],
    renderers: dict[str, str],
    what: Any,
) -> None:
    """Lines that a workflow reads, and its summary where it has one."""
    from sumgrad.report.messages import workspace

    for line in lines(workspace()):
        say(args, line)
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    if summary:
        with Path(summary).open("a", encoding="utf-8") as file:
            file.write(_rendered(renderers["markdown"], what) + "\n")


def _stream(args: argparse.Namespace) -> TextIO:
    taken = any(getattr(args, name, None) == STANDARD_OUTPUT for name in FORMATS)
    return sys.stderr if taken else sys.stdout


def _write(path: Path, text: str) -> None:
    """A result to its file, or to standard output for `-`."""
    if path == STANDARD_OUTPUT:
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        write_bytes(path, text.encode())


def console(args: argparse.Namespace) -> Console:
    """The report's stream: its own width on a terminal, wide elsewhere unless COLUMNS says how
    wide, colour only on a terminal.

    Names are shown as they are: `[bold]` and `:smile:` mean nothing.
    """
    from rich.console import Console

    flags: dict[str, Any] = {"markup": False, "emoji": False}
    found = Console(file=_stream(args), **flags)
    if found.is_terminal:
        return found
    told = os.environ.get("COLUMNS", "")
    width = int(told) if told.isdigit() and int(told) else WIDTH_ELSEWHERE
    return Console(file=cast("IO[str]", _Trimmed(_stream(args))), width=width, **flags)


class _Trimmed(io.TextIOBase):
    """A stream without the blanks that a table pads its lines with."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    def write(self, text: str) -> int:
        self._stream.write(re.sub(r" +$", "", text, flags=re.M))
        return len(text)

    def flush(self) -> None:
        self._stream.flush()


class Progress:
    """What is going on and for how long: a spinner on a terminal, now and then a line elsewhere.

    Nothing where it takes no longer than QUIET_S, or where only the last line is wanted.
    """

    def __init__(self, quiet: bool) -> None:
        from rich.console import Console

        found = Console(stderr=True, markup=False, emoji=False, highlight=False)
        self._quiet, self._since = quiet, time.monotonic()
        self._said = self._since - REPEAT_S + QUIET_S
        terminal = found.is_terminal and not quiet
        self._status = found.status("importing torch") if terminal else None

    def __enter__(self) -> Callable[[str], None]:
        if self._status is not None:
            self._status.start()
        return self._update

    def _update(self, text: str) -> None:
        now = time.monotonic()
        text = f"{text} ({now - self._since:.0f} s)"
        if self._status is not None:
            self._status.update(text)
        elif not self._quiet and now - self._said >= REPEAT_S:
            self._said = now
            print(f"sumgrad: {text}", file=sys.stderr, flush=True)

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()
