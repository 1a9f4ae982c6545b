"""One check from beginning to end: spec, ranks, reference, record, verdict.

    verdict, directory = run_check(options, launcher=launcher)

The pieces are used by the command line, by torchrun's entry, by the pytest plugin and by the fault
matrix. Files are written here and by the ranks; nothing is printed.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sumgrad import __version__
from sumgrad.check_rank import Spec, read_any_spec
from sumgrad.commands import command_line, sumgrad_command, torchrun_prefix
from sumgrad.errors import UserError
from sumgrad.faults import find_fault, plant
from sumgrad.files import finite, write_bytes, write_json
from sumgrad.launch import Helper, Launcher, RankJob
from sumgrad.manifest import Changes, find_changes, write_manifest
from sumgrad.outcome import RankOutcome, some_of
from sumgrad.plan import build_plan
from sumgrad.program import Facts, is_program
from sumgrad.program_check import (
    judge_program_directory,
    look_beside,
    make_program_spec,
)
from sumgrad.program_job import look_here
from sumgrad.program_record import ProgramSpec, is_program_run, write_program_spec
from sumgrad.record import RunSpec, load_record, write_outcomes, write_problems, write_spec
from sumgrad.topology import Topology, load_topology, topology_to_json
from sumgrad.verdict import Verdict
from sumgrad.workload import (
    Workload,
    chosen_workload,
    find_class,
    first_params,
    has_kernels,
    load_workload,
)

Progress = Callable[[str], None]
DEFAULT_TIERS = ("structure", "precision")
MAX_LOCAL_RANKS = 512
DEFAULT_TIMEOUT_S = 120.0
REFERENCE_FILES = ("reference_*", "partials_*", "program_*")
Look = Callable[[Topology, str, int], Facts]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions:
    """The flags of a run. out: an absent or empty directory (default: a new one in .sumgrad/).

    keep_partials: store the partials of a clean run too. reuse: a stored run that asked the same
    but for the fault; its reference and partials are copied instead of computed again. law:
    "report" or "enforce"; the default enforces it for workloads and reports it for Programs.
    """

    topology: Path
    workload: str | None = None
    dtype: str = "float32"
    tiers: tuple[str, ...] = DEFAULT_TIERS
    fault: str | None = None
    seed: int = 0
    steps: int | None = None
    out: Path | None = None
    timeout_s: float = DEFAULT_TIMEOUT_S
    law: str | None = None
    kernels: str | None = None
    keep_partials: bool = False
    reuse: Path | None = None


def make_spec(
    options: CheckOptions, *, prefix: Sequence[str], look: Look = look_here
) -> tuple[Spec, Workload | None]:
    """Validate everything that can be validated before a process starts. Raises UserError.

    look: how a Program is probed. A Program has no Workload.
    """
    topology = _startable(options)
    name, where = chosen_workload(topology, options.workload)
    if "bitwise" in options.tiers:
        raise UserError("--tiers: bitwise needs canonical trees in the step, a later release")
    if not is_program(find_class(name, where)):
        return _workload_spec(options, topology, name, prefix)
    if (options.kernels or "auto") == "triton":
        raise UserError("--kernels: a Program runs its own operators; triton is for workloads")
    spec = make_program_spec(
        topology,
        name,
        seed=options.seed,
        steps=options.steps,
        tiers=_tiers(options),
        fault=options.fault,
        law=options.law or "report",
        timeout_s=options.timeout_s,
        reproduce=lambda steps: command_line([*prefix, *_flags(options, steps)]),
        versions=versions(),
        look=look,
    )
    return spec, None


def _tiers(options: CheckOptions) -> dict[str, str]:
    return {t: "float64" if t == "structure" else options.dtype for t in options.tiers}


def _startable(options: CheckOptions) -> Topology:
    """The topology, if its ranks can be started here."""
    topology = load_topology(options.topology)
    if topology.plan_only:
        raise UserError(
            f"{options.topology}: plan_only: {topology.world_size} ranks are proved, not started; "
            f"use `{command_line(['sumgrad', 'plan', options.topology])}`"
        )
    if topology.world_size > MAX_LOCAL_RANKS and "RANK" not in os.environ:
        raise UserError(
            f"{options.topology}: {topology.world_size} ranks on one machine, at most "
            f"{MAX_LOCAL_RANKS}; use torchrun on many machines"
        )
    return topology


def _workload_spec(
    options: CheckOptions, topology: Topology, name: str, prefix: Sequence[str]
) -> tuple[RunSpec, Workload]:
    workload = load_workload(name, topology, seed=options.seed)
    plan = build_plan(topology, workload.declaration)
    first_params(workload)
    fault = find_fault(options.fault) if options.fault else None
    if fault:
        plant(fault, plan)
    kernels = chosen_kernels(options, topology, workload)
    steps = options.steps or (fault.min_steps if fault else 1)
    spec = RunSpec(
        topology=topology,
        declaration=plan.declaration,
        workload=name,
        seed=options.seed,
        steps=steps,
        tiers=_tiers(options),
        fault=options.fault,
        law=options.law or "enforce",
        kernels=kernels,
        timeout_s=options.timeout_s,
        reproduce=command_line([*prefix, *_flags(options, steps)]),
        versions=versions(),
    )
    return spec, workload


def chosen_kernels(options: CheckOptions, topology: Topology, workload: Workload) -> str:
    """ "torch" or "triton": the flag, else the YAML; auto is torch, because ranks compute on CPUs.

    Raises UserError if this machine or this workload cannot run Triton's.
    """
    flag = options.kernels if options.kernels != "auto" else None
    kernels = flag or topology.kernels
    if kernels != "triton":
        return "torch"
    source = "--kernels" if flag else topology.where(("kernels",))
    if not has_kernels(workload):
        raise UserError(f"{source}: the workload's formulas() takes no `kernels`; use torch")
    if importlib.util.find_spec("triton") is None:
        raise UserError(f"{source}: Triton is not installed on this machine; use --kernels torch")
    return "triton"


def versions() -> dict[str, str]:
    """What a stored run was made with, and what of this torch no ledger would show."""
    import torch
    from sumgrad.delegation import unrecorded_operations

    unrecorded = ", ".join(sorted(unrecorded_operations()))
    more = {"not recorded": unrecorded} if unrecorded else {}
    return more | {
        "sumgrad": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "system": platform.system(),
    }


def make_directory(options: CheckOptions, name: str) -> Path:
    """The run directory: new or empty, writable. Raises UserError, changes nothing else."""
    stamp = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-"
    try:
        if options.out is None:
            parent = Path(".sumgrad") / "runs"
            parent.mkdir(parents=True, exist_ok=True)
            directory = Path(tempfile.mkdtemp(prefix=stamp, dir=parent))
        else:
            directory = options.out
            directory.mkdir(parents=True, exist_ok=True)
            held = sorted(path.name for path in directory.iterdir())
            if held:
                what = "a stored run" if "run.json" in held else some_of(held)
                raise UserError(
                    f"--out {directory}: already holds {what}; stored runs are not overwritten, "
                    f"so give a new directory or leave --out away"
                )
        (directory / "ranks").mkdir()
    except OSError as error:
        place = options.out or Path(".sumgrad")
        raise UserError(f"--out {place}: cannot be written: {error.strerror}") from None
    return directory


def run_check(
    options: CheckOptions, *, launcher: Launcher, progress: Progress = lambda _: None
) -> tuple[Verdict, Path]:
    """Run on this machine and judge. Raises UserError before any process starts."""
    launcher.start()
    topology = _startable(options)
    made: list[Path] = []

    def look(topology: Topology, name: str, seed: int) -> Facts:
        made.append(make_directory(options, topology.name))
        progress("looking at the program")
        return look_beside(launcher, made[0], options.timeout_s)(topology, name, seed)

    spec, workload = make_spec(options, prefix=[*sumgrad_command(), "run"], look=look)
    directory = made[0] if made else make_directory(options, topology.name)
    store_spec(directory, spec)
    if isinstance(spec, ProgramSpec) and spec.facts.problems:
        write_manifest(directory)
        return finish_program(directory, progress=progress), directory
    num_ranks = spec.topology.world_size
    job = RankJob(
        target="sumgrad.check_rank:check_rank",
        num_ranks=num_ranks,
        directory=directory,
        pools=[spec.topology.pool_of(r).name for r in range(num_ranks)],
        helpers=[] if options.reuse else reference_helpers(spec),
        timeout_s=spec.timeout_s,
        helper_patience=3 if isinstance(spec, ProgramSpec) else 10,
    )
    progress(f"starting {num_ranks} ranks")
    outcomes = launcher.run(job, progress=progress)
    problems = [
        f"the reference of tier {tier}: {outcome.status}, {outcome.detail}"
        for tier, outcome in zip(spec.tiers, outcomes[num_ranks:], strict=False)
        if not outcome.ok
    ]
    if options.reuse:
        copy_reference(options.reuse, directory, spec)
    run = Run(
        directory=directory,
        spec=spec,
        workload=workload,
        outcomes=outcomes[:num_ranks],
        keep_partials=options.keep_partials,
    )
    verdict = finish(run, problems=problems, progress=progress)
    if isinstance(spec, ProgramSpec) and verdict.status == "fail" and num_ranks > 1:
        verdict = _with_one_rank(options, verdict, directory, launcher=launcher, progress=progress)
    return verdict, directory


def _with_one_rank(
    options: CheckOptions,
    verdict: Verdict,
    directory: Path,
    *,
    launcher: Launcher,
    progress: Progress,
) -> Verdict:
    """The verdict, and whether the same step already fails where there is nothing to distribute.

    Written to the verdict's warnings. Planted faults are left out of the run on one rank.
    """
    progress("the same on one rank")
    whole = topology_to_json(load_topology(options.topology))
    pools = {
        name: {"axes": dict.fromkeys(entry["axes"], 1), "role": entry["role"]}
        for name, entry in whole["pools"].items()
    }
    if len(pools) > 1:
        return verdict  # a pool more is a rank more
    place = directory / "one_rank"
    place.mkdir()
    path = place / "topology.yaml"
    data = {k: v for k, v in whole.items() if v is not None}
    write_json(path, {**data, "pools": pools})
    alone = replace(options, topology=path, fault=None, tiers=("structure",), out=place / "run")
    try:
        one, _ = run_check(alone, launcher=launcher)
    except UserError:
        return verdict
    if one.status == "pass":
        text = "on one rank the step agrees with loss_sum: the fault is in the distribution"
    elif one.status == "fail":
        text = "step and loss_sum disagree even on one rank, with nothing distributed: " + (
            one.diagnoses[0].cause if one.diagnoses else "see one_rank/run"
        )
    else:
        return verdict
    data = {**verdict.data, "warnings": [*verdict.data["warnings"], text]}
    verdict = replace(verdict, warnings=(*verdict.warnings, text), data=data)
    write_verdict(directory, verdict)
    return verdict


def store_spec(directory: Path, spec: Spec) -> None:
    """Write run.json."""
    if isinstance(spec, ProgramSpec):
        write_program_spec(directory, spec)
    else:
        write_spec(directory, spec)


def reference_helpers(spec: Spec) -> list[Helper]:
    """One process for each tier's reference, beside the ranks."""
    target = "sumgrad.check_reference:reference_helper"
    return [Helper(target=target, arguments={"tier": tier}) for tier in spec.tiers]


