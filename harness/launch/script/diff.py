"""A script's gradients on many ranks against those of its single run: from flags to a verdict.

    verdict, directory = run_diff(options)

The single run comes first, then runs of it whose weights are off by one rounding, then the ranks;
each starts from the same files, and all are given the single run's weights before every step. In
float64 where the script runs so, else in its own dtype.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from sumgrad.base.commands import command_line, sumgrad_command
from sumgrad.base.outcome import some_of
from sumgrad.base.verdict import Verdict
from sumgrad.diagnose.verdict import judge
from sumgrad.judge.cells import near_misses
from sumgrad.launch.ask import new_directory
from sumgrad.launch.judging import written
from sumgrad.launch.script.baseline import Baseline, find_baseline
from sumgrad.launch.script.options import (
    DiffOptions,
    check_options,
    flags_of,
    script_of,
    single_command,
)
from sumgrad.launch.script.running import OWN, Diff, Progress, how_it_ended
from sumgrad.launch.script.sides import POOL
from sumgrad.launch.script.single_runs import (
    NOISE_RUNS,
    as_it_is,
    heard,
    noises,
    single_runs,
    stored_runs,
)
from sumgrad.launch.versions import versions
from sumgrad.record.directory import load_record, write_outcomes
from sumgrad.record.manifest import write_manifest
from sumgrad.record.ranks import BUFFER_NAMED
from sumgrad.record.reference import read_tensors, write_parts, write_reference
from sumgrad.record.spec import Facts, RunSpec, Script, write_spec
from sumgrad.subjects.script.asked import KEPT, SAME, START
from sumgrad.subjects.script.reference import (
    LOSS,
    Noise,
    Single,
    louder,
    parts_of,
    read_single,
    reference_of,
    twins_of,
)
from sumgrad.topology.pools import Pool, Topology

MORE_NOISE_RUNS = 6
OnSignal = Callable[[Callable[[], None]], AbstractContextManager[Any]]


def run_diff(
    options: DiffOptions,
    *,
    progress: Progress = lambda _: None,
    on_signal: OnSignal = nullcontext,
    known: tuple[Path, Baseline] | None = None,
    said: Sequence[str] = (),
) -> tuple[Verdict, Path]:
    """Run both sides and judge. Raises UserError where nothing can be started.

    on_signal: a block in which a signal that ends the process calls what it is given first.
    known: where the single run and its noise lie already, and what they are. said: what the
    verdict is to say besides.
    """
    check_options(options)
    if options.baseline:
        known = find_baseline(options.baseline)
    name = re.sub(r"[^\w-]", "_", Path(script_of(options)).stem) or "script"
    diff = Diff(options=options, directory=new_directory(options.out, name), progress=progress)
    diff.said += said
    with on_signal(diff.end):
        verdict, directory = _run_and_judge(diff, known)
        dtypes = _own_dtypes(diff) if verdict.status == "pass" and known is None else []
    if len(dtypes) < 2:
        return verdict, directory
    return run_diff(
        replace(options, lift=False, save=None, out=directory / "own_dtypes"),
        progress=progress,
        on_signal=on_signal,
        said=[
            f"the script's parameters are {' and '.join(dtypes)}: in float64, where all are alike, "
            f"the comparison passed ({directory}); this is the one in the script's own dtypes, in "
            f"which what it does by dtype is seen"
        ],
    )


def _own_dtypes(diff: Diff) -> list[str]:
    """The dtypes that a script's parameters have of its own, where a run in float64 has seen it
    ask for half precision."""
    if not diff.lift:
        return []
    single = read_single(diff.directory / "single", diff.tier)
    lines = {line for step in single.steps for line in step.get("lifted", {})}
    if not any(line.startswith(("bfloat16", "float16")) for line in lines):
        return []
    before = diff.tier, diff.lift
    diff.tier, diff.lift = OWN
    diff.side("own dtypes")
    diff.tier, diff.lift = before
    found = set()
    for path in (diff.directory / "own dtypes").glob(KEPT.format(f"{START}_*")):
        found |= {t.dtype for n, t in read_tensors(path) if not n.startswith(BUFFER_NAMED)}
    return sorted(str(d).removeprefix("torch.") for d in found if d.is_floating_point)


def _run_and_judge(diff: Diff, known: tuple[Path, Baseline] | None) -> tuple[Verdict, Path]:
    progress = diff.progress
    runs = stored_runs(diff, known) if known is not None else single_runs(diff)
    if isinstance(runs, str):
        return _nothing_to_compare(diff, runs)
    many = diff.side("ranks", many=True)
    if known is None and diff.lift and any(o.status == "raised" for o in many.outcomes):
        as_it_is(diff, how_it_ended(many))
        runs = single_runs(diff)
        if isinstance(runs, str):
            return _nothing_to_compare(diff, runs)
        many = diff.side("ranks", many=True)
        if not many.ok:
            diff.said.pop()  # float64 has nothing to do with it
    write_spec(diff.directory, _spec(diff, runs.single, world_size=max(len(many.outcomes), 1)))
    write_outcomes(diff.directory, many.outcomes)
    _write_references(diff, runs.single, runs.noise)
    write_manifest(diff.directory)
    progress("judging")
    record = load_record(diff.directory)
    if known is None and near_misses(record) and judge(record).status == "fail":
        more = heard(runs.single, noises(diff, NOISE_RUNS + 1, MORE_NOISE_RUNS))
        loudest = [louder(*both) for both in zip(runs.noise, more, strict=True)] if more else None
        _write_references(diff, runs.single, loudest or runs.noise)
    verdict = _judged(diff.directory, progress)
    step = _step_to_look_at(verdict)
    if step is not None:
        diff.look(step)
        verdict = _judged(diff.directory, progress)
    return verdict, diff.directory


def _step_to_look_at(verdict: Verdict) -> int | None:
    """The first failing step, where its gradients are wrong and nothing says why."""
    failed = [t["step"] for t in verdict.data["tensors"] if t["status"] == "fail"]
    if verdict.status != "fail" or not failed or any(d.kind != "open" for d in verdict.diagnoses):
        return None
    return min(failed)


def _nothing_to_compare(diff: Diff, why: str) -> tuple[Verdict, Path]:
    write_spec(diff.directory, _spec(diff, None, problems=(why,)))
    return _judged(diff.directory, diff.progress), diff.directory


def _write_references(diff: Diff, single: Single, noise: Sequence[Noise]) -> None:
    for step in range(len(single.steps)):
        reference = reference_of(single, noise[step], step)
        write_reference(diff.directory, diff.tier, reference)
        write_parts(diff.directory, diff.tier, step, parts_of(reference))


def _spec(
    diff: Diff, single: Single | None, *, world_size: int = 1, problems: tuple[str, ...] = ()
) -> RunSpec:
    options = diff.options
    dtype = "float64" if diff.lift else single.dtype if single else "float32"
    facts = Facts(
        params=single.params if single else {},
        num_rows=1,
        terms=(LOSS,),
        rows_as="indices",
        float64=None,
        problems=problems,
        weights=SAME,
        batch=SAME,
    )
    said = list(diff.said)
    if single is not None and single.steps[-1].get("dropout"):
        said.append("dropout was switched off in every run, so that runs can be compared")
    if single is not None and single.unowned:
        said.append(
            f"{some_of(list(single.unowned))} has a gradient and is in no torch.optim.Optimizer: "
            f"it was not compared"
        )
    return RunSpec(
        topology=_topology(script_of(options), world_size),
        workload=script_of(options),
        seed=0,
        steps=len(single.steps) if single else options.steps,
        tiers={} if problems else {diff.tier: dtype},
        fault=None,
        law="report",
        timeout_s=options.timeout_s,
        reproduce=command_line([*sumgrad_command(), "diff", *flags_of(options)]),
        versions=versions(),
        facts=facts,
        script=Script(
            command=_compared_with(diff),
            rows=tuple(step["rows"] for step in single.steps) if single else (),
            losses=tuple(tuple(step["losses"]) for step in single.steps) if single else (),
            said=tuple(said),
            rescaled=tuple(step.get("rescaled", {}) for step in single.steps) if single else (),
            again=tuple(tuple(step.get("again", ())) for step in single.steps) if single else (),
            draws=tuple(step.get("draws", {}) for step in single.steps) if single else (),
            since=diff.since,
            twins=twins_of(single) if single else (),
            zero=options.zero,
        ),
        lift=diff.lift,
    )


def _compared_with(diff: Diff) -> str:
    """How the single run was started, or the name of a stored one."""
    stored = diff.options.baseline if diff.reference else None
    return stored or single_command(diff.options)


def _topology(script: str, world_size: int) -> Topology:
    pool = Pool(name=POOL, role="home", axes=(("ranks", world_size),), ranks=range(world_size))
    return Topology(
        name=Path(script).stem,
        why="",
        workload=script,
        kernels="torch",
        device="cpu",
        plan_only=False,
        pools=(pool,),
        options={},
    )


def _judged(directory: Path, progress: Progress) -> Verdict:
    write_manifest(directory)
    progress("judging")
    return written(directory, judge(load_record(directory)))
