"""The `sumgrad` command: parses, calls, prints. The only module that prints.

Exit codes: 0 PASS, 1 FAIL, 2 bad usage or bad input, 3 UNKNOWN, 4 internal error.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import os
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from sumgrad.base.commands import command_line, sumgrad_command
from sumgrad.base.errors import LaunchError, UserError
from sumgrad.base.files import json_text, write_bytes
from sumgrad.base.interpreter import decide_interpreter, has_gpu
from sumgrad.base.plain_text import shown
from sumgrad.base.verdict import EXIT_CODES, EXIT_INTERNAL, EXIT_USAGE, Verdict
from sumgrad.cli.arguments import (
    Parser,
    add_common_flags,
    add_report_flags,
    add_run_flags,
    make_parser,
)
from sumgrad.cli.interrupts import closed_on_signal
from sumgrad.report import FORMATS as REPORTS

if TYPE_CHECKING:
    from sumgrad.launch.local.launcher import Launcher
    from sumgrad.launch.script.options import DiffOptions

WIDTH_ELSEWHERE = 200
MAX_ERROR, MAX_ERROR_LINES = 600, 12
FORMATS = ("json", *REPORTS)
STANDARD_OUTPUT = Path("-")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the ranks need the cores
    for stream in (sys.stdout, sys.stderr):  # a name that this terminal cannot show ends nothing
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    return _guarded(lambda: _dispatch(_checked(make_parser().parse_args(argv))))


def torchrun_main() -> int:
    """What harness/run.py runs in every worker."""
    return _guarded(_torchrun)


def _guarded(call: Callable[[], int]) -> int:
    try:
        return call()
    except UserError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            for problem in error.problems:
                print(f"sumgrad: {_printable(problem)}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        print("sumgrad: interrupted; every rank was ended", file=sys.stderr)
        return 130
    except LaunchError as error:
        print(f"sumgrad: {error}; no verdict", file=sys.stderr)
        return EXIT_INTERNAL
    except BrokenPipeError:
        sys.stderr.close()
        return EXIT_INTERNAL
    except SystemExit as error:  # argparse's --help and --version
        return error.code if isinstance(error.code, int) else EXIT_INTERNAL
    except OSError as error:
        if error.filename is None and error.errno not in (errno.ENOSPC, errno.EROFS):
            raise
        print(f"sumgrad: {error.filename or 'disk'}: {error.strerror}", file=sys.stderr)
        return EXIT_USAGE
    except Exception:
        traceback.print_exc()
        print("sumgrad: internal error; the traceback above is ours to mend", file=sys.stderr)
        return EXIT_INTERNAL


def _printable(problem: str) -> str:
    """A problem's few lines without what a terminal would obey, and bounded."""
    lines = problem.splitlines() or [""]
    more = ["..."] if len(lines) > MAX_ERROR_LINES else []
    return "\n".join([*(shown(line, MAX_ERROR) for line in lines[:MAX_ERROR_LINES]), *more])


def _checked(args: argparse.Namespace) -> argparse.Namespace:
    """Places for results are looked at before work starts, not after."""
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


def _report_stream(args: argparse.Namespace) -> TextIO:
    """Where people read: standard output, or standard error where that holds a result."""
    taken = any(getattr(args, name, None) == STANDARD_OUTPUT for name in FORMATS)
    return sys.stderr if taken else sys.stdout


def _write(path: Path, text: str) -> None:
    """A result to its file, or to standard output for `-`."""
    if path == STANDARD_OUTPUT:
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        write_bytes(path, text.encode())


def _write_json(args: argparse.Namespace, data: Any) -> None:
    if args.json:
        _write(args.json, json_text(data))


def _dispatch(args: argparse.Namespace) -> int:
    code: int = {
        "diff": _diff,
        "run": _run,
        "plan": _plan,
        "faults": _faults,
        "ops": _ops,
        "judge": _judge,
        "report": _report,
        "list": _list,
    }[args.verb](args)
    return code


