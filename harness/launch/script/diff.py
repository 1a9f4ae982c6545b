"""A script's gradients on many ranks against those of its single run: from flags to a verdict.

    verdict, directory = run_diff(options)

The single run comes first, then runs of it whose weights are off by one rounding, then the ranks;
each starts from the same files, and all are given the single run's weights before every step. In
float64 where the script runs so, else in its own dtype.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sumgrad.base.commands import command_line, sumgrad_command
from sumgrad.base.files import write_json
from sumgrad.base.outcome import first_to_fail, some_of
from sumgrad.base.verdict import Verdict
from sumgrad.diagnose.verdict import judge
from sumgrad.judge.cells import near_misses
from sumgrad.launch.ask import new_directory
from sumgrad.launch.judging import written
from sumgrad.launch.script.baseline import (
    Baseline,
    find_baseline,
    is_small,
    keep_baseline,
    keep_noise,
    kept_noise,
)
from sumgrad.launch.script.look import SINGLE
from sumgrad.launch.script.options import (
    DiffOptions,
    check_options,
    flags_of,
    script_of,
    single_command,
)
from sumgrad.launch.script.sides import POOL, Ended, end_all, new_mark, run_side
from sumgrad.launch.script.user_files import put_back
from sumgrad.launch.versions import versions
from sumgrad.record.directory import load_record, write_outcomes
from sumgrad.record.manifest import write_manifest
from sumgrad.record.ranks import BUFFER_NAMED
from sumgrad.record.reference import read_tensors, write_parts, write_reference
from sumgrad.record.spec import DAMAGED, Facts, RunSpec, Script, Since, write_spec
from sumgrad.record.trace import FOLDER
from sumgrad.subjects.script.asked import KEPT, SAME, START, Asked
from sumgrad.subjects.script.reference import (
    LOSS,
    Noise,
    Single,
    louder,
    noise_of,
    parts_of,
    read_single,
    reference_of,
)
from sumgrad.subjects.script.sketch import compare, read_sketch, sketch_of
from sumgrad.topology.pools import Pool, Topology

NOISE_RUNS, MORE_NOISE_RUNS = 2, 6
AT_ONCE = 2  # of these, each on one core
FLOAT64, OWN = ("structure", True), ("precision", False)  # tier, and whether it is lifted
NO_STEP = (
    "the single run ended without an optimizer's step: nothing to compare (an optimizer that is no "
    "torch.optim.Optimizer is not seen)"
)
Progress = Callable[[str], object]
OnSignal = Callable[[Callable[[], None]], AbstractContextManager[Any]]


@dataclass(slots=True, kw_only=True)
class _Diff:
    """What is known so far."""

    options: DiffOptions
    directory: Path
    progress: Progress
    tier: str = FLOAT64[0]
    lift: bool = True
    said: list[str] = field(default_factory=list)
    touches_files: bool = False
    calls: int = 0  # of an optimizer, that the single run observed
    reference: Path | None = None  # a stored single run in place of one of now
    since: Since | None = None  # the single run beside one that was kept as projections
    mark: str = field(default_factory=new_mark)
    folders: list[Path] = field(default_factory=list)

    def end(self) -> None:
        """End what runs, and put the user's files back."""
        end_all(self.mark)
        for folder in self.folders:
            put_back(folder)

    def side(self, name: str, *, jitter: int = 0, many: bool = False) -> Ended:
        """One run, and the user's files as they were before it."""
        options, single = self.options, self.reference or self.directory / "single"
        folder = self.directory if many else self.directory / name
        asked = Asked(
            directory=str(folder.resolve()),
            steps=options.steps,
            tier=self.tier,
            lift=self.lift,
            start=str(single.resolve()) if many or jitter else None,
            jitter=jitter,
            seconds=options.timeout_s,
            calls=self.calls if many or jitter else 0,
        )
        folder.mkdir(exist_ok=True)
        self.folders.append(folder)
        command = options.command("many" if many else "single")
        try:
            return run_side(
                command, asked, mark=self.mark, progress=lambda at: self.progress(f"{name}: {at}")
            )
        finally:
            changed, made = put_back(folder)
            self.touches_files = self.touches_files or bool(changed or made)
            if changed and many:
                self.said.append(f"the script changed {_some(changed)}: put back as it was")
            if made and many:
                self.said.append(f"the script made {_some(made)}: kept in {folder / 'files'}")

    def look(self, step: int) -> None:
        """A failing step once more, on both sides, with eyes on the modules."""
        options, single = self.options, self.reference or self.directory / "single"
        folder = self.directory / FOLDER
        (folder / "ranks").mkdir(parents=True)
        ok = True
        for name, side, place in (("looking, single", "single", folder / SINGLE),
                                  ("looking, ranks", "many", folder)):  # fmt: skip
            own = self.directory / name
            own.mkdir()
            self.folders.append(own)
            asked = Asked(
                directory=str(own.resolve()),
                steps=step + 1,
                tier=self.tier,
                lift=self.lift,
                start=str(single.resolve()),
                jitter=0,
                seconds=options.timeout_s,
                calls=step + 1,
                look=step,
                trace=str(place.resolve()),
            )
            try:
                self.progress(f"{name}: step {step}")
                ok &= run_side(options.command(side), asked, mark=self.mark).ok
            finally:
                put_back(own)
        if ok:
            write_json(folder / "asked.json", {"tier": self.tier, "step": step})

    def single(self) -> Single | str:
        """The single run as it was stored, or why there is none."""
        ended = self.side("single")
        try:
            run = read_single(self.directory / "single", self.tier)
        except (*DAMAGED, FileNotFoundError):
            return _how_it_ended(ended)
        if not run.steps and run.unknown:
            return "; ".join(["no optimizer stepped a model's parameters", *run.unknown])
        if not run.steps:
            return NO_STEP if ended.ok else _how_it_ended(ended)
        if not run.params:
            return "; ".join(["no parameter of the single run was seen", *run.unknown])
        self.calls = len(run.steps)
        return run


