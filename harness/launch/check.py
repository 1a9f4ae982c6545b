"""One check from beginning to end: spec, ranks, reference, record, verdict.

    verdict, directory = run_check(options, launcher=launcher)

The pieces are used by the command line, by torchrun's entry, by the pytest plugin and by the kill
matrix. Files are written here and by the ranks; nothing is printed.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sumgrad.base.commands import sumgrad_command
from sumgrad.base.errors import UserError
from sumgrad.base.files import write_json
from sumgrad.base.outcome import RankOutcome
from sumgrad.base.verdict import Verdict
from sumgrad.diagnose.verdict import judge
from sumgrad.launch.ask import CheckOptions, make_directory, make_spec, startable
from sumgrad.launch.judging import written
from sumgrad.launch.libraries import Imports
from sumgrad.launch.local.launcher import Helper, Launcher, RankJob
from sumgrad.launch.probe import look_beside
from sumgrad.launch.rank import reference_progress
from sumgrad.record.directory import PROBLEMS, Record, load_record, write_outcomes, write_problems
from sumgrad.record.manifest import write_manifest
from sumgrad.record.reference import files_of, write_parts
from sumgrad.record.spec import Facts, RunSpec, read_spec, write_spec
from sumgrad.subjects.subject import subject_of
from sumgrad.topology.pools import Topology, load_topology, topology_to_json

Progress = Callable[[str], object]


def run_check(
    options: CheckOptions,
    *,
    launcher: Launcher,
    progress: Progress = lambda _: None,
    preload: bool = False,
) -> tuple[Verdict, Path]:
    """Run on this machine and judge. Raises UserError before any process starts.

    preload: the launcher is for this Program alone, and may import its libraries once for all.
    """
    launcher.start()
    imports = Imports()
    topology = startable(options)
    made: list[Path] = []

    def look(topology: Topology, name: str, seed: int, lift: bool) -> Facts:
        made.append(make_directory(options, topology.name))
        if preload and (libraries := imports.libraries()):
            launcher.preload(libraries)
        progress("looking at the program")
        return look_beside(launcher, made[0], options.timeout_s)(topology, name, seed, lift)

    spec = make_spec(options, prefix=[*sumgrad_command(), "run"], look=look)
    directory = made[0] if made else make_directory(options, topology.name)
    write_spec(directory, spec)
    if spec.problems:
        write_manifest(directory)
        progress("judging")
        return written(directory, judge(load_record(directory))), directory
    num_ranks, pieces = spec.topology.world_size, subject_of(spec).pieces()
    job = RankJob(
        target="sumgrad.launch.rank:check_rank",
        num_ranks=num_ranks,
        directory=directory,
        pools=[spec.topology.pool_of(r).name for r in range(num_ranks)],
        helpers=[] if options.reuse else reference_helpers(pieces),
        timeout_s=spec.timeout_s,
        helper_patience=3 if spec.opaque else 10,
        watch=lambda: "; ".join(reference_progress(directory)),
    )
    progress(f"starting {num_ranks} ranks")
    outcomes = launcher.run(job, progress=progress)
    problems = [
        f"the reference of {piece}: {outcome.status}, {outcome.detail}"
        for piece, outcome in zip(pieces, outcomes[num_ranks:], strict=False)
        if not outcome.ok
    ]
    if options.reuse:
        copy_reference(options.reuse, directory, spec)
    run = Run(
        directory=directory,
        spec=spec,
        outcomes=outcomes[:num_ranks],
        keep_partials=options.keep_partials,
    )
    verdict = finish(run, problems=problems, progress=progress)
    if spec.opaque and verdict.status == "fail" and num_ranks > 1:
        verdict = _with_one_rank(options, verdict, directory, launcher=launcher, progress=progress)
    raised = any(outcome.status == "raised" for outcome in outcomes[:num_ranks])
    if spec.opaque and spec.lift and (raised or (spec.facts and spec.facts.float64)):
        verdict = _without_lift(options, verdict, directory, launcher=launcher, progress=progress)
    return verdict, directory


def _without_lift(
    options: CheckOptions,
    verdict: Verdict,
    directory: Path,
    *,
    launcher: Launcher,
    progress: Progress,
) -> Verdict:
    """The verdict, and whether a step that raises where its casts are lifted runs as it is.

    Written to the verdict's warnings.
    """
    progress("the same without lifting casts")
    asked = replace(options, lift=False, out=directory / "no_lift")
    try:
        plain, _ = run_check(asked, launcher=launcher)
    except UserError:
        return verdict
    skipped = read_spec(directory).skipped.keys() - read_spec(directory / "no_lift").skipped.keys()
    ended = {o["rank"] for o in plain.data["outcomes"] if o["status"] == "ok"}
    raised = [o["rank"] for o in verdict.data["outcomes"] if o["status"] == "raised"]
    if not skipped and not (raised and ended >= set(raised)):
        return verdict
    text = (
        f"this raises only where its casts are lifted to float64; as it is written it runs, and "
        f"the verdict is {plain.status.upper()}: see {directory / 'no_lift'}, or use --no-lift"
    )
    data = {**verdict.data, "warnings": [*verdict.data["warnings"], text]}
    return written(directory, replace(verdict, warnings=(*verdict.warnings, text), data=data))


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
    return written(directory, replace(verdict, warnings=(*verdict.warnings, text), data=data))


def reference_helpers(pieces: Sequence[str]) -> list[Helper]:
    """One process for each piece of the reference, beside the ranks."""
    target = "sumgrad.launch.rank:reference_helper"
    return [Helper(target=target, arguments={"piece": piece}) for piece in pieces]


def copy_reference(stored: Path, directory: Path, spec: RunSpec) -> None:
    """Take reference and partials from a stored run. UserError if it asked something else."""
    theirs = read_spec(stored)
    if topology_to_json(theirs.topology) != topology_to_json(spec.topology):
        raise UserError(f"{stored}: its reference is for another topology")
    for name in ("facts", "declaration", "workload", "seed", "steps", "tiers", "lift"):
        if getattr(theirs, name) != getattr(spec, name):
            raise UserError(f"{stored}: its reference is for another {name}")
    for name in [
        PROBLEMS,
        *(name for tier in spec.tiers for s in range(spec.steps) for name in files_of(tier, s)),
    ]:
        if (stored / name).exists():
            shutil.copy(stored / name, directory / name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run whose ranks and references have ended and that is to be judged."""

    directory: Path
    spec: RunSpec
    outcomes: Sequence[RankOutcome]
    keep_partials: bool = False


