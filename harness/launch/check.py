"""One check from beginning to end: spec, ranks, reference, record, verdict.

    verdict, directory = run_check(options, launcher=launcher)

The pieces are used by the command line, by torchrun's entry, by the pytest plugin and by the kill
matrix. Files are written here and by the ranks; nothing is printed.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from sumgrad.base.commands import sumgrad_command
from sumgrad.base.errors import Broken, LaunchError, UserError
from sumgrad.base.outcome import TRIES_ON, RankOutcome
from sumgrad.base.verdict import Verdict
from sumgrad.diagnose.trials import are_only_edits, is_to_be_tried, said_of
from sumgrad.diagnose.unlike_hashes import UNLIKE_HASHES
from sumgrad.diagnose.verdict import judge
from sumgrad.judge.cells import near_misses
from sumgrad.launch.again.one_hash import try_one_hash
from sumgrad.launch.again.one_rank import OnOneRank
from sumgrad.launch.again.second_looks import with_second_looks
from sumgrad.launch.again.trace import trace_step
from sumgrad.launch.again.trials import Tried, try_changes
from sumgrad.launch.ask import CheckOptions, make_directory, make_spec, startable
from sumgrad.launch.judging import with_second_look, written
from sumgrad.launch.libraries import Imports
from sumgrad.launch.local.launcher import Helper, Launcher, RankJob, start_of
from sumgrad.launch.probe import look_beside
from sumgrad.launch.rank import reference_progress
from sumgrad.launch.room import on_few_cores, why_references_wait
from sumgrad.record.bits import bits_files
from sumgrad.record.directory import PROBLEMS, Record, load_record, write_outcomes, write_problems
from sumgrad.record.manifest import write_manifest
from sumgrad.record.reference import files_of, write_parts, write_reference
from sumgrad.record.spec import Facts, RunSpec, read_spec, write_spec
from sumgrad.subjects.subject import subject_of
from sumgrad.topology.pools import Topology, topology_to_json

Progress = Callable[[str], object]
Tries = Callable[..., Tried]
LEFT = f"{{}} changes of the step that may make it right were not tried, {{}} were: {TRIES_ON}"
MOST_TIMES = 2.2  # as long as a failing run took, for all that explains it but a run on one rank


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
    began = time.monotonic()
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
    outcomes, problems = _run_ranks(options, spec, directory, launcher, progress)
    if options.reuse:
        copy_reference(options.reuse, directory, spec)

    def again(asked: CheckOptions, what: str) -> tuple[Verdict, Path]:
        return run_check(asked, launcher=launcher, progress=lambda now: progress(f"{what}: {now}"))

    goes_by_hashes = spec.facts is not None and spec.facts.hashed and not options.reuse
    alone = OnOneRank(options, directory, again)
    look_again = partial(trace_step, directory, spec, launcher=launcher, progress=progress)
    run = Run(
        directory=directory,
        spec=spec,
        outcomes=outcomes,
        keep_partials=options.keep_partials,
        look=look_again if spec.opaque else None,
        tries=partial(
            try_changes, launcher=launcher, progress=progress, asked_s=options.search_s, alone=alone
        )
        if spec.opaque
        else None,
        with_one_hash=partial(_with_one_hash, options, spec, directory, launcher, progress)
        if goes_by_hashes
        else None,
        took_s=time.monotonic() - began,
    )
    verdict = finish(run, problems=problems, progress=progress)
    if spec.opaque and not _is_by_hashes(verdict):
        verdict = with_second_looks(options, verdict, directory, alone=alone, again=again)
    return verdict, directory


def _run_ranks(
    options: CheckOptions, spec: RunSpec, directory: Path, launcher: Launcher, progress: Progress
) -> tuple[Sequence[RankOutcome], list[str]]:
    """How each rank ended, and which piece of the reference, made beside them, did not."""
    num_ranks, pieces = spec.topology.world_size, subject_of(spec).pieces()
    helpers = [] if options.reuse else reference_helpers(pieces)
    wait = why_references_wait(spec, num_ranks, len(helpers))
    job = RankJob(
        target="sumgrad.launch.rank:check_rank",
        num_ranks=num_ranks,
        directory=directory,
        pools=[spec.topology.pool_of(r).name for r in range(num_ranks)],
        helpers=[] if wait else helpers,
        timeout_s=spec.timeout_s,
        helper_patience=3 if spec.opaque else 10,
        watch=lambda: "; ".join(reference_progress(directory)),
        start=start_of(spec),
    )
    progress(f"starting {num_ranks} ranks{on_few_cores(num_ranks)}")
    outcomes = launcher.run(job, progress=progress)
    if helpers and wait:
        progress(f"the reference, after the ranks: {wait}")
        outcomes += launcher.run(replace(job, num_ranks=0, helpers=helpers), progress=progress)
    problems = [
        f"the reference of {piece}: {outcome.status}, {outcome.detail}"
        for piece, outcome in zip(pieces, outcomes[num_ranks:], strict=False)
        if not outcome.ok
    ]
    return outcomes[:num_ranks], problems


def reference_helpers(pieces: Sequence[str]) -> list[Helper]:
    """One process for each piece of the reference, beside the ranks."""
    target = "sumgrad.launch.rank:reference_helper"
    return [Helper(target=target, arguments={"piece": piece}) for piece in pieces]


def copy_reference(stored: Path, directory: Path, spec: RunSpec) -> None:
    """Take reference and partials from a stored run. UserError if it asked something else."""
    theirs = read_spec(stored)
    if topology_to_json(theirs.topology) != topology_to_json(spec.topology):
        raise UserError(f"{stored}: its reference is for another topology")
    mine, own = spec.facts, theirs.facts
    alike = mine is not None and own is not None and replace(own, sample=mine.sample) == mine
    if alike and mine != own:
        raise UserError(
            f"{stored}: its reference is of another loss_sum: of the same rows and weights this "
            f"one gives other numbers, or another gradient"
        )
    for name in (
        "facts",
        "declaration",
        "workload",
        "seed",
        "steps",
        "tiers",
        "lift",
        "bitwise",
        "bitwise_kernels",
        "kernels",
        "device",
    ):
        if getattr(theirs, name) != getattr(spec, name):
            raise UserError(f"{stored}: its reference is for another {name}")
    for name in [
        PROBLEMS,
        *(name for tier in spec.tiers for s in range(spec.steps) for name in files_of(tier, s)),
        *(name for s in range(spec.steps) if spec.bitwise for name in bits_files(s)),
    ]:
        if (stored / name).exists():
            shutil.copy(stored / name, directory / name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run whose ranks and references have ended and that is to be judged.

    look: runs a failing step again, with eyes on its modules, and says why it could not. tries:
    runs it again with changes for so many seconds, where its cause is not proved. with_one_hash:
    runs all of it with the same hashes of strings on all ranks, which is kept. took_s: how long
    the run took until it could be judged.
    """

    directory: Path
    spec: RunSpec
    outcomes: Sequence[RankOutcome]
    keep_partials: bool = False
    look: Callable[[str, int], str | None] | None = None
    tries: Tries | None = None
    with_one_hash: Callable[[], object] | None = None
    took_s: float = 0.0


