"""The flags of every command, their help, and what they accept."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import sys
import textwrap
from pathlib import Path
from typing import Any, NoReturn

from sumgrad import __version__
from sumgrad.base.errors import UserError
from sumgrad.report import FORMATS

DTYPES = ("float64", "float32", "bfloat16", "float16")
LATEST = Path(".sumgrad") / "runs" / "latest"
TIERS = ("structure", "precision", "bitwise")


class Parser(argparse.ArgumentParser):
    """Raises UserError where argparse would print and exit."""

    def error(self, message: str) -> NoReturn:
        verb = self.prog.partition(" ")[2]
        text = f"{verb}: {message}" if verb else message
        raise UserError(f"{text}{self._meant(message)} (see `{self.prog} --help`)")

    def parse_args(self, *args: Any, **kwargs: Any) -> Any:
        """As argparse does, but what a verb does not know is an error of the verb."""
        found, unknown = self.parse_known_args(*args, **kwargs)
        if unknown:
            verb = getattr(found, "verb", None)
            parsers = [a.choices for a in self._actions if isinstance(a.choices, dict)]
            own = parsers[0].get(verb, self) if parsers else self
            flags = [arg for arg in unknown if arg.startswith("-")]
            scripts = [a for a in (*unknown, *getattr(found, "script", ())) if a.endswith(".py")]
            given = next(iter(args), None) or sys.argv
            if verb == "diff" and flags and scripts and "--" not in given:
                own.error(f"put -- before {scripts[0]}: what follows it is the script's own")
            own.error(f"unrecognized arguments: {' '.join(flags or unknown)}")
        return found

    def _meant(self, message: str) -> str:
        """`, did you mean ...?` where a flag or a verb is nearly one that there is."""
        known = [option for action in self._actions for option in action.option_strings]
        known += [name for a in self._actions if isinstance(a.choices, dict) for name in a.choices]
        if message.startswith("unrecognized"):
            words = [word.partition("=")[0] for word in message.split()[2:]]
        else:
            words = message.split("'")[1:2] if message.startswith("argument VERB") else []
        near = [close[0] for word in words
                if (close := difflib.get_close_matches(word, known, n=1))]  # fmt: skip
        return f"; did you mean {near[0]}?" if near else ""


def make_parser() -> argparse.ArgumentParser:
    """`sumgrad VERB ...`."""
    parser = Parser(
        prog="sumgrad",
        description="Checks every rank's gradient of a distributed training step, and says which "
        "term on which rank was counted how often.",
        epilog="exit codes: 0 PASS, 1 FAIL, 2 bad usage or input, 3 UNKNOWN, 4 internal error",
    )
    parser.add_argument("--version", action="version", version=f"sumgrad {__version__}")
    with contextlib.suppress(ImportError):  # pip install sumgrad[completion]
        import shtab

        shtab.add_argument_to(parser, ["--print-completion"])
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for add in (
        _add_diff, _add_run, _add_init, _add_plan, _add_faults, _add_ops, _add_judge, _add_report,
        _add_list,
    ):  # fmt: skip
        add(verbs)
    return parser


def _verb(
    verbs: Any, name: str, what: str, *examples: tuple[str, str], **more: Any
) -> argparse.ArgumentParser:
    """A verb with its help and its examples, each a command and what it is for."""
    width = max(len(command) for command, _ in examples)
    about = more.get("description", f"{what[:1].upper()}{what[1:]}.")
    lines = [f"  {command:<{width}}   # {why}" for command, why in examples]
    parser: argparse.ArgumentParser = verbs.add_parser(
        name,
        help=what,
        epilog="\n".join(["examples:", *lines]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        **{**more, "description": textwrap.fill(about, 80)},
    )
    return parser


def _add_run(verbs: Any) -> None:
    run = _verb(
        verbs,
        "run",
        "check a topology, ranks started on this machine",
        ("sumgrad run dp.yaml --workload mine.py:MyStep", "your own step"),
        ("sumgrad run three_pool_ragged", "a shipped one"),
        ("sumgrad run fsdp2 --html report.html", "with a page to look at"),
    )
    run.add_argument("topology", type=Path, metavar="T.yaml", help="a file, or a shipped name")
    add_run_flags(run)
    run.add_argument(
        "--shrink",
        action="store_true",
        help="on a failure, find the smallest topology and batch that still fail",
    )
    run.add_argument(
        "--search",
        type=_seconds,
        metavar="SECONDS",
        help="run a failing step whose cause is not proved for so long, each time with one thing "
        "done otherwise, to find what makes it right; 0: not at all (default: up to some 15)",
    )
    add_report_flags(run)
    add_common_flags(run)


def _add_init(verbs: Any) -> None:
    init = _verb(
        verbs,
        "init",
        "write a step, its topology and a test to start from",
        ("sumgrad init", "into this folder"),
        ("sumgrad init checks --name pretrain", "checks/pretrain.py and so on"),
    )
    init.add_argument("folder", type=Path, nargs="?", default=Path("."), metavar="DIR",
                      help="where to (default: here)")  # fmt: skip
    init.add_argument("--name", default="my_step", help="of the step's file (default: my_step)")
    add_common_flags(init)


def _add_plan(verbs: Any) -> None:
    plan = _verb(
        verbs,
        "plan",
        "the rank map, who contributes what, and the proof; starts no process",
        ("sumgrad plan three_pool_planet", "90,112 ranks"),
        ("sumgrad plan three_pool --fault avg_on_ci", "what a fault does to the proof"),
    )
    plan.add_argument("topology", type=Path, metavar="T.yaml", help="a file, or a shipped name")
    plan.add_argument("--workload", help="NAME, file.py:Class or package.module:Class")
    plan.add_argument("--fault", metavar="NAME", help="prove the plan with this fault planted")
    add_common_flags(plan)


def _add_faults(verbs: Any) -> None:
    faults = _verb(
        verbs,
        "faults",
        "the kill matrix: topologies x planted faults",
        ("sumgrad faults", "everything that is shipped"),
        ("sumgrad faults dp.yaml --workload mine.py:MyStep --quick", "your own step"),
        ("sumgrad faults dp.yaml --allow '*:allreduce@dp#3'", "what is only logged"),
    )
    faults.add_argument(
        "topologies", type=Path, nargs="*", metavar="T.yaml", help="files, or shipped names"
    )
    faults.add_argument("--fault", action="append", metavar="NAME", help="only this; repeatable")
    faults.add_argument(
        "--workload", help="your own: file.py:Class or package.module:Class (default: the YAML's)"
    )
    faults.add_argument(
        "--quick",
        action="store_true",
        help="of a Program's collectives of one kind over one axis only the first",
    )
    faults.add_argument(
        "--look",
        action="store_true",
        help="look into the modules of each fault's step, as `run` does after a failure: more "
        "causes are named without a clean run beside, at twice the time",
    )
    faults.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="PATTERN",
        help="faults that may go unnoticed, by name with * and ?, as of a number that is only "
        "logged; repeatable",
    )
    faults.add_argument("--seed", type=int, default=0, help="of weights, text and draws")
    faults.add_argument("--timeout", type=_positive, default=120.0, metavar="SECONDS",
                        help="for each run (default: 120)")  # fmt: skip
    add_report_flags(faults)
    add_common_flags(faults)


def _add_ops(verbs: Any) -> None:
    ops = _verb(
        verbs,
        "ops",
        "the invariance matrix: operators x properties, on raw bits",
        ("sumgrad ops", "ours, the planted ones and torch's"),
        ("sumgrad ops --op mine.py:my_operator", "your own"),
    )
    ops.add_argument(
        "--op",
        action="append",
        default=[],
        metavar="NAME",
        help="only this one, or your own as file.py:NAME (made with sumgrad.invariance.plain); "
        "repeatable",
    )
    ops.add_argument("--dtype", choices=DTYPES, default="float32", help="default: float32")
    ops.add_argument("--seed", type=int, default=0, help="of what the operators are given")
    ops.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default=None,
        help="default: cuda where there is a GPU, else cpu, where Triton's kernels are interpreted",
    )
    ops.add_argument("--timeout", type=_positive, default=1800.0, metavar="SECONDS",
                     help="for all of it (default: 1800)")  # fmt: skip
    add_report_flags(ops)
    add_common_flags(ops)


def _add_judge(verbs: Any) -> None:
    judge = _verb(
        verbs,
        "judge",
        "judge a stored run again",
        ("sumgrad judge", "the last one"),
        ("sumgrad judge .sumgrad/runs/mine-20260101-120000-abcdefgh", "another"),
    )
    judge.add_argument("directory", type=Path, nargs="?", default=LATEST, metavar="DIR",
                       help=f"of a run (default: the last one, {LATEST})")  # fmt: skip
    judge.add_argument("--law", choices=("report", "enforce"), help="default: as the run was")
    add_report_flags(judge)
    add_common_flags(judge)


def _add_report(verbs: Any) -> None:
    report = _verb(
        verbs,
        "report",
        "render a stored run",
        ("sumgrad report --html r.html", "the last one as a page"),
    )
    report.add_argument("directory", type=Path, nargs="?", default=LATEST, metavar="DIR",
                        help=f"of a run (default: the last one, {LATEST})")  # fmt: skip
    add_report_flags(report)
    add_common_flags(report)


def _add_list(verbs: Any) -> None:
    listing = _verb(
        verbs,
        "list",
        "workloads, topologies, faults, operators; stored runs",
        ("sumgrad list", "what is shipped"),
        ("sumgrad list runs --keep 20", "remove all but the latest 20"),
    )
    listing.add_argument("what", nargs="?", choices=("all", "runs"), default="all",
                         help="default: all that is shipped")  # fmt: skip
    listing.add_argument(
        "--keep", type=_count, metavar="N", help="of `list runs`: remove all but the latest N"
    )
    add_common_flags(listing)


def _add_diff(verbs: Any) -> None:
    diff = _verb(
        verbs,
        "diff",
        "an unchanged script: its gradients on many ranks against those on one",
        ("sumgrad diff --ranks 3 -- train.py --batch {24/ranks}", "3 ranks against 1"),
        ("sumgrad diff --ranks 4 --save monday -- train.py", "keep the single run"),
        ("sumgrad diff --ranks 4 --against monday -- train.py", "compare with it later"),
        usage="sumgrad diff --ranks N [flags] -- script.py [its arguments]\n"
        "       sumgrad diff --a CMD --b CMD [flags]",
        description="Runs a training script on N ranks and on one, gives both the same weights, "
        "and compares every gradient that an optimizer finds. Write {24/ranks} where the "
        "script takes its rows per rank, so that both train on the same rows.",
    )
    diff.add_argument(
        "--ranks", type=_count, default=0, metavar="N", help="as torchrun starts them"
    )
    diff.add_argument(
        "--against",
        default="1",
        metavar="M|NAME",
        help="ranks of the other run (default: 1), or the name of one that was kept",
    )
    diff.add_argument("--save", metavar="NAME", help="keep the other run, for --against NAME")
    diff.add_argument(
        "--save-as",
        choices=("auto", "whole", "projections"),
        default="auto",
        help="whole: weights and gradients; projections: a few numbers of each, for large models, "
        "and the other run is made again (default: auto, by size)",
    )
    diff.add_argument("--a", metavar="CMD", help="a command of your own instead, in one argument")
    diff.add_argument("--b", metavar="CMD", help="the command that it is compared with")
    diff.add_argument(
        "--variant",
        action="append",
        default=[],
        metavar="NAME: ...",
        help="the script started otherwise too, a row of a matrix: KEY=VALUE of its environment, "
        "@PYTHON of another one, more arguments; may be given again",
    )
    diff.add_argument(
        "--bitwise",
        action="store_true",
        help="beside --variant: other bits than the single run's are a FAIL",
    )
    diff.add_argument("--steps", type=_count, default=3, help="optimizer steps (default: 3)")
    diff.add_argument(
        "--zero",
        action="append",
        default=[],
        metavar="PATTERN",
        help="parameters whose gradient is zero by mathematics, by name with * and ?, as the bias "
        "that cancels in a difference of scores: else one that is zero in every step is UNKNOWN",
    )
    diff.add_argument("--out", type=Path, metavar="DIR", help="default: new, in .sumgrad/runs")
    diff.add_argument(
        "--timeout",
        type=_positive,
        default=600.0,
        metavar="SECONDS",
        help="for each run of the script, from when its last rank began (default: 600)",
    )
    diff.add_argument(
        "--no-lift",
        action="store_true",
        help="compare in the script's own dtype (default: in float64, where it runs so)",
    )
    add_report_flags(diff)
    add_common_flags(diff)
    diff.add_argument("script", nargs="*", metavar="-- script.py args")


def add_run_flags(parser: argparse.ArgumentParser) -> None:
    """What `sumgrad run` and harness/run.py share."""
    parser.add_argument(
        "--workload", help="NAME, file.py:Class or package.module:Class (default: the YAML's)"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the precision tier")
    parser.add_argument(
        "--tiers",
        type=_tiers,
        default=("structure", "precision"),
        help="comma-separated: " + ", ".join(TIERS) + " (default: structure,precision)",
    )
    parser.add_argument("--fault", metavar="NAME", help="plant this fault; see `sumgrad list`")
    parser.add_argument("--seed", type=int, default=0, help="of weights, text and draws")
    parser.add_argument("--steps", type=_count, default=None, help="default: 1; 2 for a Program")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: new, in .sumgrad/runs")
    parser.add_argument(
        "--timeout",
        type=_positive,
        default=120.0,
        metavar="SECONDS",
        help="until every rank must be done (default: 120)",
    )
    parser.add_argument(
        "--law",
        choices=("report", "enforce"),
        default=None,
        help="what breaks the convention warns (default for a Program), or fails (for a workload)",
    )
    parser.add_argument(
        "--kernels",
        choices=("auto", "triton", "torch", "fixed"),
        default=None,
        help="of a workload that can choose: Triton's, torch's, or torch's on fixed shapes "
        "(default: the YAML's, else auto)",
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda", "auto"),
        default=None,
        help="where the ranks' tensors are: GPUs are dealt to ranks in turn, over NCCL where each "
        "has one of its own, else over Gloo (default: the YAML's, else cpu)",
    )
    parser.add_argument(
        "--no-lift",
        action="store_true",
        help="leave casts to fewer digits in the structure tier as they are (default: a Program's "
        "are lifted to float64, and listed)",
    )


def add_report_flags(parser: argparse.ArgumentParser) -> None:
    """A file for each format of a report."""
    for kind in FORMATS:
        parser.add_argument(f"--{kind}", type=Path, metavar="FILE", help=f"a report in {kind}")
    parser.add_argument(
        "--github",
        action="store_true",
        help="annotations for a GitHub workflow, and markdown into its summary",
    )


def add_common_flags(parser: argparse.ArgumentParser) -> None:
    """What every verb has."""
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="machine-readable result; `-`: standard output, reports then go to standard error",
    )
    parser.add_argument("--quiet", action="store_true", help="only the last line")


def _tiers(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    wrong = [name for name in names if name not in TIERS]
    if wrong or not names:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected some of {', '.join(TIERS)}")
    return names


def _count(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if not 1 <= value <= 1000:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected an integer from 1 to 1000")
    return value


def _seconds(text: str) -> float:
    return 0.0 if text.strip() in ("0", "0.0") else _positive(text)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= 86400:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected seconds, more than 0")
    return value