def copy_reference(stored: Path, directory: Path, spec: Spec) -> None:
    """Take reference and partials from a stored run. UserError if it asked something else."""
    theirs: Spec = read_any_spec(stored)
    if topology_to_json(theirs.topology) != topology_to_json(spec.topology):
        raise UserError(f"{stored}: its reference is for another topology")
    of = "facts" if isinstance(spec, ProgramSpec) else "declaration"
    for name in (of, "workload", "seed", "steps", "tiers"):
        if getattr(theirs, name) != getattr(spec, name):
            raise UserError(f"{stored}: its reference is for another {name}")
    for file in [f for kind in REFERENCE_FILES for f in stored.glob(kind)]:
        shutil.copy(file, directory / file.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run whose ranks and references have ended and that is to be judged."""

    directory: Path
    spec: Spec
    workload: Workload | None
    outcomes: Sequence[RankOutcome]
    keep_partials: bool = False


def finish(run: Run, *, problems: Sequence[str] = (), progress: Progress) -> Verdict:
    """Judge, explain a failure, write the verdict.

    problems: why a reference is missing, or not to be relied on; kept with the run.
    """
    from sumgrad.check_reference import store_partials
    from sumgrad.judge import judge

    directory, spec = run.directory, run.spec
    write_outcomes(directory, run.outcomes)
    if problems:
        write_problems(directory, problems)
    write_manifest(directory)
    progress("comparing")
    if isinstance(spec, ProgramSpec):
        return finish_program(directory, progress=progress)
    assert run.workload is not None
    record = load_record(directory)
    verdict = judge(record)
    wanted = _step_to_explain(verdict, run)
    if wanted is not None and wanted[1] not in record.partials.get(wanted[0], {}):
        progress("recovering the coefficients")
        tier, step = wanted
        store_partials(directory, spec, run.workload, tier, step)
        write_manifest(directory)
        record = load_record(directory)
        verdict = judge(record)
    return _written(directory, verdict)


def judge_directory(directory: Path, *, law: str | None = None) -> Verdict:
    """Judge a stored run again, of a workload or a Program. Raises UserError.

    Files that are not what the run wrote are not read; a run with such files never passes.
    """
    if not (directory / "run.json").exists():
        raise UserError(f"{directory}: no run.json; expected a run directory")
    changes = find_changes(directory)
    if "run.json" in changes.files:
        raise UserError(f"{directory / 'run.json'}: {changes.files['run.json']}")
    try:
        return _judge_unchanged(directory, law, changes)
    except UserError:
        raise
    except Exception as error:
        if not changes.reasons:
            raise
        text = f"damaged, cannot be judged: {type(error).__name__}: {error}"
        raise UserError([f"{directory}: {text}", *changes.reasons]) from error


def _judge_unchanged(directory: Path, law: str | None, changes: Changes) -> Verdict:
    from sumgrad.judge import judge

    if is_program_run(directory):
        return judge_program_directory(directory, law=law, changes=changes)
    record = load_record(directory, changes=changes)
    if law:
        record = replace(record, spec=replace(record.spec, law=law))
    return judge(record)


def finish_program(directory: Path, *, progress: Progress) -> Verdict:
    """Judge a Program's run and write the verdict."""
    progress("judging")
    return _written(directory, judge_program_directory(directory))


def _written(directory: Path, verdict: Verdict) -> Verdict:
    """The verdict, once it is in the directory."""
    verdict = replace(verdict, data=finite(verdict.data))
    write_verdict(directory, verdict)
    return verdict


def write_verdict(directory: Path, verdict: Verdict) -> None:
    """verdict.json and report.md."""
    from sumgrad.report_files import to_markdown

    write_json(directory / "verdict.json", verdict.data)
    write_bytes(directory / "report.md", to_markdown(verdict).encode())


def _step_to_explain(verdict: Verdict, run: Run) -> tuple[str, int] | None:
    """The first failing step of the first failing tier; the last step where partials are kept."""
    for tier in run.spec.tiers:
        steps = [
            t["step"]
            for t in verdict.data["tensors"]
            if t["tier"] == tier and t["status"] == "fail" and isinstance(t["max_abs"], float)
        ]
        if steps:
            return tier, min(steps)
    if (run.spec.fault or run.keep_partials) and verdict.data["tensors"]:
        return next(iter(run.spec.tiers)), run.spec.steps - 1
    return None


def _flags(options: CheckOptions, steps: int) -> list[str]:
    flags = [str(options.topology), "--seed", str(options.seed), "--steps", str(steps)]
    if options.workload:
        flags += ["--workload", options.workload]
    if options.dtype != "float32":
        flags += ["--dtype", options.dtype]
    if options.tiers != DEFAULT_TIERS:
        flags += ["--tiers", ",".join(options.tiers)]
    if options.fault:
        flags += ["--fault", options.fault]
    if options.timeout_s != DEFAULT_TIMEOUT_S:
        flags += ["--timeout", f"{options.timeout_s:g}"]
    if options.kernels:
        flags += ["--kernels", options.kernels]
    if options.law:
        flags += ["--law", options.law]
    return flags


def torchrun_command(topology: Topology, path: Path) -> str:
    """The right command line for a topology under torchrun on one machine."""
    return command_line([*torchrun_prefix(topology.world_size), "--topology", path])