def finish(run: Run, *, problems: Sequence[str] = (), progress: Progress) -> Verdict:
    """Judge, explain a failure, write the verdict.

    problems: why a reference is missing, or not to be relied on; kept with the run.
    """
    directory = run.directory
    write_outcomes(directory, run.outcomes)
    if problems:
        write_problems(directory, problems)
    write_manifest(directory)
    progress("judging")
    record = load_record(directory)
    verdict = judge(record)
    wanted = _step_to_explain(verdict, run, record)
    if wanted is not None:
        progress("recovering the coefficients")
        tier, step = wanted
        with contextlib.suppress(UserError):  # a failure that cannot be explained stands
            found = subject_of(run.spec).parts(tier, step, record.references[tier])
            for at, parts in found.items():
                write_parts(directory, tier, at, parts)
            write_manifest(directory)
            verdict = judge(load_record(directory))
    return written(directory, verdict)


def _step_to_explain(verdict: Verdict, run: Run, record: Record) -> tuple[str, int] | None:
    """The first failing step of the first failing tier whose partials are not stored yet.

    The last step where partials are kept, or a fault was planted.
    """
    wanted = None
    for tier in run.spec.tiers:
        steps = [
            t["step"]
            for t in verdict.data["tensors"]
            if t["tier"] == tier and t["status"] == "fail" and isinstance(t["max_abs"], float)
        ]
        if steps:
            wanted = tier, min(steps)
            break
    if wanted is None and (run.spec.fault or run.keep_partials) and verdict.data["tensors"]:
        wanted = next(iter(run.spec.tiers)), run.spec.steps - 1
    if wanted is None or wanted[1] in record.partials(wanted[0]):
        return None
    return wanted
