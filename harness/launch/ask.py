"""From the flags to a RunSpec: everything that can be validated before a process starts."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sumgrad.base.commands import command_line, torchrun_prefix
from sumgrad.base.devices import Kind
from sumgrad.base.errors import UserError
from sumgrad.base.outcome import some_of
from sumgrad.faults.plan import find_fault, plant
from sumgrad.faults.step import find_program_fault
from sumgrad.launch.versions import versions
from sumgrad.plan.edges import build_plan
from sumgrad.record.bits import BITS
from sumgrad.record.spec import Facts, RunSpec
from sumgrad.subjects.loading import chosen_workload, find_class
from sumgrad.subjects.planned.workload import Workload, first_params, has_kernels, load_workload
from sumgrad.subjects.program.job import look_here
from sumgrad.subjects.program.protocol import check_options_taken, is_program
from sumgrad.topology.pools import Topology, load_topology

DEFAULT_TIERS = ("structure", "precision")
MAX_LOCAL_RANKS = 512
DEFAULT_TIMEOUT_S = 120.0
DEFAULT_STEPS = 2  # of a Program: a gradient may be zero at first, a stale buffer needs a second
Look = Callable[[Topology, str, int, bool], Facts]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions:
    """The flags of a run. out: an absent or empty directory (default: a new one in .sumgrad/).

    keep_partials: store the partials of a clean run too. reuse: a stored run that asked the same
    but for the fault; its reference and partials are copied instead of computed again. law:
    "report" or "enforce"; the default enforces it for workloads and reports it for Programs. lift:
    casts to fewer digits are lifted in the structure tier. search_s: so long a failing step whose
    cause is not proved is run with changes; the default is some times as long as it took.
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
    device: str | None = None
    keep_partials: bool = False
    lift: bool = True
    search_s: float | None = None
    reuse: Path | None = None


def make_spec(options: CheckOptions, *, prefix: Sequence[str], look: Look = look_here) -> RunSpec:
    """Validate everything that can be validated before a process starts. Raises UserError.

    look: how a Program is looked at. prefix: the command that the reproduce line begins with.
    """
    topology = startable(options)
    name, where = chosen_workload(topology, options.workload)
    if is_program(find_class(name, where)):
        known = _of_program(options, topology, name, look)
    else:
        known = _of_workload(options, topology, name)
    return RunSpec(
        topology=topology,
        workload=name,
        seed=options.seed,
        fault=options.fault,
        timeout_s=options.timeout_s,
        reproduce=command_line([*prefix, *_flags(options, known["steps"])]),
        versions=versions(),
        lift=options.lift,
        device=_device(options, topology),
        **known,
    )


def _of_program(options: CheckOptions, topology: Topology, name: str, look: Look) -> dict[str, Any]:
    if BITS in options.tiers:
        raise UserError(
            "--tiers: bitwise is for workloads with a plan: nothing tells by which trees a Program "
            "sums; use structure,precision"
        )
    if (options.kernels or "auto") == "triton":
        raise UserError("--kernels: a Program runs its own operators; triton is for workloads")
    if options.fault:
        find_program_fault(options.fault, name)
    check_options_taken(name, topology)
    facts = look(topology, name, options.seed, options.lift)
    if options.dtype == "float32":
        options = replace(options, dtype=facts.runs_in)
    tiers = _tiers(options)
    skipped = {}
    if facts.float64 is not None:
        skipped = {tier: f"it cannot run in float64: {facts.float64}"
                   for tier, dtype in tiers.items() if dtype == "float64"}  # fmt: skip
    return {
        "facts": facts,
        "steps": options.steps or DEFAULT_STEPS,
        "tiers": {t: d for t, d in tiers.items() if t not in skipped and not facts.problems},
        "skipped": skipped,
        "law": options.law or "report",
    }


