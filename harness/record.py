"""RunRecord: the directory between running and judging.

    run.json                what was asked: topology, declaration, seed, tiers, versions, command
    ranks/rank_00003.json   how the rank ended, counts, norms, digests, hash of its weights
    ranks/rank_00003.safetensors      its gradients: TIER/STEP/PARAM
    ranks/rank_00003.ledger.jsonl     every collective it issued
    reference_TIER.safetensors|json   the reference, its scale and its noise floor
    partials_TIER.safetensors         every partial, after a failure
    outcomes.json, verdict.json, report.md
    manifest.json           what of this is judged, by size and digest

Read back, it is a value: judging it again needs neither the workload nor the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from sumgrad.declaration import Declaration, declaration_from_json, declaration_to_json
from sumgrad.endings import outcome_from_record, read_ledger
from sumgrad.errors import UserError
from sumgrad.files import is_regular, read_json, write_bytes, write_json
from sumgrad.manifest import NO_CHANGES, Changes
from sumgrad.outcome import RankOutcome, outcome_from_json, outcome_to_json
from sumgrad.plan import Plan, build_plan
from sumgrad.rank import SETUP, rank_file, read_end_record
from sumgrad.reference import StepReference
from sumgrad.topology import Topology, topology_from_json, topology_to_json

SCHEMA = 1
DTYPES = ("float64", "float32", "bfloat16", "float16")
DAMAGED = (
    OSError,
    ValueError,
    LookupError,
    ArithmeticError,
    TypeError,
    AttributeError,
    SafetensorError,
)
Grads = dict[str, torch.Tensor]
PROBLEMS = "reference_problems.json"  # named like a reference, so that it goes where they go


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """What was asked. tiers: tier name -> dtype name. workload: as `--workload` takes it."""

    topology: Topology
    declaration: Declaration
    workload: str
    seed: int
    steps: int
    tiers: dict[str, str]
    fault: str | None
    law: str
    kernels: str
    timeout_s: float
    reproduce: str
    versions: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """What one rank wrote. All by (tier, step).

    steps: counts, norm, clipped_norm, digests, weights. events: its ledger. stray: operations that
    belong to no step. ledger_whole: every operation it started is in the ledger and was waited for.
    """

    rank: int
    grads: dict[tuple[str, int], Grads]
    steps: dict[tuple[str, int], dict[str, Any]]
    events: dict[tuple[str, int], list[dict[str, Any]]]
    stray: tuple[dict[str, Any], ...]
    ledger_whole: bool


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """A stored run. Ranks whose files are missing or damaged are absent from `ranks`."""

    directory: Path
    spec: RunSpec
    outcomes: tuple[RankOutcome, ...]
    ranks: dict[int, RankRecord]
    references: dict[str, list[StepReference]]
    partials: dict[str, dict[int, dict[tuple[str, str], Grads]]]
    damage: tuple[str, ...] = field(default=())

    @cached_property
    def plan(self) -> Plan:
        """The lawful plan that the run is judged by, whatever fault was planted."""
        return build_plan(self.spec.topology, self.spec.declaration)


def write_spec(directory: Path, spec: RunSpec) -> None:
    """Write run.json."""
    data = {name: getattr(spec, name) for name in RunSpec.__dataclass_fields__}
    data["topology"] = topology_to_json(spec.topology)
    data["declaration"] = declaration_to_json(spec.declaration)
    write_json(directory / "run.json", {"schema": SCHEMA, **data})


def read_spec(directory: Path) -> RunSpec:
    """Read run.json; UserError if it is missing, damaged or of another version."""
    path = directory / "run.json"
    try:
        data = read_json(path)
    except FileNotFoundError:
        raise UserError(f"{directory}: no run.json; expected a run directory") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema != SCHEMA:
        raise UserError(
            f"{path}: written with record schema {schema!r}, this version reads {SCHEMA}"
        )
    try:
        _check_spec(data, path)
        data["topology"] = topology_from_json(data["topology"], path=path)
        data["declaration"] = declaration_from_json(data["declaration"])
        return RunSpec(**{name: data[name] for name in RunSpec.__dataclass_fields__})
    except UserError:
        raise
    except DAMAGED as error:
        raise UserError(f"{path}: damaged: {type(error).__name__}: {error}") from None


def _check_spec(data: dict[str, Any], path: Path) -> None:
    steps, tiers = data["steps"], data["tiers"]
    problems = []
    if not isinstance(steps, int) or steps < 1:
        problems.append(f"{path}: steps: got {steps!r}, expected an integer >= 1")
    if not isinstance(tiers, dict) or not set(tiers.values()) <= set(DTYPES):
        problems.append(f"{path}: tiers: got {tiers!r}, expected names of {', '.join(DTYPES)}")
    if data["law"] not in ("report", "enforce"):
        problems.append(f"{path}: law: got {data['law']!r}, expected report or enforce")
    if problems:
        raise UserError(problems)


def write_rank(directory: Path, rank: int, grads: Mapping[tuple[str, int], Grads]) -> None:
    """Write one rank's gradients."""
    flat = {
        f"{tier}/{step}/{name}": tensor.detach().cpu().contiguous()
        for (tier, step), held in grads.items()
        for name, tensor in held.items()
    }
    write_bytes(rank_file(directory, rank, ".safetensors"), save(flat))