def finish(run: Run, *, problems: Sequence[str] = (), progress: Progress) -> Verdict:
    """Judge, explain a failure, write the verdict.

    problems: why a reference is missing, or not to be relied on; kept with the run.
    """
    directory, began = run.directory, time.monotonic()
    _write_how_it_ended(directory, run.outcomes, problems)
    progress("judging")
    record = load_record(directory)
    verdict = judge(record)
    if verdict.status != "pass" and _measure_again(run, near_misses(record), progress):
        write_manifest(directory)
        record = load_record(directory)
        verdict = judge(record)
    if verdict.status != "pass" and run.with_one_hash is not None:
        written(directory, verdict)
        with contextlib.suppress(UserError, LaunchError, OSError):
            run.with_one_hash()
            write_manifest(directory)
            record = load_record(directory)
            verdict = judge(record)
            if _is_by_hashes(verdict):
                return written(directory, verdict)
    wanted = _step_to_explain(verdict, run, record)
    if wanted is not None:
        written(directory, verdict)  # who ends us while we explain it has the verdict all the same
        progress("recovering the coefficients")
        tier, step = wanted
        said = list[str]()
        with contextlib.suppress(UserError, Broken):  # a failure that cannot be explained stands
            found = subject_of(run.spec).parts(tier, step, record.references[tier])
            for at, parts in found.items():
                write_parts(directory, tier, at, parts)
            if run.look is not None and verdict.status == "fail":
                with contextlib.suppress(OSError):  # as when the disk is full
                    failed = run.look(tier, step)
                    said += [failed] if failed else []
            write_manifest(directory)
            record = load_record(directory)
            verdict = judge(record)
            if run.tries is not None and is_to_be_tried(verdict):
                left = MOST_TIMES * run.took_s - (time.monotonic() - began)
                with contextlib.suppress(OSError):
                    tried = run.tries(
                        record, tier, step, left, said_of(verdict),
                        edits_only=are_only_edits(verdict),
                    )  # fmt: skip
                    if tried.made:
                        write_manifest(directory)
                        record = record.with_trials()
                        if any(one.right for one in record.trials):
                            verdict = judge(record)
                    if tried.left:
                        said.append(LEFT.format(tried.left, len(record.trials)))
        if said:
            verdict = with_second_look(directory, verdict, said)
    return written(directory, verdict)


