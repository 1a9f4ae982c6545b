"""A stored run: the directory between running and judging, whatever was run.

    run.json                what was asked: topology, subject, seed, tiers, versions, command
    ranks/rank_00003.json   how the rank ended, and what it says of its steps
    ranks/rank_00003.safetensors      where its shards lie, its buffers
    ranks/grads_DIGEST.safetensors    the gradients of a step, of all ranks that have the same
    ranks/rank_00003.ledger.jsonl     every collective it issued
    reference_TIER_STEP.safetensors|json   the reference, its scale and its noise floor
    partials_TIER_STEP.safetensors|json    the gradient in parts, after a failure
    trace/                  a failing step again: what went through its modules
    trials/                 a failing step again, with one thing or another done otherwise
    one_hash.json           what it gives where all ranks have the same hashes of strings
    outcomes.json, verdict.json, report.md
    manifest.json           what of this is judged, by size and digest

Read back, it is a value: judging it again needs neither the workload nor the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sumgrad.base.files import read_json, write_json
from sumgrad.base.outcome import RankOutcome, outcome_from_json, outcome_to_json
from sumgrad.record.bits import BITS, SingleBits, bits_files, read_bits
from sumgrad.record.endings import outcome_from_record, rank_file, read_ledger
from sumgrad.record.manifest import NO_CHANGES, Changes
from sumgrad.record.one_hash import FILE as ONE_HASH
from sumgrad.record.one_hash import OneHash, read_one_hash
from sumgrad.record.ranks import At, Event, RankRecord, read_rank
from sumgrad.record.reference import (
    Grads,
    Partials,
    Reference,
    files_of,
    read_parts,
    read_reference,
    read_tensors,
    with_parts,
)
from sumgrad.record.spec import DAMAGED, RunSpec, read_spec
from sumgrad.record.trace import FOLDER, Traces, read_traces
from sumgrad.record.trial import TRIALS, Trial, read_trials

PROBLEMS = "reference_problems.json"  # beside a reference; copied with it


@dataclass(frozen=True, kw_only=True, eq=False)
class Record:
    """A stored run. Ranks whose files are missing or damaged are absent from `ranks`.

    started: rank -> its ledger's lines, also of ranks that wrote nothing else.
    """

    directory: Path
    spec: RunSpec
    outcomes: tuple[RankOutcome, ...]
    ranks: dict[int, RankRecord]
    references: dict[str, list[Reference]]
    started: dict[int, list[Event]] = field(default_factory=dict)
    damage: tuple[str, ...] = ()
    traces: Traces | None = None
    bits: tuple[SingleBits, ...] = ()
    trials: tuple[Trial, ...] = ()
    one_hash: OneHash | None = None
    _known: dict[str, Any] = field(init=False, repr=False, default_factory=dict)

    def once(self, key: str, make: Callable[[], Any]) -> Any:
        """What `make` gives for this record, made only once."""
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def with_trials(self) -> Record:
        """The same, with those that were made since it was read."""
        record = replace(self, trials=read_trials(self.directory))
        record._known.update(self._known)
        return record

    def partials(self, tier: str) -> dict[int, Partials]:
        """Step -> partials, of the steps whose partials were stored."""
        return {r.step: r.partials for r in self.references.get(tier, ()) if r.partials}

    def complete_ranks(self) -> dict[int, RankRecord]:
        """Ranks that wrote gradients, and what they say of it, of every tier and step."""
        steps = range(self.spec.steps)
        wanted: set[At] = {(tier, s) for tier in self.spec.tiers for s in steps}
        bits: set[At] = {(BITS, s) for s in steps if self.spec.bitwise}
        return {
            rank: held
            for rank, held in self.ranks.items()
            if wanted | bits <= set(held.grads) and wanted <= set(held.info)
        }


def load_record(directory: Path, *, changes: Changes = NO_CHANGES) -> Record:
    """Read a run directory. UserError if it is none; damaged parts are named in `damage`.

    changes: files that are not what the run wrote; they are not read.
    """
    spec = read_spec(directory)
    damage = [*changes.reasons]
    ranks, started, lost = read_ranks(directory, spec, changes=changes)
    damage += [*lost, *_read_problems(directory)]
    references = {}
    for tier in spec.tiers:
        found = _read_tier(directory, tier, spec, damage, changes)
        if found is not None:
            references[tier] = found
    return Record(
        directory=directory,
        spec=spec,
        outcomes=_read_outcomes(directory, spec, damage, changes),
        ranks=ranks,
        references=references,
        started=started,
        damage=tuple(damage),
        bits=_read_bits(directory, spec, damage, changes),
        traces=None if _changed(changes, FOLDER) else read_traces(directory, sorted(ranks)),
        trials=() if _changed(changes, TRIALS) else read_trials(directory),
        one_hash=None if ONE_HASH in changes.files else read_one_hash(directory),
    )


def _changed(changes: Changes, folder: str) -> bool:
    return any(name.startswith(f"{folder}/") for name in changes.files)


def read_ranks(
    directory: Path, spec: RunSpec, *, changes: Changes = NO_CHANGES
) -> tuple[dict[int, RankRecord], dict[int, list[Event]], list[str]]:
    """Every rank's record that is there, the ledgers, and what is damaged.

    A ledger that is not what the rank wrote is left out: nobody says that it issued nothing.
    """
    ranks, damage = {}, list[str]()
    started: dict[int, list[Event]] = {}
    known: dict[str, Grads] = {}

    def gradients(name: str) -> Grads:
        if name not in known:
            _refuse(changes, f"ranks/{name}")
            known[name] = dict(read_tensors(directory / "ranks" / name))
        return dict(known[name])

    for rank in range(spec.topology.world_size):
        try:
            place = rank_file(Path(), rank, "").as_posix()
            _refuse(changes, *(place + s for s in (".json", ".safetensors", ".ledger.jsonl")))
            started[rank] = list(read_ledger(rank_file(directory, rank, ".ledger.jsonl")))
            ranks[rank] = read_rank(directory, rank, spec, started[rank], gradients)
        except FileNotFoundError:
            continue
        except DAMAGED as error:
            damage.append(f"rank {rank}: damaged: {type(error).__name__}: {error}")
    return ranks, started, damage


def _read_tier(
    directory: Path, tier: str, spec: RunSpec, damage: list[str], changes: Changes
) -> list[Reference] | None:
    """A tier's references with their parts; None, and why, where they cannot be read."""
    found, steps = [], range(spec.steps)
    try:
        _refuse(changes, *(file for t in spec.tiers for s in steps for file in files_of(t, s)[:2]))
        for step in steps:
            held = read_reference(directory, tier, step, names=spec.params, terms=spec.terms)
            found.append(held)
    except FileNotFoundError:
        damage.append(f"tier {tier}: no reference was stored")
        return None
    except DAMAGED as error:
        damage.append(f"tier {tier}: damaged reference: {type(error).__name__}: {error}")
        return None
    try:
        _refuse(changes, *(file for step in steps for file in files_of(tier, step)[2:]))
        parts = [read_parts(directory, tier, step) for step in steps]
    except DAMAGED as error:
        damage.append(f"tier {tier}: damaged partials: {type(error).__name__}: {error}")
        return found
    return [r if p is None else with_parts(r, p) for r, p in zip(found, parts, strict=True)]


