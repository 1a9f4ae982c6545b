"""A Program's run directory: the same files as any RunRecord, and how to read them back.

run.json                          what was asked, `"kind": "program"`, and the Program's Facts
ranks/rank_00003.safetensors      TIER/STEP/PARAM, again/TIER/PARAM, index/PARAM of shards
reference_TIER.*, partials_TIER.safetensors      as for a workload; problems and kinds beside
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from sumgrad.endings import outcome_from_record, read_ledger
from sumgrad.errors import UserError
from sumgrad.files import read_json, write_bytes, write_json
from sumgrad.manifest import NO_CHANGES, Changes
from sumgrad.outcome import RankOutcome, outcome_from_json
from sumgrad.program import Facts
from sumgrad.program_reference import ProgramReference
from sumgrad.rank import SETUP, rank_file, read_end_record
from sumgrad.record import (
    DAMAGED,
    SCHEMA,
    Grads,
    read_partials,
    read_problems,
    read_reference,
    read_tensors,
    refuse,
    refuse_rank,
    write_partials,
    write_reference,
)
from sumgrad.topology import Topology, topology_from_json, topology_to_json


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramSpec:
    """What was asked of a Program. tiers: those that run; skipped: tier -> why it does not."""

    topology: Topology
    facts: Facts
    workload: str
    seed: int
    steps: int
    tiers: dict[str, str]
    skipped: dict[str, str]
    fault: str | None
    law: str
    timeout_s: float
    reproduce: str
    versions: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramRankRecord:
    """What one rank wrote. grads, info, events by (tier, step); again: name -> gradient.

    index: name -> the elements it holds of a sharded parameter. params: names it holds. buffers:
    after a step, by (tier, step).
    """

    rank: int
    grads: dict[tuple[str, int], Grads]
    again: Grads
    index: Grads
    params: tuple[str, ...]
    unknown: tuple[str, ...]
    built: str
    batch: str
    info: dict[tuple[str, int], dict[str, Any]]
    events: dict[tuple[str, int], list[dict[str, Any]]]
    ledger_whole: bool
    buffers: dict[tuple[str, int], Grads] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, eq=False)
class ProgramRecord:
    """A stored run of a Program. Ranks whose files are missing or damaged are absent."""

    directory: Path
    spec: ProgramSpec
    outcomes: tuple[RankOutcome, ...]
    ranks: dict[int, ProgramRankRecord]
    references: dict[str, list[ProgramReference]]
    started: dict[int, list[dict[str, Any]]]
    damage: tuple[str, ...] = field(default=())


def write_program_spec(directory: Path, spec: ProgramSpec) -> None:
    """Write run.json."""
    data = {name: getattr(spec, name) for name in ProgramSpec.__dataclass_fields__}
    data["topology"] = topology_to_json(spec.topology)
    data["facts"] = asdict(spec.facts)
    write_json(directory / "run.json", {"schema": SCHEMA, "kind": "program", **data})


def is_program_run(directory: Path) -> bool:
    """Whether run.json is that of a Program."""
    try:
        return bool(read_json(directory / "run.json").get("kind") == "program")
    except DAMAGED:
        return False


def read_program_spec(directory: Path) -> ProgramSpec:
    """Read run.json. Raises UserError where it is damaged."""
    path = directory / "run.json"
    try:
        data = read_json(path)
        if data["schema"] != SCHEMA:
            raise UserError(
                f"{path}: written with record schema {data['schema']!r}, this version reads "
                f"{SCHEMA}"
            )
        data["topology"] = topology_from_json(data["topology"], path=path)
        facts = data["facts"]
        facts["params"] = {n: tuple(s) for n, s in facts["params"].items()}
        facts |= {key: tuple(facts[key]) for key in ("terms", "problems")}
        data["facts"] = Facts(**facts)
        return ProgramSpec(**{name: data[name] for name in ProgramSpec.__dataclass_fields__})
    except DAMAGED as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path}: damaged: {type(error).__name__}: {error}") from None


def write_program_rank(directory: Path, rank: int, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write one rank's gradients and the places of its shards."""
    flat = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_bytes(rank_file(directory, rank, ".safetensors"), save(flat))


def write_program_reference(
    directory: Path, tier: str, references: Sequence[ProgramReference]
) -> None:
    """Write a tier's reference, its partials, and what is wrong with it."""
    write_reference(directory, tier, [r.step for r in references])
    write_partials(directory, tier, {r.step.step: r.partials for r in references})
    buffers = {f"{r.step.step}/{n}": b for r in references for n, b in r.buffers.items()}
    write_bytes(_buffers_file(directory, tier), save(buffers))
    write_json(
        directory / f"program_{tier}.json",
        [
            {
                "kinds": r.kinds,
                "reached": r.reached,
                "intervals": r.intervals,
                "row_counts": r.row_counts,
                "problems": r.problems,
                "warnings": r.warnings,
                "outside": r.outside,
                "changed_buffers": r.changed_buffers,
            }
            for r in references
        ],
    )


def _buffers_file(directory: Path, tier: str) -> Path:
    return directory / f"program_{tier}_buffers.safetensors"


def load_program_record(directory: Path, *, changes: Changes = NO_CHANGES) -> ProgramRecord:
    """Read a Program's run directory. UserError if it is none; `damage` names lost parts.

    changes: files that are not what the run wrote; they are not read.
    """
    spec = read_program_spec(directory)
    ranks, started, lost = read_program_ranks(directory, spec, changes=changes)
    damage = [*changes.reasons, *lost, *read_problems(directory)]
    references = {}
    for tier in spec.tiers:
        try:
            kinds = ("reference_{}.json", "reference_{}.safetensors", "program_{}.json",
                     "partials_{}.safetensors", "program_{}_buffers.safetensors")  # fmt: skip
            refuse(changes, *(kind.format(tier) for kind in kinds))
            references[tier] = _read_references(directory, tier, spec)
        except FileNotFoundError:
            damage.append(f"tier {tier}: no reference was stored")
        except DAMAGED as error:
            damage.append(f"tier {tier}: damaged reference: {type(error).__name__}: {error}")
    return ProgramRecord(
        directory=directory,
        spec=spec,
        outcomes=_outcomes(directory, spec, damage, changes),
        ranks=ranks,
        references=references,
        started=started,
        damage=tuple(damage),
    )


