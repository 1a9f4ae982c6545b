"""One check from beginning to end: spec, ranks, reference, record, verdict.

    verdict, directory = run_check(options, launcher=launcher)

The pieces are used by the command line, by torchrun's entry, by the pytest plugin and by the fault
matrix. Files are written here and by the ranks; nothing is printed.
"""

from __future__ import annotations

import os
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sumgrad import __version__
from sumgrad.errors import UserError
from sumgrad.faults import Fault, breaks_law, find_fault, is_visible
from sumgrad.files import finite, write_json
from sumgrad.launch import Launcher, RankJob
from sumgrad.outcome import RankOutcome
from sumgrad.plan import build_plan
from sumgrad.record import RunSpec, load_record, write_outcomes, write_spec
from sumgrad.topology import Topology, load_topology
from sumgrad.verdict import Verdict
from sumgrad.workload import Workload, check_params, load_workload

Progress = Callable[[str], None]
DTYPES = ("float64", "float32", "bfloat16", "float16")
TIERS = ("structure", "precision", "bitwise")
DEFAULT_TIERS = ("structure", "precision")
MAX_LOCAL_RANKS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions:
    """The flags of a run. out: an absent or empty directory (default: a new one under .sumgrad/)."""

    topology: Path
    workload: str | None = None
    dtype: str = "float32"
    tiers: tuple[str, ...] = DEFAULT_TIERS
    fault: str | None = None
    seed: int = 0
    steps: int | None = None
    out: Path | None = None
    timeout_s: float = 120.0
    law: str = "enforce"
    kernels: str | None = None


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
    check_params(workload, workload.params(0))
    fault = find_fault(options.fault) if options.fault else None
    if fault:
        _check_plantable(fault, topology)
    kernels = options.kernels or topology.kernels
    if kernels == "triton":
        raise UserError("--kernels: triton kernels are not in this release; use torch or auto")
    if "bitwise" in options.tiers:
        raise UserError("--tiers: bitwise needs the invariant kernels of a later release")
    if options.steps is not None:
        steps = options.steps
    else:
        steps = fault.min_steps if fault else 1
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
        kernels="torch",
        timeout_s=options.timeout_s,
        reproduce=shlex.join([*prefix, *_flags(options, steps)]),
        versions=versions(),
    )
    return spec, workload


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
    job = RankJob(
        target="sumgrad.check_rank:check_rank",
        num_ranks=spec.topology.world_size,
        directory=directory,
        pools=[spec.topology.pool_of(r).name for r in range(spec.topology.world_size)],
        timeout_s=spec.timeout_s,
    )
    progress(f"starting {job.num_ranks} ranks")
    launcher.submit(job)
    references = Reference(spec, workload)
    try:
        references.compute(progress)
    finally:
        outcomes = launcher.collect(job, progress=progress)
    return finish(directory, spec, references, outcomes, progress), directory


class Reference:
    """The single-process side of a run: references of every tier, and partials on request."""

    def __init__(self, spec: RunSpec, workload: Workload) -> None:
        from sumgrad.reference import Job, StepReference

        plan = build_plan(spec.topology, spec.declaration)
        producers = {
            term.name: [(p.name, plan.units[p.name]) for p in spec.topology.with_role(term.role)]
            for term in spec.declaration.terms
        }
        largest = max(pool.size for pool in spec.topology.pools)
        self.spec, self.plan = spec, plan
        self.found: dict[str, list[StepReference]] = {}
        self.problem: str | None = None
        self._jobs = {
            tier: Job(
                workload=workload,
                producers=producers,
                dtype=_torch_dtype(dtype),
                device="cpu",
                steps=spec.steps,
                num_chunks=largest,
            )
            for tier, dtype in spec.tiers.items()
        }

    def compute(self, progress: Progress) -> None:
        """All tiers. A workload that raises here leaves `problem`, not an exception."""
        import torch

        from sumgrad.reference import compute_reference

        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            for tier, job in self._jobs.items():
                self.found[tier] = compute_reference(
                    job, progress=lambda text, tier=tier: progress(f"{tier}: {text}")
                )
        except Exception as error:
            self.problem = f"the reference raised {type(error).__name__}: {error}"
        finally:
            torch.set_num_threads(threads)

    def write(self, directory: Path) -> None:
        from sumgrad.record import write_reference

        for tier, references in self.found.items():
            write_reference(directory, tier, references)

    def write_partials(self, directory: Path, tier: str, step: int) -> None:
        """Partials of a step and of the one before it, in float64."""
        from sumgrad.record import write_partials
        from sumgrad.reference import compute_partials

        producer = self.plan.producer_pool
        cuts = self.plan.offsets[producer] if producer else (0, self.spec.declaration.num_rows)
        partials = compute_partials(
            self._jobs[tier],
            steps=[s for s in (step - 1, step) if s >= 0],
            local_rows=list(zip(cuts, cuts[1:], strict=False)),
        )
        write_partials(directory, tier, partials)