@contextmanager
def _launcher() -> Iterator[Launcher]:
    """A launcher that is closed whatever ends the command, a signal too."""
    from sumgrad.launch.local.launcher import Launcher

    with Launcher() as launcher, closed_on_signal(launcher.end):
        yield launcher


def _run(args: argparse.Namespace) -> int:
    decide_interpreter(on_cpu=True)
    from sumgrad.launch.check import run_check
    from sumgrad.launch.matrix.shrink import shrink

    options = _options(args)
    with _launcher() as launcher, _Progress(args.quiet) as progress:
        verdict, directory = run_check(options, launcher=launcher, progress=progress, preload=True)
        if args.shrink and verdict.status == "fail":
            small = replace(options, tiers=("structure",))
            shrunk = shrink(small, verdict, directory, launcher=launcher, progress=progress)
            line = "nothing smaller fails this way"
            line = f"{shrunk.sentence()}\n           {shrunk.command}" if shrunk else line
        else:
            line = ""
    if line:
        print(f"shrunk     {line}\n", file=_report_stream(args))
    _write_reports(verdict, args)
    _show(verdict, directory, args)
    return verdict.exit_code


def _torchrun() -> int:
    parser = Parser(prog="harness/run.py", description="The check under torchrun.")
    parser.add_argument("--topology", type=Path, required=True, metavar="T.yaml")
    add_run_flags(parser)
    add_report_flags(parser)
    add_common_flags(parser)
    args = _checked(parser.parse_args())
    decide_interpreter(on_cpu=True)
    from sumgrad.launch.torchrun import run_torchrun_rank, under_torchrun
    from sumgrad.topology.shipped import find_topology

    args.topology = find_topology(args.topology)
    if not under_torchrun():
        from sumgrad.launch.ask import torchrun_command
        from sumgrad.topology.pools import load_topology

        command = torchrun_command(load_topology(args.topology), args.topology)
        local = command_line([*sumgrad_command(), "run", args.topology])
        raise UserError(
            f"harness/run.py: not started by torchrun; use\n  {command}\nor, on one machine and "
            f"faster,\n  {local}"
        )
    quiet = args.quiet or os.environ.get("RANK", "0") != "0"
    with _Progress(quiet) as progress:
        code = run_torchrun_rank(
            _options(args),
            report=lambda verdict, directory: _reported(verdict, directory, args),
            progress=progress,
        )
    sys.stdout.flush()
    return code


def _diff(args: argparse.Namespace) -> int:
    from sumgrad.launch.script.diff import run_diff
    from sumgrad.launch.script.options import DiffOptions

    options = DiffOptions(
        script=tuple(args.script),
        ranks=args.ranks,
        against=int(args.against) if args.against.isdigit() else 1,
        baseline=None if args.against.isdigit() else args.against,
        save=args.save,
        a=tuple(shlex.split(args.a or "")),
        b=tuple(shlex.split(args.b or "")),
        steps=args.steps,
        lift=not args.no_lift,
        timeout_s=args.timeout,
        out=args.out,
    )
    if args.variant:
        return _variants(options, args)
    if args.bitwise:
        raise UserError("sumgrad diff: --bitwise is for --variant")
    with _Progress(args.quiet) as progress:
        verdict, directory = run_diff(options, progress=progress, on_signal=closed_on_signal)
    _write_reports(verdict, args)
    _show(verdict, directory, args)
    return verdict.exit_code


def _variants(options: DiffOptions, args: argparse.Namespace) -> int:
    from sumgrad.launch.script.options import read_variant
    from sumgrad.launch.script.variants import run_matrix
    from sumgrad.report.variants import render_variants, variants_to_markdown

    if args.html or args.junit or args.github:
        raise UserError("sumgrad diff --variant: a matrix is written by --markdown and --json")
    variants = [read_variant(text) for text in args.variant]
    with _Progress(args.quiet) as progress:
        matrix = run_matrix(
            options, variants, bitwise=args.bitwise, progress=progress, on_signal=closed_on_signal
        )
    data = matrix.to_json()
    if args.markdown:
        _write(args.markdown, variants_to_markdown(data))
    _write_json(args, data)
    if not args.quiet:
        _console(args).print(render_variants(data))
    print(
        f"sumgrad: {matrix.status.upper()} {matrix.script} in {len(variants) + 1} ways",
        file=_report_stream(args),
    )
    return EXIT_CODES[matrix.status]


