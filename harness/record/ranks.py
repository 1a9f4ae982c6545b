"""What one rank wrote: gradients, where its shards lie, its ledger, what it saw of its steps.

Gradients go to disk step by step, into files named by their content: replicas that hold the same
bits, and a repeated step that gives them again, take the room of one.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from sumgrad.base.outcome import SETUP
from sumgrad.base.tensors import hash_weights
from sumgrad.record.endings import rank_file, read_end_record
from sumgrad.record.reference import Grads, read_tensors, write_tensors
from sumgrad.record.spec import RunSpec

GRADS_FILE = re.compile(r"grads_[0-9a-f]{16}\.safetensors")
AFTER = "after"  # in place of a tier: a script's weights after an optimizer's step
OWN = "own"  # in place of a tier: samples of what a rank's own backwards gave, (passes, samples)
OWN_AT = "own_at"  # the elements that these are of, in the flat whole parameter, (samples,)
SAMPLES = 1024  # of a parameter
AGAIN = "again"  # of the tensors of a step that was repeated
BUFFER = "buffer"
BUFFER_NAMED = "buffer:"  # before a buffer's name, among those of parameters
INDEX = "index"
STRETCH = "stretch_"  # before INDEX or INDEX_IN: elements in a row, by the first and the shape
INDEX_IN = "index_in"  # of a tier that cuts a parameter otherwise: FSDP1 pads by bytes
# What a Program's rank must say of every step.
SAID = ("races", "unwaited", "other_weights", "changed_weights", "partial", "feeds", "backwards")
Event = dict[str, Any]
At = tuple[str, int]  # tier and step


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """What one rank wrote. grads, info, events and buffers by (tier, step).

    info: what it says of the step (counts and norms; races and weights that changed). params:
    names it holds; index: the elements it holds of a sharded one, index_in: in a tier where they
    differ. again: the gradients of the step that was repeated, the last of `again_tier`. unknown:
    what it could not place. untied: names that are one parameter in build() and several here. ddp:
    by how many ranks a DistributedDataParallel in its model divides; 0 where none does. by_name:
    those that nothing but their names tell, on a rank that has others by another name. built,
    batch: hashes. stray: operations that belong to no step. ledger_whole: every operation it
    started is in the ledger and ended.
    """

    rank: int
    grads: dict[At, Grads]
    info: dict[At, dict[str, Any]]
    events: dict[At, list[Event]]
    stray: tuple[Event, ...]
    ledger_whole: bool
    params: tuple[str, ...] = ()
    index: Grads = field(default_factory=dict)
    index_in: dict[str, Grads] = field(default_factory=dict)
    again: Grads = field(default_factory=dict)
    again_tier: str = ""
    buffers: dict[At, Grads] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()
    untied: tuple[tuple[str, ...], ...] = ()
    ddp: int = 0
    by_name: tuple[str, ...] = ()
    built: str = ""
    batch: str = ""

    def index_of(self, tier: str, name: str) -> torch.Tensor | None:
        """Which elements of a parameter it holds in a tier; None for all of it."""
        return self.index_in.get(tier, {}).get(name, self.index.get(name))


class RankFiles:
    """Where one rank writes its tensors. files: `TIER/STEP`, `again/TIER` -> what holds them.

    others: what belongs to no step, INDEX/PARAM, INDEX_IN/TIER/PARAM and BUFFER/TIER/STEP/NAME;
    written at the end.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        self.directory, self.rank = directory, rank
        self.files: dict[str, str] = {}
        self.others: Grads = {}

    def keep(self, key: str, grads: Mapping[str, torch.Tensor]) -> None:
        """Write the gradients of a step, unless somebody has written the same."""
        held = {name: grad.detach().cpu().contiguous() for name, grad in grads.items()}
        name = grads_file(hash_weights(held))
        path = self.directory / "ranks" / name
        if not path.exists():
            claim = path.with_suffix(".claim")
            with contextlib.suppress(FileExistsError):  # who claims it writes it
                os.close(os.open(claim, os.O_CREAT | os.O_EXCL))
                try:
                    write_tensors(path, held)
                finally:
                    claim.unlink()
        self.files[key] = name

    def finish(self, *, stretches: bool = True) -> dict[str, str]:
        """Write what is left; returns `files`. stretches: say in short which elements are held,
        where the spec says of how many."""
        held = dict(_in_short(k, t) for k, t in self.others.items()) if stretches else self.others
        write_tensors(rank_file(self.directory, self.rank, ".safetensors"), held)
        return self.files