def write_reference(directory: Path, tier: str, references: Sequence[StepReference]) -> None:
    """Write one tier's reference for all steps."""
    tensors, plain = {}, []
    for reference in references:
        for kind in ("grads", "scale", "same_dtype"):
            for name, tensor in getattr(reference, kind).items():
                tensors[f"{reference.step}/{kind}/{name}"] = tensor.detach().cpu().contiguous()
        for term, grads in reference.by_term.items():
            for name, tensor in grads.items():
                tensors[f"{reference.step}/term:{term}/{name}"] = tensor.detach().cpu().contiguous()
        plain.append(
            {
                "step": reference.step,
                "floor": reference.floor,
                "floor_by_term": reference.floor_by_term,
                "resolution": reference.resolution,
                "norm": reference.norm,
                "norm_floor": reference.norm_floor,
                "counts": reference.counts,
                "weights": reference.weights,
            }
        )
    write_bytes(directory / f"reference_{tier}.safetensors", save(tensors))
    write_json(directory / f"reference_{tier}.json", plain)


def write_partials(
    directory: Path, tier: str, partials: Mapping[int, Mapping[tuple[str, str], Grads]]
) -> None:
    """Write the partials of some steps, so that a failure can be explained without the workload."""
    tensors = {
        f"{step}/{term}/{producer}/{name}": tensor.contiguous()
        for step, held in partials.items()
        for (term, producer), grads in held.items()
        for name, tensor in grads.items()
    }
    write_bytes(directory / f"partials_{tier}.safetensors", save(tensors))


def write_outcomes(directory: Path, outcomes: Sequence[RankOutcome]) -> None:
    """Write what became of every rank."""
    write_json(directory / "outcomes.json", [outcome_to_json(o) for o in outcomes])


def write_problems(directory: Path, problems: Sequence[str]) -> None:
    """Write why a reference is missing or not to be relied on: who computed it ended badly."""
    write_json(directory / PROBLEMS, list(problems))


def read_problems(directory: Path) -> list[str]:
    """What `write_problems` wrote; empty where nothing was wrong."""
    path = directory / PROBLEMS
    try:
        return [str(line) for line in read_json(path)] if path.exists() else []
    except (*DAMAGED, RecursionError):
        return [f"{PROBLEMS} is damaged: whether the references can be relied on is not known"]


def load_record(directory: Path, *, changes: Changes = NO_CHANGES) -> RunRecord:
    """Read a run directory. UserError if it is none; damaged parts are named in `damage`.

    changes: files that are not what the run wrote; they are not read.
    """
    spec = read_spec(directory)
    damage = [*changes.reasons, *read_problems(directory)]
    outcomes = _read_outcomes(directory, spec, damage, changes)
    ranks = {}
    for rank in range(spec.topology.world_size):
        try:
            refuse_rank(changes, rank)
            ranks[rank] = _read_rank(directory, rank)
        except FileNotFoundError as error:
            if outcomes[rank].ok:
                damage.append(f"rank {rank}: {Path(str(error)).name} is missing")
        except DAMAGED as error:
            damage.append(f"rank {rank}: damaged: {type(error).__name__}: {error}")
    references, partials = {}, {}
    for tier in spec.tiers:
        try:
            refuse(changes, f"reference_{tier}.json", f"reference_{tier}.safetensors")
            references[tier] = read_reference(
                directory,
                tier,
                names=[param.name for param in spec.declaration.params],
                terms=[term.name for term in spec.declaration.terms],
            )
        except FileNotFoundError:
            damage.append(f"tier {tier}: no reference was stored")
        except DAMAGED as error:
            damage.append(f"tier {tier}: damaged reference: {type(error).__name__}: {error}")
        try:
            refuse(changes, f"partials_{tier}.safetensors")
            partials[tier] = read_partials(directory, tier)
        except DAMAGED as error:
            damage.append(f"tier {tier}: damaged partials: {type(error).__name__}: {error}")
    return RunRecord(
        directory=directory,
        spec=spec,
        outcomes=outcomes,
        ranks=ranks,
        references=references,
        partials=partials,
        damage=tuple(damage),
    )


def refuse(changes: Changes, *names: str) -> None:
    """ValueError if one of these files is not what the run wrote."""
    for name in names:
        if name in changes.files:
            raise ValueError(f"{name} {changes.files[name]}")