@dataclass(frozen=True, slots=True, kw_only=True)
class _Runs:
    """What the ranks are compared with: the single run, and of each step how far others are from
    it that differ in roundings."""

    single: Single
    noise: list[Noise]


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
    diff = _Diff(options=options, directory=new_directory(options.out, name), progress=progress)
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


def _own_dtypes(diff: _Diff) -> list[str]:
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


def _run_and_judge(diff: _Diff, known: tuple[Path, Baseline] | None) -> tuple[Verdict, Path]:
    progress = diff.progress
    runs = _stored_runs(diff, known) if known is not None else _single_runs(diff)
    if isinstance(runs, str):
        return _nothing_to_compare(diff, runs)
    many = diff.side("ranks", many=True)
    if known is None and diff.lift and any(o.status == "raised" for o in many.outcomes):
        _as_it_is(diff, _how_it_ended(many))
        runs = _single_runs(diff)
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
        more = _heard(runs.single, _noises(diff, NOISE_RUNS + 1, MORE_NOISE_RUNS))
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


def _single_runs(diff: _Diff) -> _Runs | str:
    """The single run and its noise, run now; or why there are none. Kept, where that is asked."""
    single = _first_that_runs(diff)
    if isinstance(single, str):
        return single
    found = _noises(diff, 1, NOISE_RUNS)
    noise = _heard(single, found)
    if not noise:
        why = found[0] if isinstance(found[0], str) else "runs of it ended before it did"
        return f"no noise was measured: {why}"
    keep_noise(diff.directory, noise)
    if diff.options.save:
        _keep(diff, single, [run for run in found if isinstance(run, Single)])
    return _Runs(single=single, noise=noise)


def _keep(diff: _Diff, single: Single, runs: Sequence[Single]) -> None:
    """Under the name that was asked for, whole or as projections."""
    options, own = diff.options, diff.directory / "single"
    assert options.save is not None
    whole = is_small(single) if options.save_as == "auto" else options.save_as == "whole"
    what = Baseline(
        tier=diff.tier, lift=diff.lift, command=single_command(options), whole=whole
    )  # fmt: skip
    sketch = None if whole else sketch_of(single, runs, own)
    keep_baseline(options.save, diff.directory, what, sketch)
    how = "" if whole else ", as projections"
    diff.said.append(f"its single run is kept as {options.save!r}{how}")


def _stored_runs(diff: _Diff, known: tuple[Path, Baseline]) -> _Runs | str:
    """Those of a baseline; of projections, the single run of now beside them."""
    folder, baseline = known
    diff.tier, diff.lift = baseline.tier, baseline.lift
    try:
        single = _stored_single(diff, known) if baseline.whole else _single_since(diff, known)
        if isinstance(single, str):
            return single
        noise = kept_noise(folder)
        if len(noise) < len(single.steps):
            return f"the stored run {folder} has no noise runs as long as it"
        return _Runs(single=single, noise=noise)
    except (*DAMAGED, FileNotFoundError) as error:
        return f"the stored run {folder} is damaged: {type(error).__name__}: {error}"


def _stored_single(diff: _Diff, known: tuple[Path, Baseline]) -> Single | str:
    folder, baseline = known
    diff.reference = folder / "single"
    if diff.options.baseline:
        diff.said.append(f"compared with the stored run {folder.name!r} of {baseline.made}")
    single = read_single(diff.reference, baseline.tier)
    diff.calls = len(single.steps)
    if len(single.steps) < diff.options.steps:
        return (
            f"the stored run {folder} has {len(single.steps)} of the {diff.options.steps} "
            f"steps that are asked for: save it again, or ask for fewer"
        )
    return single


