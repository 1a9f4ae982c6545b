"""The `sumgrad` command: parses, calls, and hands what came out to `output`.

Exit codes: 0 PASS, 1 FAIL, 2 bad usage or bad input, 3 UNKNOWN, 4 internal error.
"""

from __future__ import annotations

import argparse
import errno
import io
import os
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from sumgrad.base.commands import command_line, sumgrad_command
from sumgrad.base.errors import LaunchError, UserError
from sumgrad.base.files import write_json as write_json_file
from sumgrad.base.interpreter import decide_interpreter, has_gpu
from sumgrad.base.verdict import EXIT_CODES, EXIT_INTERNAL, EXIT_USAGE
from sumgrad.cli.arguments import (
    Parser,
    add_common_flags,
    add_report_flags,
    add_run_flags,
    make_parser,
)
from sumgrad.cli.interrupts import closed_on_signal
from sumgrad.cli.output import (
    FORMATS,
    Progress,
    UntilClosed,
    checked,
    printable,
    say,
    show,
    show_grid,
    show_verdict,
    write_json,
)

if TYPE_CHECKING:
    from sumgrad.base.verdict import Verdict
    from sumgrad.launch.local.launcher import Launcher
    from sumgrad.launch.script.options import DiffOptions


OTHERS_WAIT_S = 20.0  # seconds; torchrun ends them sooner


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the ranks need the cores
    for stream in (sys.stdout, sys.stderr):  # a name that this terminal cannot show ends nothing
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    return _guarded(lambda: _dispatch(checked(make_parser().parse_args(argv))))


def torchrun_main() -> int:
    """What harness/run.py runs in every worker."""
    return _guarded(_torchrun)


def _guarded(call: Callable[[], int]) -> int:
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast("TextIO", UntilClosed(stream)) for stream in streams)
    try:
        return _ended(call)
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        sys.stdout, sys.stderr = streams