def _write_how_it_ended(
    directory: Path, outcomes: Sequence[RankOutcome], problems: Sequence[str]
) -> None:
    write_outcomes(directory, outcomes)
    if problems:
        write_problems(directory, problems)
    write_manifest(directory)


def _with_one_hash(
    options: CheckOptions, spec: RunSpec, directory: Path, launcher: Launcher, progress: Progress
) -> None:
    def run_there(spec: RunSpec, place: Path) -> None:
        outcomes, problems = _run_ranks(options, spec, place, launcher, progress)
        _write_how_it_ended(place, outcomes, problems)

    progress("the same with one hash of strings for all ranks")
    try_one_hash(spec, directory, run_there)


def _is_by_hashes(verdict: Verdict) -> bool:
    return [one.kind for one in verdict.diagnoses] == [UNLIKE_HASHES]


def _measure_again(run: Run, steps: Sequence[int], progress: Progress) -> bool:
    """Whether these steps have noise floors from more runs now than they had."""
    done = False
    with contextlib.suppress(UserError, Broken):  # the floors that there are stand
        for step in steps:
            found = subject_of(run.spec).surer_references(step, progress=progress)
            shared: dict[int, str] = {}
            for tier, reference in found.items():
                write_reference(run.directory, tier, reference, shared=shared)
                done = True
    return done


def _step_to_explain(verdict: Verdict, run: Run, record: Record) -> tuple[str, int] | None:
    """The first failing step of the first failing tier whose partials are not stored yet; of a
    user's own also where gradients are there and no numbers.

    The last step where partials are kept, or a fault was planted.
    """
    wanted = None
    for tier in run.spec.tiers:
        steps = [
            t["step"]
            for t in verdict.data["tensors"]
            if t["tier"] == tier
            and t["status"] == "fail"
            and (isinstance(t["max_abs"], float) or (t["index"] and run.spec.opaque))
        ]
        if steps:
            wanted = tier, min(steps)
            break
    if wanted is None and (run.spec.fault or run.keep_partials) and verdict.data["tensors"]:
        wanted = next(iter(run.spec.tiers)), run.spec.steps - 1
    if wanted is None or wanted[1] in record.partials(wanted[0]):
        return None
    return wanted