def _in_short(key: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    """A shard's places as where they begin and their shape, if they follow one another."""
    flat = tensor.reshape(-1)
    if key.split("/", 1)[0] not in (INDEX, INDEX_IN) or not len(flat) or not tensor.dim():
        return key, tensor
    if not torch.equal(flat, torch.arange(len(flat)) + flat[0].cpu()):
        return key, tensor
    return f"{STRETCH}{key}", torch.tensor([int(flat[0]), *tensor.shape])


def _at_length(name: str, stretch: torch.Tensor, spec: RunSpec) -> torch.Tensor:
    """Back again. Raises ValueError where the parameter has no such elements."""
    first, *shape = [int(n) for n in stretch.tolist()]
    numel = math.prod(shape)
    whole = spec.facts.params.get(name) if spec.facts is not None else None
    if whole is None or first < 0 or min(shape) < 1 or first + numel > math.prod(whole):
        raise ValueError(f"{name} has no {numel} elements from {first}")
    return torch.arange(first, first + numel).reshape(shape)


def sample_of(numel: int, most: int = SAMPLES) -> torch.Tensor:
    """So many elements of a tensor, evenly apart; all of them where there are fewer."""
    count = min(numel, most)
    return torch.arange(count) * numel // max(count, 1)


def grads_file(content: str) -> str:
    """The name of a file of gradients, in `ranks/`."""
    return f"grads_{content}.safetensors"


def read_rank(
    directory: Path,
    rank: int,
    spec: RunSpec,
    ledger: Sequence[Event],
    gradients: Callable[[str], Grads] | None = None,
) -> RankRecord:
    """Read one rank's files but for its ledger. Raises FileNotFoundError or one of spec.DAMAGED.

    gradients: how a file of gradients is read, by its name.
    """
    read = gradients or (lambda name: dict(read_tensors(directory / "ranks" / name)))
    result = (read_end_record(directory, rank) or {}).get("result") or {}
    grads: dict[At, Grads] = {}
    index, index_in, buffers = _of_no_step(directory, rank, spec)
    again: Grads = {}
    again_tier = ""
    for key, file in result["grads"].items():
        if not GRADS_FILE.fullmatch(file):
            raise ValueError(f"{file!r} is no file of gradients")
        kind, rest = key.split("/", 1)
        if kind == AGAIN:
            again, again_tier = read(file), rest
        else:
            grads[kind, int(rest)] = read(file)
    planned = spec.declaration is not None
    steps = result.get("steps", []) if planned else result["steps"]
    info = {(s["tier"], int(s["step"])): _numbers(s) if planned else s for s in steps}
    if not planned:
        _ = [said[name] for said in steps for name in SAID]  # what is left out is no evidence
        after = {at: own for at, own in grads.items() if at[0] in (AFTER, OWN, OWN_AT)}
        grads = after | {at: grads.get(at, {}) for at in info}
    begun = begun_operations(ledger)
    return RankRecord(
        rank=rank,
        grads=grads,
        info=info,
        events=events_by_step(begun),
        stray=tuple(e for e in begun if _at(e) is None and not _is_meeting(e)),
        ledger_whole=_is_whole(begun, info, result, spec),
        params=() if planned else tuple(result["params"]),
        index=index,
        index_in=index_in,
        again=again,
        again_tier=again_tier,
        buffers=buffers,
        unknown=() if planned else tuple(result["unknown"]),
        untied=tuple(tuple(map(str, names)) for names in result.get("untied", ())),
        ddp=int(result.get("ddp", 0)),
        by_name=tuple(map(str, result.get("by_name", ()))),
        built="" if planned else str(result["built"]),
        batch="" if planned else str(result["batch"]),
    )


def _of_no_step(
    directory: Path, rank: int, spec: RunSpec
) -> tuple[Grads, dict[str, Grads], dict[At, Grads]]:
    """Which elements a rank holds, those of a tier that cuts otherwise, and its buffers."""
    index: Grads = {}
    index_in: dict[str, Grads] = {}
    buffers: dict[At, Grads] = {}
    for key, held in read_tensors(rank_file(directory, rank, ".safetensors")):
        kind, rest = key.split("/", 1)
        short, kind = kind.startswith(STRETCH), kind.removeprefix(STRETCH)
        if kind == INDEX:
            index[rest] = _at_length(rest, held, spec) if short else held
        elif kind == INDEX_IN:
            tier, name = rest.split("/", 1)
            found = _at_length(name, held, spec) if short else held
            index_in.setdefault(tier, {})[name] = found
        else:
            tier, step, name = rest.split("/", 2)
            buffers.setdefault((tier, int(step)), {})[name] = held
    return index, index_in, buffers


def begun_operations(ledger: Sequence[Event]) -> list[Event]:
    """The operations of a ledger, each with whether it ended and the digest of what it gave."""
    ended = {line["done"]: line.get("output") for line in ledger if "done" in line}
    return [
        {**line, "output": ended.get(line["n"]), "ended": line["n"] in ended}
        for line in ledger
        if "n" in line
    ]


def events_by_step(events: Sequence[Event]) -> dict[At, list[Event]]:
    """The operations of each step, in order; those of the launcher are left out."""
    out: dict[At, list[Event]] = {}
    for event in events:
        at = _at(event) if "n" in event else None
        if at is not None:
            out.setdefault(at, []).append(event)
    return out


def _at(event: Event) -> At | None:
    """The tier and step of an operation's label, `structure/0/reduce:mlp@ci`."""
    tier, _, rest = str(event["label"]).partition("/")
    step, _, edge = rest.partition("/")
    return (tier, int(step)) if tier != SETUP and edge and step.isdigit() else None


def _is_meeting(event: Event) -> bool:
    """Whether this is the launcher's wait until all ranks are connected."""
    return str(event["label"]).partition("/")[0] == SETUP and event["op"] == "barrier"


def _is_whole(
    begun: Sequence[Event], info: Mapping[At, Any], result: Mapping[str, Any], spec: RunSpec
) -> bool:
    """Whether every operation is there and ended; a Program says itself which it never waited for.

    A Program may go on communicating after its record was written.
    """
    num = result.get("operations")
    late = spec.facts is not None and num is not None
    counted = [e for e in begun if e["n"] < num] if late else begun
    unwaited = {n for step in info.values() for n in step.get("unwaited", ())}
    return len(counted) == num and all(e["ended"] or e["n"] in unwaited for e in counted)


def _numbers(info: dict[str, Any]) -> dict[str, Any]:
    """What a planned rank says of one step, with numbers as numbers ("nan" too)."""
    return {
        "counts": {str(term): int(count) for term, count in info["counts"].items()},
        "norm": float(info["norm"]),
        "clipped_norm": float(info["clipped_norm"]),
        "weights": str(info["weights"]),
        "digests": [{**digest, "norm": float(digest["norm"])} for digest in info["digests"]],
    }