def _of_workload(options: CheckOptions, topology: Topology, name: str) -> dict[str, Any]:
    workload = load_workload(name, topology, seed=options.seed)
    plan = build_plan(topology, workload.declaration)
    first_params(workload)
    fault = find_fault(options.fault) if options.fault else None
    if fault:
        plant(fault, plan)
    return {
        "declaration": plan.declaration,
        "kernels": chosen_kernels(options, topology, workload),
        "steps": options.steps or (fault.min_steps if fault else 1),
        "tiers": _tiers(options),
        "bitwise": _bitwise(options),
        "bitwise_kernels": "triton" if options.kernels == "triton" else "fixed",
        "law": options.law or "enforce",
    }


def _tiers(options: CheckOptions) -> dict[str, str]:
    tiers = [tier for tier in options.tiers if tier != BITS]
    return {t: "float64" if t == "structure" else options.dtype for t in tiers}


def _bitwise(options: CheckOptions) -> str:
    """The dtype of the bitwise tier; "" where it is not asked for. UserError where it cannot be."""
    if BITS not in options.tiers:
        return ""
    if options.dtype not in ("float32", "float64"):
        raise UserError(f"--tiers bitwise: sums are float32 or float64, not {options.dtype}")
    return options.dtype


def startable(options: CheckOptions) -> Topology:
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


def _device(options: CheckOptions, topology: Topology) -> Kind:
    """The flag, else the YAML. Raises UserError."""
    device = topology.chosen_device(options.device)
    if device == "cuda" and BITS in options.tiers:
        raise UserError(
            "--tiers bitwise: compares with one process on the CPU, and the ranks are on cuda; use "
            "--device cpu with it"
        )
    return device


def chosen_kernels(options: CheckOptions, topology: Topology, workload: Workload) -> str:
    """ "torch" or "triton": the flag, else the YAML; auto is Triton on GPUs, where it can be.

    Raises UserError if this machine or this workload cannot run Triton's.
    """
    flag = options.kernels if options.kernels != "auto" else None
    kernels = flag or topology.kernels
    if kernels == "fixed" and BITS not in options.tiers:
        raise UserError("--kernels fixed is the bitwise tier's; use --tiers bitwise with it")
    if kernels == "auto" and _device(options, topology) == "cuda":
        there = has_kernels(workload) and importlib.util.find_spec("triton") is not None
        return "triton" if there else "torch"
    if kernels != "triton":
        return "torch"
    source = "--kernels" if flag else topology.where(("kernels",))
    if not has_kernels(workload):
        raise UserError(f"{source}: the workload's formulas() takes no `kernels`; use torch")
    if importlib.util.find_spec("triton") is None:
        raise UserError(f"{source}: Triton is not installed on this machine; use --kernels torch")
    return "triton"


def make_directory(options: CheckOptions, name: str) -> Path:
    """The run directory. Raises UserError."""
    return new_directory(options.out, name)


def new_directory(out: Path | None, name: str) -> Path:
    """A run directory: new or empty, writable. Raises UserError, changes nothing else."""
    stamp = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-"
    try:
        if out is None:
            parent = Path(".sumgrad") / "runs"
            parent.mkdir(parents=True, exist_ok=True)
            _ignored_by_git(parent.parent)
            directory = Path(tempfile.mkdtemp(prefix=stamp, dir=parent))
            _call_latest(directory)
        else:
            directory = out
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
        place = out or Path(".sumgrad")
        raise UserError(f"--out {place}: cannot be written: {error.strerror}") from None
    return directory


def _ignored_by_git(folder: Path) -> None:
    """Stored runs belong into no commit."""
    path = folder / ".gitignore"
    if not path.exists():
        path.write_text("*\n")


def _call_latest(directory: Path) -> None:
    """`latest` beside it, a link; where links cannot be made, nothing."""
    link = directory.with_name("latest")
    new = link.with_name(f".latest.{os.getpid()}")
    with contextlib.suppress(OSError):
        new.symlink_to(directory.name)
        new.replace(link)


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
    if options.device:
        flags += ["--device", options.device]
    if not options.lift:
        flags += ["--no-lift"]
    if options.search_s is not None:
        flags += ["--search", f"{options.search_s:g}"]
    if options.law:
        flags += ["--law", options.law]
    return flags


def torchrun_command(topology: Topology, path: Path) -> str:
    """The right command line for a topology under torchrun on one machine."""
    return command_line([*torchrun_prefix(topology.world_size), "--topology", path])