def _ended(call: Callable[[], int]) -> int:
    """The exit code, whatever is raised."""
    try:
        return call()
    except UserError as error:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            # torchrun ends all ranks with the first that ends, and that is to be who says why: if
            # this one is still there, it alone knows.
            time.sleep(OTHERS_WAIT_S)
        for problem in error.problems:
            print(f"sumgrad: {printable(problem.removeprefix('sumgrad '))}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        print("sumgrad: interrupted; every rank was ended", file=sys.stderr)
        return 130
    except LaunchError as error:
        print(f"sumgrad: {error}; no verdict", file=sys.stderr)
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


def _dispatch(args: argparse.Namespace) -> int:
    code: int = {
        "diff": _diff,
        "run": _run,
        "init": _init,
        "plan": _plan,
        "faults": _faults,
        "ops": _ops,
        "judge": _judge,
        "report": _judge,
        "list": _list,
    }[args.verb](args)
    return code


@contextmanager
def _launcher() -> Iterator[Launcher]:
    """A launcher that is closed whatever ends the command, a signal too. Its server imports torch
    for seconds: what is imported here too, is so meanwhile."""
    from sumgrad.launch.local.launcher import Launcher

    with Launcher() as launcher, closed_on_signal(launcher.end):
        yield launcher


def _on_cpu(args: argparse.Namespace) -> bool:
    """Whether the ranks of a run compute on the CPU, as its flags and its topology say."""
    from sumgrad.topology.pools import load_topology
    from sumgrad.topology.shipped import find_topology

    return load_topology(find_topology(args.topology)).chosen_device(args.device) == "cpu"


def _run(args: argparse.Namespace) -> int:
    decide_interpreter(on_cpu=_on_cpu(args))
    with _launcher() as launcher, Progress(args.quiet) as progress:
        from sumgrad.launch.check import run_check
        from sumgrad.launch.matrix.shrink import shrink

        options = _options(args)
        verdict, directory = run_check(options, launcher=launcher, progress=progress, preload=True)
        if args.shrink and verdict.status == "fail":
            small = replace(options, tiers=("structure",))
            shrunk = shrink(small, verdict, directory, launcher=launcher, progress=progress)
            line = "nothing smaller fails this way"
            line = f"{shrunk.sentence()}\n           {shrunk.command}" if shrunk else line
        else:
            line = ""
    if line:
        say(args, f"shrunk     {line}\n")
    show_verdict(verdict, directory, args)
    return verdict.exit_code


def _init(args: argparse.Namespace) -> int:
    from sumgrad.cli.init import write_start

    paths = write_start(args.folder, args.name)
    write_json(args, {"written": [str(path) for path in paths]})
    if not args.quiet:
        say(args, f"wrote {', '.join(map(str, paths))}")
        say(args, "now change the step into yours, and check it:")
    say(args, f"  {command_line([*sumgrad_command(), 'run', paths[1]])}")
    if not args.quiet:
        lacks = "" if find_spec("pytest") else "   # after pip install pytest"
        say(args, f"  {command_line(['pytest', '-m', 'distributed', paths[2]])}{lacks}")
    return 0


def _torchrun() -> int:
    parser = Parser(prog="harness/run.py", description="The check under torchrun.")
    parser.add_argument("--topology", type=Path, required=True, metavar="T.yaml")
    add_run_flags(parser)
    add_report_flags(parser)
    add_common_flags(parser)
    args = checked(parser.parse_args())
    decide_interpreter(on_cpu=_on_cpu(args))
    from sumgrad.launch.torchrun.ranks import run_torchrun_rank, under_torchrun
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

    def report(verdict: Verdict, directory: Path) -> None:
        show_verdict(verdict, directory, args)
        _tell_torchrun(verdict)

    with Progress(quiet) as progress:
        code = run_torchrun_rank(_options(args), report=report, progress=progress)
    sys.stdout.flush()
    return code


def _tell_torchrun(verdict: Verdict) -> None:
    """What torchrun is to show as the failure of this rank, which is none: an exit code."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file and verdict.exit_code:
        message = f"no crash: the verdict of sumgrad, printed above: {printable(repr(verdict))}"
        with suppress(OSError):  # the exit code says it
            write_json_file(Path(file), {"message": message, "timestamp": int(time.time())})


def _diff(args: argparse.Namespace) -> int:
    from sumgrad.launch.script.diff import run_diff
    from sumgrad.launch.script.options import DiffOptions

    ours = [arg for arg in args.script if arg in {f"--{name}" for name in (*FORMATS, "github")}]
    if ours and not args.quiet:
        text = f"{', '.join(ours)} after `--` goes to the script; sumgrad's own flags stand before"
        print(f"sumgrad: {text} it", file=sys.stderr)
    options = DiffOptions(
        script=tuple(args.script),
        ranks=args.ranks,
        against=int(args.against) if args.against.isdigit() else 1,
        baseline=None if args.against.isdigit() else args.against,
        save=args.save,
        save_as=args.save_as,
        a=tuple(shlex.split(args.a or "")),
        b=tuple(shlex.split(args.b or "")),
        steps=args.steps,
        zero=tuple(args.zero),
        lift=not args.no_lift,
        timeout_s=args.timeout,
        out=args.out,
    )
    if args.variant:
        return _variants(options, args)
    if args.bitwise:
        raise UserError("sumgrad diff: --bitwise is for --variant")
    with Progress(args.quiet) as progress:
        verdict, directory = run_diff(options, progress=progress, on_signal=closed_on_signal)
    show_verdict(verdict, directory, args)
    return verdict.exit_code


def _variants(options: DiffOptions, args: argparse.Namespace) -> int:
    from sumgrad.launch.script.options import read_variant
    from sumgrad.launch.script.variants import run_matrix
    from sumgrad.report.variants import variants_grid

    variants = [read_variant(text) for text in args.variant]
    with Progress(args.quiet) as progress:
        matrix = run_matrix(
            options, variants, bitwise=args.bitwise, progress=progress, on_signal=closed_on_signal
        )
    data = matrix.to_json()
    show_grid(variants_grid(data), data, args)
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
    with Progress(args.quiet) as progress:
        progress(f"proving {topology.world_size} ranks")
        proof = prove(plan)
    seconds = time.monotonic() - started
    write_json(args, plan_to_json(plan, proof))
    show(args, render_plan(plan, proof))
    say(
        args,
        f"sumgrad: {'PROVED' if proof.holds else 'REFUTED'} for {topology.world_size} ranks, "
        f"{proof.num_messages} messages, in {seconds:.2f} s",
    )
    return 0 if proof.holds else 1


def _faults(args: argparse.Namespace) -> int:
    from sumgrad.topology.pools import load_topology
    from sumgrad.topology.shipped import find_topology

    given = [find_topology(path) for path in args.topologies]
    decide_interpreter(on_cpu=all(load_topology(t).chosen_device(None) == "cpu" for t in given))
    with _launcher() as launcher, Progress(args.quiet) as progress:
        from sumgrad.faults.matrix import allowing
        from sumgrad.launch.matrix.run import default_topologies, run_matrix
        from sumgrad.report.matrix import matrix_grid

        matrix = run_matrix(
            given or default_topologies(),
            faults=args.fault,
            workload=args.workload,
            quick=args.quick,
            look=args.look,
            seed=args.seed,
            timeout_s=args.timeout,
            launcher=launcher,
            progress=progress,
        )
    matrix = allowing(matrix, args.allow)
    show_grid(matrix_grid(matrix), matrix.to_json(), args)
    return EXIT_CODES[matrix.status]


def _ops(args: argparse.Namespace) -> int:
    device = args.device or ("cuda" if has_gpu() else "cpu")
    decide_interpreter(on_cpu=device == "cpu")
    with _launcher() as launcher, Progress(args.quiet) as progress:
        from sumgrad.invariance.matrix import ops_grid, run_matrix

        matrix = run_matrix(
            args.op,
            dtype=args.dtype,
            seed=args.seed,
            timeout_s=args.timeout,
            device=device,
            launcher=launcher,
            progress=progress,
        )
    show_grid(ops_grid(matrix), matrix.to_json(), args)
    return matrix.exit_code


def _judge(args: argparse.Namespace) -> int:
    """`judge` and `report`: both judge what is stored, so that no report shows an old verdict."""
    from sumgrad.launch.judging import judge_directory
    from sumgrad.launch.versions import made_with

    with Progress(args.quiet) as progress:
        verdict = judge_directory(args.directory, law=getattr(args, "law", None), progress=progress)
    show(args, f"made with  {made_with(verdict.data['versions'])}\n")
    show_verdict(verdict, args.directory, args)
    return verdict.exit_code


def _list_runs(args: argparse.Namespace) -> int:
    from sumgrad.cli.runs import prune, render_runs, stored_runs

    runs = stored_runs()
    gone = prune(runs, args.keep) if args.keep else []
    runs = runs[: len(runs) - len(gone)]
    write_json(args, {"runs": runs, "removed": gone})
    show(args, render_runs(runs, gone))
    return 0


def _list(args: argparse.Namespace) -> int:
    if args.what == "runs":
        return _list_runs(args)
    if args.keep:
        raise UserError("sumgrad list: --keep is for `sumgrad list runs`")
    from sumgrad.cli.catalogue import catalogue, render_catalogue

    found = catalogue()
    write_json(args, found)
    show(args, render_catalogue(found))
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
        device=args.device,
        lift=not args.no_lift,
        search_s=getattr(args, "search", None),  # not under torchrun
    )
