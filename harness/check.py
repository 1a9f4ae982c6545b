"""One check from beginning to end: spec, ranks, reference, record, verdict.

    verdict, directory = run_check(options, launcher=launcher)

The pieces are used by the command line, by torchrun's entry, by the pytest plugin and by the fault
matrix. Files are written here and by the ranks; nothing is printed.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sumgrad import __version__
from sumgrad.errors import UserError
from sumgrad.faults import find_fault, plant
from sumgrad.files import finite, write_bytes, write_json
from sumgrad.launch import Helper, Launcher, RankJob
from sumgrad.outcome import RankOutcome
from sumgrad.plan import build_plan
from sumgrad.record import RunSpec, load_record, read_spec, write_outcomes, write_spec
from sumgrad.topology import Topology, load_topology, topology_to_json
from sumgrad.verdict import Verdict, merge
from sumgrad.workload import Workload, first_params, has_kernels, load_workload

Progress = Callable[[str], None]
DEFAULT_TIERS = ("structure", "precision")
MAX_LOCAL_RANKS = 512
DEFAULT_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions:
    """The flags of a run. out: an absent or empty directory (default: a new one in .sumgrad/).

    keep_partials: store the partials of a clean run too. reuse: a stored run that asked the same
    but for the fault; its reference and partials are copied instead of computed again.
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
    law: str = "enforce"
    kernels: str | None = None
    keep_partials: bool = False
    reuse: Path | None = None


def make_spec(options: CheckOptions, *, prefix: Sequence[str]) -> tuple[RunSpec, Workload]:
    """Validate everything that can be validated before a process starts. Raises UserError."""
    topology = load_topology(options.topology)
    if topology.plan_only:
        raise UserError(
            f"{options.topology}: plan_only: {topology.world_size} ranks are proved, not started; "
            f"use `sumgrad plan {options.topology}`"
        )
    if topology.world_size > MAX_LOCAL_RANKS and "RANK" not in os.environ:
        raise UserError(
            f"{options.topology}: {topology.world_size} ranks on one machine, at most "
            f"{MAX_LOCAL_RANKS}; use torchrun on many machines"
        )
    name = options.workload or topology.workload
    workload = load_workload(name, topology, seed=options.seed)
    plan = build_plan(topology, workload.declaration)
    first_params(workload)
    fault = find_fault(options.fault) if options.fault else None
    if fault:
        plant(fault, plan)
    kernels = chosen_kernels(options, topology, workload)
    if "bitwise" in options.tiers:
        raise UserError("--tiers: bitwise needs canonical trees in the step, a later release")
    steps = options.steps or (fault.min_steps if fault else 1)
    tiers = {t: "float64" if t == "structure" else options.dtype for t in options.tiers}
    spec = RunSpec(
        topology=topology,
        declaration=plan.declaration,
        workload=name,
        seed=options.seed,
        steps=steps,
        tiers=tiers,
        fault=options.fault,
        law=options.law,
        kernels=kernels,
        timeout_s=options.timeout_s,
        reproduce=shlex.join([*prefix, *_flags(options, steps)]),
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
    """What a stored run was made with."""
    import torch

    return {
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
            if any(directory.iterdir()):
                raise UserError(f"--out {directory}: is not empty; stored runs are not overwritten")
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
    spec, workload = make_spec(options, prefix=["sumgrad", "run"])
    directory = make_directory(options, spec.topology.name)
    write_spec(directory, spec)
    num_ranks = spec.topology.world_size
    job = RankJob(
        target="sumgrad.check_rank:check_rank",
        num_ranks=num_ranks,
        directory=directory,
        pools=[spec.topology.pool_of(r).name for r in range(num_ranks)],
        helpers=[] if options.reuse else reference_helpers(spec),
        timeout_s=spec.timeout_s,
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
    return finish(run, problems=problems, progress=progress), directory


def reference_helpers(spec: RunSpec) -> list[Helper]:
    """One process for each tier's reference, beside the ranks."""
    target = "sumgrad.check_reference:reference_helper"
    return [Helper(target=target, arguments={"tier": tier}) for tier in spec.tiers]


def copy_reference(stored: Path, directory: Path, spec: RunSpec) -> None:
    """Take reference and partials from a stored run. UserError if it asked something else."""
    theirs = read_spec(stored)
    if topology_to_json(theirs.topology) != topology_to_json(spec.topology):
        raise UserError(f"{stored}: its reference is for another topology")
    for name in ("declaration", "workload", "seed", "steps", "tiers"):
        if getattr(theirs, name) != getattr(spec, name):
            raise UserError(f"{stored}: its reference is for another {name}")
    for file in [*stored.glob("reference_*"), *stored.glob("partials_*")]:
        shutil.copy(file, directory / file.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run whose ranks and references have ended and that is to be judged."""

    directory: Path
    spec: RunSpec
    workload: Workload
    outcomes: Sequence[RankOutcome]
    keep_partials: bool = False


def finish(run: Run, *, problems: Sequence[str] = (), progress: Progress) -> Verdict:
    """Judge, explain a failure, write the verdict.

    problems: why a reference is missing, if one is.
    """
    from sumgrad.check_reference import store_partials
    from sumgrad.judge import judge

    directory, spec = run.directory, run.spec
    write_outcomes(directory, run.outcomes)
    progress("comparing")
    record = load_record(directory)
    verdict = judge(record)
    wanted = _step_to_explain(verdict, run)
    if wanted is not None and wanted[1] not in record.partials.get(wanted[0], {}):
        progress("recovering the coefficients")
        tier, step = wanted
        store_partials(directory, spec, run.workload, tier, step)
        record = load_record(directory)
        verdict = judge(record)
    data = dict(verdict.data)
    reasons = verdict.reasons
    if problems:
        reasons = (*reasons, *problems)
        verdict = replace(verdict, status=merge([verdict.status, "unknown"]))
        data |= {"not_compared": list(reasons), "status": verdict.status}
    data = finite(data)
    verdict = replace(verdict, reasons=reasons, data=data)
    write_verdict(directory, verdict)
    return verdict


def write_verdict(directory: Path, verdict: Verdict) -> None:
    """verdict.json and report.md."""
    from sumgrad.report import to_markdown

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
    if options.law != "enforce":
        flags += ["--law", options.law]
    return flags


def torchrun_command(topology: Topology, path: Path) -> str:
    """The right command line for a topology under torchrun on one machine."""
    script = os.path.relpath(Path(__file__).with_name("run.py"))
    name = os.path.basename(sys.argv[0]) if sys.argv[0].endswith("run.py") else script
    shown = sys.argv[0] if name == "run.py" else script
    return f"torchrun --standalone --nproc-per-node {topology.world_size} {shown} --topology {path}"