def _single_since(diff: _Diff, known: tuple[Path, Baseline]) -> Single | str:
    """The single run of now, and what has changed since one was kept as projections."""
    folder, baseline = known
    sketch, single = read_sketch(folder), diff.single()
    if isinstance(single, str):
        return f"the single run, in the way that {folder.name!r} was kept: {single}"
    own = diff.directory / "single"
    since = compare(sketch, single, own, name=folder.name, made=baseline.made)
    if isinstance(since, str):
        return (
            f"the single run cannot be compared with the run kept as {folder.name!r} "
            f"({baseline.made}): {since}"
        )
    diff.since = since
    return single


def _nothing_to_compare(diff: _Diff, why: str) -> tuple[Verdict, Path]:
    write_spec(diff.directory, _spec(diff, None, problems=(why,)))
    return _judged(diff.directory, diff.progress), diff.directory


def _first_that_runs(diff: _Diff) -> Single | str:
    """The single run in float64, else as the script is; or why neither came to a step."""
    if not (diff.options.lift and diff.lift):
        diff.tier, diff.lift = OWN
        return diff.single()
    single = diff.single()
    if isinstance(single, Single) or single == NO_STEP:
        return single
    _as_it_is(diff, single)
    own = diff.single()
    if isinstance(own, str):
        diff.said.pop()  # float64 has nothing to do with it
    return own


def _as_it_is(diff: _Diff, why: str) -> None:
    """Go on in the script's own dtype, in new folders."""
    diff.tier, diff.lift = OWN
    diff.said.append(f"compared in the script's own dtype; in float64 it did not run: {why}")
    for name in ("single", "ranks", "files", *(f"noise {i}" for i in range(1, NOISE_RUNS + 1))):
        old = diff.directory / name
        if old.exists():
            old.rename(diff.directory / f"{name} in float64")


def _noises(diff: _Diff, first: int, last: int) -> list[Single | str]:
    """Runs with other roundings; side by side where the script left no files that they share."""
    seeds = range(first, last + 1)
    if diff.touches_files:
        return [_noise(diff, seed) for seed in seeds]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(lambda seed: _noise(diff, seed), seeds))


def _heard(single: Single, found: Sequence[Single | str]) -> list[Noise]:
    """Of each step, what those runs say that came as far as the single run; empty if none did."""
    count = len(single.steps)
    runs = [run for run in found if isinstance(run, Single) and len(run.steps) >= count]
    return [noise_of(single, runs, step) for step in range(count)] if runs else []


def _noise(diff: _Diff, seed: int) -> Single | str:
    ended = diff.side(f"noise {seed}", jitter=seed)
    try:
        return read_single(diff.directory / f"noise {seed}", diff.tier)
    except (*DAMAGED, FileNotFoundError):
        return _how_it_ended(ended)


def _write_references(diff: _Diff, single: Single, noise: Sequence[Noise]) -> None:
    for step in range(len(single.steps)):
        reference = reference_of(single, noise[step], step)
        write_reference(diff.directory, diff.tier, reference)
        write_parts(diff.directory, diff.tier, step, parts_of(reference))


def _spec(
    diff: _Diff, single: Single | None, *, world_size: int = 1, problems: tuple[str, ...] = ()
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
            draws=tuple(step.get("draws", {}) for step in single.steps) if single else (),
            since=diff.since,
        ),
        lift=diff.lift,
    )


def _compared_with(diff: _Diff) -> str:
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
        plan_only=False,
        pools=(pool,),
        options={},
    )


def _judged(directory: Path, progress: Progress) -> Verdict:
    write_manifest(directory)
    progress("judging")
    return written(directory, judge(load_record(directory)))


def _how_it_ended(ended: Ended) -> str:
    bad = [o for o in ended.outcomes if not o.ok]
    if not bad:
        tail = ended.output.read_text(errors="replace")[-2000:] if ended.output.exists() else ""
        return "no process of it called a model" + (f"; it printed: {_last(tail)}" if tail else "")
    worst = first_to_fail(bad)
    text = f"{worst.status}: {worst.detail or ''}"
    if worst.stack and (place := _place_in(worst.stack)):
        text += f", at {place}"
    elif worst.output:
        text += f"; it printed last: {_last(worst.output)}"
    return text


def _place_in(stack: str) -> str | None:
    """The last line of a traceback that is not torch's or ours."""
    lines = re.findall(r'File "([^"]+)", line (\d+)', stack)
    own = [(f, n) for f, n in lines if "/site-packages/" not in f and "/sumgrad/" not in f]
    return f"{own[-1][0]}:{own[-1][1]}" if own else None


def _last(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


def _some(paths: Sequence[str]) -> str:
    shown = ", ".join(Path(p).name for p in paths[:3])
    return shown + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