def _plan(args: argparse.Namespace) -> int:
    from sumgrad.faults.plan import find_fault, plant
    from sumgrad.plan.edges import build_plan
    from sumgrad.plan.proof import prove
    from sumgrad.report.plan import plan_to_json, render_plan
    from sumgrad.subjects.loading import chosen_workload, find_class
    from sumgrad.subjects.planned.workload import load_workload
    from sumgrad.subjects.program.protocol import is_program
    from sumgrad.topology.pools import load_topology
    from sumgrad.topology.shipped import find_topology

    started = time.monotonic()
    path = find_topology(args.topology)
    topology = load_topology(path)
    name, where = chosen_workload(topology, args.workload)
    if is_program(find_class(name, where)):
        command = command_line(["sumgrad", "run", args.topology])
        raise UserError(
            f"{path}: {name} is a Program: it is opaque and has no plan; use `{command}`"
        )
    workload = load_workload(name, topology, seed=0)
    plan = build_plan(topology, workload.declaration)
    if args.fault:
        plan = plant(find_fault(args.fault), plan)
    with _Progress(args.quiet) as progress:
        progress(f"proving {topology.world_size} ranks")
        proof = prove(plan)
    seconds = time.monotonic() - started
    _write_json(args, plan_to_json(plan, proof))
    if not args.quiet:
        _console(args).print(render_plan(plan, proof))
    print(
        f"sumgrad: {'PROVED' if proof.holds else 'REFUTED'} for {topology.world_size} ranks, "
        f"{proof.num_messages} messages, in {seconds:.2f} s",
        file=_report_stream(args),
    )
    return 0 if proof.holds else 1


def _faults(args: argparse.Namespace) -> int:
    decide_interpreter(on_cpu=True)
    from sumgrad.launch.matrix.run import default_topologies, run_matrix
    from sumgrad.report.matrix import render_matrix
    from sumgrad.topology.shipped import find_topology

    topologies = [find_topology(path) for path in args.topologies] or default_topologies()
    with _launcher() as launcher, _Progress(args.quiet) as progress:
        matrix = run_matrix(
            topologies,
            faults=args.fault,
            workload=args.workload,
            quick=args.quick,
            seed=args.seed,
            timeout_s=args.timeout,
            launcher=launcher,
            progress=progress,
        )
    _write_json(args, matrix.to_json())
    if not args.quiet:
        _console(args).print(render_matrix(matrix))
    print(f"sumgrad: {matrix.summary()}", file=_report_stream(args))
    return 0 if matrix.ok else 1


def _ops(args: argparse.Namespace) -> int:
    device = args.device or ("cuda" if has_gpu() else "cpu")
    decide_interpreter(on_cpu=device == "cpu")
    from sumgrad.invariance.matrix import render_ops, run_matrix

    with _launcher() as launcher, _Progress(args.quiet) as progress:
        matrix = run_matrix(
            args.op,
            dtype=args.dtype,
            seed=args.seed,
            timeout_s=args.timeout,
            device=device,
            launcher=launcher,
            progress=progress,
        )
    if not args.quiet:
        _console(args).print(render_ops(matrix))
    print(f"sumgrad: {matrix.summary()}", file=_report_stream(args), flush=True)
    _write_json(args, matrix.to_json())
    return matrix.exit_code


def _judge(args: argparse.Namespace) -> int:
    from sumgrad.launch.judging import judge_directory

    with _Progress(args.quiet) as progress:
        verdict = judge_directory(args.directory, law=args.law, progress=progress)
    _write_reports(verdict, args)
    _show(verdict, args.directory, args)
    return verdict.exit_code