def refuse_rank(changes: Changes, rank: int) -> None:
    """ValueError if a file of this rank is not what the run wrote."""
    place = rank_file(Path(), rank, "").as_posix()
    refuse(changes, *(place + suffix for suffix in (".json", ".safetensors", ".ledger.jsonl")))


def _read_outcomes(
    directory: Path, spec: RunSpec, damage: list[str], changes: Changes
) -> tuple[RankOutcome, ...]:
    """What became of every rank; from the ranks' own records where outcomes.json is lost."""
    world_size = spec.topology.world_size
    try:
        refuse(changes, "outcomes.json")
        raw = read_json(directory / "outcomes.json")
        outcomes = tuple(outcome_from_json(item) for item in raw)
    except DAMAGED:
        outcomes = ()
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


def _read_rank(directory: Path, rank: int) -> RankRecord:
    end = read_end_record(directory, rank) or {}
    grads: dict[tuple[str, int], Grads] = {}
    for key, tensor in read_tensors(rank_file(directory, rank, ".safetensors")):
        tier, step, name = key.split("/", 2)
        grads.setdefault((tier, int(step)), {})[name] = tensor
    result = end.get("result") or {}
    steps = {(s["tier"], int(s["step"])): _step_info(s) for s in result.get("steps", [])}
    events: dict[tuple[str, int], list[dict[str, Any]]] = {}
    stray: list[dict[str, Any]] = []
    ledger = list(read_ledger(rank_file(directory, rank, ".ledger.jsonl")))
    done = {event["done"] for event in ledger if "done" in event}
    started = [event for event in ledger if "n" in event]
    for event in started:
        tier, _, rest = str(event["label"]).partition("/")
        step, _, edge = rest.partition("/")
        if tier != SETUP and edge and step.isdigit():
            events.setdefault((tier, int(step)), []).append(event)
        elif tier != SETUP or event["op"] != "barrier":
            stray.append(event)
    whole = len(started) == result.get("operations") and all(e["n"] in done for e in started)
    return RankRecord(
        rank=rank, grads=grads, steps=steps, events=events, stray=tuple(stray), ledger_whole=whole
    )


def _step_info(info: dict[str, Any]) -> dict[str, Any]:
    """What a rank says of one step, with numbers as numbers ("nan" too)."""
    return {
        "counts": {str(term): int(count) for term, count in info["counts"].items()},
        "norm": float(info["norm"]),
        "clipped_norm": float(info["clipped_norm"]),
        "weights": str(info["weights"]),
        "digests": [{**digest, "norm": float(digest["norm"])} for digest in info["digests"]],
    }


def read_reference(
    directory: Path, tier: str, *, names: Sequence[str], terms: Sequence[str]
) -> list[StepReference]:
    """Read one tier's reference. Raises FileNotFoundError or one of DAMAGED."""
    plain = read_json(directory / f"reference_{tier}.json")
    held: dict[int, dict[str, Grads]] = {}
    for key, tensor in read_tensors(directory / f"reference_{tier}.safetensors"):
        step, kind, name = key.split("/", 2)
        held.setdefault(int(step), {}).setdefault(kind, {})[name] = tensor

    def whole(grads: Grads) -> Grads:
        return {name: grads[name] for name in names}

    def numbers(table: dict[str, Any]) -> dict[str, dict[str, float]]:
        return {term: {name: float(table[term][name]) for name in names} for term in terms}

    return [
        StepReference(
            step=int(item["step"]),
            grads=whole(held[item["step"]]["grads"]),
            scale=whole(held[item["step"]]["scale"]),
            same_dtype=whole(held[item["step"]]["same_dtype"]),
            by_term={term: whole(held[item["step"]][f"term:{term}"]) for term in terms},
            floor={name: float(item["floor"][name]) for name in names},
            floor_by_term=numbers(item["floor_by_term"]),
            resolution=numbers(item["resolution"]),
            norm=float(item["norm"]),
            norm_floor=float(item["norm_floor"]),
            counts={term: int(item["counts"][term]) for term in terms},
            weights=str(item["weights"]),
        )
        for item in plain
    ]


def read_partials(directory: Path, tier: str) -> dict[int, dict[tuple[str, str], Grads]]:
    """Step -> (term, producer) -> name -> partials; empty where none are stored."""
    path = directory / f"partials_{tier}.safetensors"
    out: dict[int, dict[tuple[str, str], Grads]] = {}
    if path.exists():
        for key, tensor in read_tensors(path):
            step, term, producer, name = key.split("/", 3)
            out.setdefault(int(step), {}).setdefault((term, producer), {})[name] = tensor
    return out


def read_tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a file by its key. Raises FileNotFoundError or SafetensorError."""
    if not path.exists():
        raise FileNotFoundError(path)
    if not is_regular(path):
        raise ValueError(f"{path.name} is no regular file")
    with safe_open(path, framework="pt") as file:
        for key in file.keys():  # noqa: SIM118 - the handle is no mapping
            yield key, file.get_tensor(key)