def finish(
    directory: Path,
    spec: RunSpec,
    references: Reference,
    outcomes: Sequence[RankOutcome],
    progress: Progress,
) -> Verdict:
    """Store the reference, judge, explain a failure, check the prediction, write the verdict."""
    from sumgrad.judge import judge, prediction_agrees

    write_outcomes(directory, outcomes)
    references.write(directory)
    progress("comparing")
    record = load_record(directory)
    verdict = judge(record)
    wanted = _failing_step(verdict, spec)
    if wanted is not None:
        progress("recovering the coefficients")
        references.write_partials(directory, *wanted)
        record = load_record(directory)
        verdict = judge(record)
    data = dict(verdict.data)
    reasons = verdict.reasons
    if references.problem:
        reasons = (*reasons, references.problem)
        data["not_compared"] = list(reasons)
    if spec.fault:
        fault = find_fault(spec.fault)
        visible = is_visible(fault, references.plan, steps=spec.steps)
        data["fault_report"] = {
            "story": fault.story,
            "visible": visible,
            "breaks_law": breaks_law(fault, references.plan),
            "prediction": prediction_agrees(record, fault.plant(references.plan)),
        }
    data = finite(data)
    verdict = replace(verdict, reasons=reasons, data=data)
    write_verdict(directory, verdict)
    return verdict


def write_verdict(directory: Path, verdict: Verdict) -> None:
    """verdict.json and report.md."""
    from sumgrad.report import to_markdown

    write_json(directory / "verdict.json", verdict.data)
    (directory / "report.md").write_text(to_markdown(verdict))


def _failing_step(verdict: Verdict, spec: RunSpec) -> tuple[str, int] | None:
    for tier in spec.tiers:
        steps = [
            t["step"]
            for t in verdict.data["tensors"]
            if t["tier"] == tier and t["status"] == "fail" and isinstance(t["max_abs"], float)
        ]
        if steps:
            return tier, min(steps)
    if spec.fault and spec.tiers and verdict.data["tensors"]:
        return next(iter(spec.tiers)), spec.steps - 1
    return None


def _check_plantable(fault: Fault, topology: Topology) -> None:
    roles = {pool.role for pool in topology.pools}
    missing = {"ci", "block"} - roles
    if missing:
        raise UserError(
            f"--fault {fault.name}: needs pools with the roles ci and block; "
            f"{topology.name} has none with {', '.join(sorted(missing))}"
        )


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
    if options.law != "enforce":
        flags += ["--law", options.law]
    return flags


def _torch_dtype(name: str) -> Any:
    import torch

    return getattr(torch, name)


def torchrun_command(topology: Topology, path: Path) -> str:
    """The right command line for a topology under torchrun on one machine."""
    script = os.path.relpath(Path(__file__).with_name("run.py"))
    name = os.path.basename(sys.argv[0]) if sys.argv[0].endswith("run.py") else script
    shown = sys.argv[0] if name == "run.py" else script
    return (
        f"torchrun --standalone --nproc-per-node {topology.world_size} {shown} --topology {path}"
    )
