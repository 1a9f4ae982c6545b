"""The single run of a script and its noise: run now, or stored before.

In float64 where the script runs so, else in its own dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from sumgrad.launch.script.baseline import Baseline, is_small, keep_baseline, keep_noise, kept_noise
from sumgrad.launch.script.options import single_command
from sumgrad.launch.script.running import NO_STEP, OWN, Diff, how_it_ended
from sumgrad.record.spec import DAMAGED
from sumgrad.subjects.script.reference import Noise, Single, noise_of, read_single
from sumgrad.subjects.script.sketch import compare, read_sketch, sketch_of

NOISE_RUNS = 2
AT_ONCE = 2  # of these, each on one core


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """What the ranks are compared with: the single run, and of each step how far others are from
    it that differ in roundings."""

    single: Single
    noise: list[Noise]


def single_runs(diff: Diff) -> Runs | str:
    """The single run and its noise, run now; or why there are none. Kept, where that is asked."""
    single = _first_that_runs(diff)
    if isinstance(single, str):
        return single
    found = noises(diff, 1, NOISE_RUNS)
    noise = heard(single, found)
    if not noise:
        why = found[0] if isinstance(found[0], str) else "runs of it ended before it did"
        if _as_far(single, found):
            why = "its optimizers step in another order each time, as those of a set"
        return f"no noise was measured: {why}"
    keep_noise(diff.directory, noise)
    if diff.options.save:
        _keep(diff, single, [run for run in found if isinstance(run, Single)])
    return Runs(single=single, noise=noise)


def _keep(diff: Diff, single: Single, runs: Sequence[Single]) -> None:
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


def stored_runs(diff: Diff, known: tuple[Path, Baseline]) -> Runs | str:
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
        return Runs(single=single, noise=noise)
    except (*DAMAGED, FileNotFoundError) as error:
        return f"the stored run {folder} is damaged: {type(error).__name__}: {error}"


def _stored_single(diff: Diff, known: tuple[Path, Baseline]) -> Single | str:
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


def _single_since(diff: Diff, known: tuple[Path, Baseline]) -> Single | str:
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


def _first_that_runs(diff: Diff) -> Single | str:
    """The single run in float64, else as the script is; or why neither came to a step."""
    if not (diff.options.lift and diff.lift):
        diff.tier, diff.lift = OWN
        return diff.single()
    single = diff.single()
    if isinstance(single, Single) or single == NO_STEP:
        return single
    as_it_is(diff, single)
    own = diff.single()
    if isinstance(own, str):
        diff.said.pop()  # float64 has nothing to do with it
    return own


def as_it_is(diff: Diff, why: str) -> None:
    """Go on in the script's own dtype, in new folders."""
    diff.tier, diff.lift = OWN
    diff.said.append(f"compared in the script's own dtype; in float64 it did not run: {why}")
    for name in ("single", "ranks", "files", *(f"noise {i}" for i in range(1, NOISE_RUNS + 1))):
        old = diff.directory / name
        if old.exists():
            old.rename(diff.directory / f"{name} in float64")


def noises(diff: Diff, first: int, last: int) -> list[Single | str]:
    """Runs with other roundings; side by side where the script left no files that they share."""
    seeds = range(first, last + 1)
    if diff.touches_files:
        return [_noise(diff, seed) for seed in seeds]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(lambda seed: _noise(diff, seed), seeds))


def heard(single: Single, found: Sequence[Single | str]) -> list[Noise]:
    """Of each step, what those runs say that came as far as the single run, with the same
    optimizers at each step; empty if none did."""
    count = len(single.steps)
    runs = [run for run in _as_far(single, found) if _step_alike(single, run)]
    return [noise_of(single, runs, step) for step in range(count)] if runs else []


def _as_far(single: Single, found: Sequence[Single | str]) -> list[Single]:
    return [r for r in found if isinstance(r, Single) and len(r.steps) >= len(single.steps)]


def _step_alike(single: Single, run: Single) -> bool:
    """Whether the same parameters are stepped at each step: two optimizers of a set may not be."""
    return all(
        own.keys() == there.keys() for own, there in zip(single.after, run.after, strict=False)
    )


def _noise(diff: Diff, seed: int) -> Single | str:
    ended = diff.side(f"noise {seed}", jitter=seed)
    try:
        return read_single(diff.directory / f"noise {seed}", diff.tier)
    except (*DAMAGED, FileNotFoundError):
        return how_it_ended(ended)