def _report(args: argparse.Namespace) -> int:
    from sumgrad.launch.judging import judge_directory

    with _Progress(args.quiet) as progress:
        verdict = judge_directory(args.directory, progress=progress)
    _write_reports(verdict, args)
    _show(verdict, args.directory, args)
    return verdict.exit_code


def _write_reports(verdict: Verdict, args: argparse.Namespace) -> None:
    """Every format that was asked for."""
    for name, renderer in REPORTS.items():
        path, (module, _, function) = getattr(args, name), renderer.partition(":")
        if path is not None:
            _write(path, getattr(importlib.import_module(module), function)(verdict))

    if args.github:
        _to_github(verdict, args)


def _reported(verdict: Verdict, directory: Path, args: argparse.Namespace) -> None:
    _write_reports(verdict, args)
    _show(verdict, directory, args)


def _to_github(verdict: Verdict, args: argparse.Namespace) -> None:
    """Lines that a workflow reads, and its summary where it has one."""
    from sumgrad.report.files import to_markdown
    from sumgrad.report.github import workflow_lines

    root = Path(os.environ.get("GITHUB_WORKSPACE") or ".")
    for line in workflow_lines(verdict, root=root):
        print(line, file=_report_stream(args))
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    if summary:
        with Path(summary).open("a", encoding="utf-8") as file:
            file.write(to_markdown(verdict) + "\n")


def _list_runs(args: argparse.Namespace) -> int:
    from sumgrad.cli.runs import prune, render_runs, stored_runs

    runs = stored_runs()
    gone = prune(runs, args.keep) if args.keep else []
    runs = runs[: len(runs) - len(gone)]
    _write_json(args, {"runs": runs, "removed": gone})
    if not args.quiet:
        _console(args).print(render_runs(runs, gone))
    return 0


def _list(args: argparse.Namespace) -> int:
    if args.what == "runs":
        return _list_runs(args)
    if args.keep:
        raise UserError("sumgrad list: --keep is for `sumgrad list runs`")
    from sumgrad.cli.catalogue import catalogue, render_catalogue

    found = catalogue()
    _write_json(args, found)
    if not args.quiet:
        _console(args).print(render_catalogue(found))
    return 0


def _options(args: argparse.Namespace) -> Any:
    from sumgrad.launch.ask import CheckOptions
    from sumgrad.topology.shipped import find_topology

    return CheckOptions(
        topology=find_topology(args.topology),
        workload=args.workload,
        dtype=args.dtype,
        tiers=args.tiers,
        fault=args.fault,
        seed=args.seed,
        steps=args.steps,
        out=args.out,
        timeout_s=args.timeout,
        law=args.law,
        kernels=args.kernels,
        lift=not args.no_lift,
    )


def _show(verdict: Verdict, directory: Path, args: argparse.Namespace) -> None:
    from sumgrad.report.terminal import last_line, print_report

    if not args.quiet:
        print_report(verdict, _console(args))
    _write_json(args, verdict.data)
    print(last_line(verdict, directory), file=_report_stream(args), flush=True)


def _console(args: argparse.Namespace) -> Any:
    """The report's stream: its own width on a terminal, wide elsewhere, colour only on a terminal.

    Names are shown as they are: `[bold]` and `:smile:` mean nothing.
    """
    from rich.console import Console

    flags: dict[str, Any] = {"file": _report_stream(args), "markup": False, "emoji": False}
    console = Console(**flags)
    return console if console.is_terminal else Console(width=WIDTH_ELSEWHERE, **flags)


class _Progress:
    """A spinner with what is going on, on a terminal; silent elsewhere."""

    def __init__(self, quiet: bool) -> None:
        from rich.console import Console

        console = Console(stderr=True)
        shown = console.is_terminal and not quiet
        self._status = console.status("importing torch") if shown else None

    def __enter__(self) -> Callable[[str], None]:
        if self._status is not None:
            self._status.start()
            return self._status.update
        return lambda _: None

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()