def read_program_ranks(
    directory: Path, spec: ProgramSpec, *, changes: Changes = NO_CHANGES
) -> tuple[dict[int, ProgramRankRecord], dict[int, list[dict[str, Any]]], list[str]]:
    """Every rank's record that is there, the ledgers, and what is damaged.

    A ledger that is not what the rank wrote is left out: nobody says that it issued nothing.
    """
    ranks, damage = {}, list[str]()
    started: dict[int, list[dict[str, Any]]] = {}
    for rank in range(spec.topology.world_size):
        try:
            refuse_rank(changes, rank)
            started[rank] = list(read_ledger(rank_file(directory, rank, ".ledger.jsonl")))
            ranks[rank] = _read_rank(directory, rank, started[rank])
        except FileNotFoundError:
            continue
        except DAMAGED as error:
            damage.append(f"rank {rank}: damaged: {type(error).__name__}: {error}")
    return ranks, started, damage


def _outcomes(
    directory: Path, spec: ProgramSpec, damage: list[str], changes: Changes
) -> tuple[RankOutcome, ...]:
    world_size = spec.topology.world_size
    try:
        refuse(changes, "outcomes.json")
        raw = read_json(directory / "outcomes.json")
        outcomes = tuple(outcome_from_json(item) for item in raw)
    except DAMAGED:
        outcomes = ()
    if not outcomes and spec.facts.problems:
        return ()  # nothing was started
    if [o.rank for o in outcomes] == list(range(world_size)):
        return outcomes
    damage.append("outcomes.json is missing or damaged: how the processes ended is not known")
    return tuple(
        outcome_from_record(directory, rank, spec.topology.pool_of(rank).name)
        for rank in range(world_size)
    )


def _read_rank(directory: Path, rank: int, ledger: Sequence[dict[str, Any]]) -> ProgramRankRecord:
    result = (read_end_record(directory, rank) or {}).get("result") or {}
    grads: dict[tuple[str, int], Grads] = {}
    again: Grads = {}
    index: Grads = {}
    buffers: dict[tuple[str, int], Grads] = {}
    for key, tensor in read_tensors(rank_file(directory, rank, ".safetensors")):
        kind, rest = key.split("/", 1)
        if kind == "index":
            index[rest] = tensor
        elif kind == "buffer":
            tier, step, name = rest.split("/", 2)
            buffers.setdefault((tier, int(step)), {})[name] = tensor
        elif kind == "again":
            again[rest.split("/", 1)[1]] = tensor
        else:
            step, name = rest.split("/", 1)
            grads.setdefault((kind, int(step)), {})[name] = tensor
    info = {(s["tier"], int(s["step"])): s for s in result["steps"]}
    done = {event["done"] for event in ledger if "done" in event}
    results = {event["done"]: event["output"] for event in ledger if "output" in event}
    begun = [{**e, "output": results.get(e["n"])} for e in ledger if "n" in e]
    steps = [event for event in begun if event["n"] < result["operations"]]  # before it was written
    unwaited = {n for step in info.values() for n in step["unwaited"]}
    return ProgramRankRecord(
        rank=rank,
        grads={key: grads.get(key, {}) for key in info},
        again=again,
        index=index,
        params=tuple(result["params"]),
        unknown=tuple(result["unknown"]),
        built=str(result["built"]),
        batch=str(result["batch"]),
        info=info,
        events=events_by_step(begun),
        ledger_whole=len(steps) == result["operations"]
        and all(e["n"] in done or e["n"] in unwaited for e in steps),
        buffers=buffers,
    )


def events_by_step(events: Sequence[dict[str, Any]]) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """The operations of each step, in order; those of the launcher are left out."""
    out: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for event in events:
        if "n" not in event:
            continue
        tier, _, rest = str(event["label"]).partition("/")
        step = rest.partition("/")[0]
        if tier != SETUP and step.isdigit():
            out.setdefault((tier, int(step)), []).append(event)
    return out


def _read_references(directory: Path, tier: str, spec: ProgramSpec) -> list[ProgramReference]:
    facts = spec.facts
    steps = read_reference(directory, tier, names=list(facts.params), terms=list(facts.terms))
    partials = read_partials(directory, tier)
    plain = read_json(directory / f"program_{tier}.json")
    buffers: dict[int, Grads] = {}
    with contextlib.suppress(FileNotFoundError):  # runs stored before buffers were looked at
        for key, tensor in read_tensors(_buffers_file(directory, tier)):
            number, name = key.split("/", 1)
            buffers.setdefault(int(number), {})[name] = tensor
    return [
        ProgramReference(
            step=step,
            kinds=item["kinds"],
            reached=tuple(item["reached"]),
            partials=partials.get(step.step, {}),
            intervals=tuple((a, b) for a, b in item["intervals"]),
            row_counts={term: tuple(counts) for term, counts in item["row_counts"].items()},
            problems=tuple(item["problems"]),
            warnings=tuple(item["warnings"]),
            outside=tuple(item.get("outside", ())),
            buffers=buffers.get(step.step, {}),
            changed_buffers=tuple(item.get("changed_buffers", ())),
        )
        for step, item in zip(steps, plain, strict=True)
    ]