def _read_bits(
    directory: Path, spec: RunSpec, damage: list[str], changes: Changes
) -> tuple[SingleBits, ...]:
    """What one process has in the bitwise tier; nothing, and why, where it cannot be read."""
    steps = range(spec.steps) if spec.bitwise else ()
    try:
        _refuse(changes, *(file for step in steps for file in bits_files(step)))
        return tuple(read_bits(directory, step) for step in steps)
    except FileNotFoundError:
        damage.append(f"tier {BITS}: no reference was stored")
    except DAMAGED as error:
        damage.append(f"tier {BITS}: damaged reference: {type(error).__name__}: {error}")
    return ()


def _refuse(changes: Changes, *names: str) -> None:
    """ValueError if one of these files is not what the run wrote."""
    for name in names:
        if name in changes.files:
            raise ValueError(f"{name} {changes.files[name]}")


def _read_outcomes(
    directory: Path, spec: RunSpec, damage: list[str], changes: Changes
) -> tuple[RankOutcome, ...]:
    """What became of every rank; from the ranks' own records where outcomes.json is lost."""
    world_size = spec.topology.world_size
    try:
        _refuse(changes, "outcomes.json")
        raw = read_json(directory / "outcomes.json")
        outcomes = tuple(outcome_from_json(item) for item in raw)
    except DAMAGED:
        outcomes = ()
    if not outcomes and spec.problems:
        return ()  # nothing was started
    if [o.rank for o in outcomes] == list(range(world_size)):
        return tuple(
            replace(o, status="raised", detail=f"ended with exit code {o.exit_code}")
            if o.ok and o.exit_code not in (0, None)
            else o
            for o in outcomes
        )
    damage.append("outcomes.json is missing or damaged: how the processes ended is not known")
    return tuple(
        outcome_from_record(directory, rank, spec.topology.pool_of(rank).name)
        for rank in range(world_size)
    )


def write_outcomes(directory: Path, outcomes: Sequence[RankOutcome]) -> None:
    """Write what became of every rank."""
    write_json(directory / "outcomes.json", [outcome_to_json(o) for o in outcomes])


def write_problems(directory: Path, problems: Sequence[str]) -> None:
    """Write why a reference is missing or not to be relied on: who computed it ended badly."""
    write_json(directory / PROBLEMS, list(problems))


def _read_problems(directory: Path) -> list[str]:
    path = directory / PROBLEMS
    try:
        return [str(line) for line in read_json(path)] if path.exists() else []
    except (*DAMAGED, RecursionError):
        return [f"{PROBLEMS} is damaged: whether the references can be relied on is not known"]
