"""Whether all ranks that torchrun started were asked for one check, before any of them runs it.

On several hosts each worker reads its own flags, YAML and code. What they run is put side by side
through the rendezvous store: a host that was started with another seed, or holds an older copy of a
file, is named, and nothing is run.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sumgrad.base.errors import UserError
from sumgrad.launch.torchrun.agent import NotSaid
from sumgrad.record.spec import RunSpec
from sumgrad.subjects.loading import find_class
from sumgrad.topology.pools import topology_to_json

COMPARED = (
    "seed",
    "steps",
    "tiers",
    "skipped",
    "fault",
    "law",
    "kernels",
    "device",
    "lift",
    "timeout_s",
)
MAX_SHOWN = 4
AGREED = "sumgrad/agreed"
SILENT = "silent: "  # before who is
Asked = dict[str, str]


def asked_of(spec: RunSpec) -> Asked:
    """What a rank is to run, in words and digests that can be compared."""
    out = {f"--{name.removesuffix('_s')}": repr(getattr(spec, name)) for name in COMPARED}
    out["--workload"] = Path(spec.workload).name  # hosts may keep it in folders of other names
    out |= {f"version of {name}": value for name, value in spec.versions.items()}
    topology = {**topology_to_json(spec.topology), "workload": None}
    out["topology"] = _digest(json.dumps(topology, sort_keys=True).encode())
    if spec.facts is not None:
        out["parameters"] = _digest(repr(sorted(spec.facts.params.items())).encode())
    for name, content in _sources(spec.workload):
        out[f"source file {name}"] = _digest(content)
    return out


def agree(store: Any, rank: int, world_size: int, asked: Asked) -> None:
    """Compare with all others. UserError on every rank if any of them was asked something else,
    NotSaid on every rank if one says nothing."""
    store.set(f"sumgrad/asked/{rank}", json.dumps(asked))
    if rank == 0:
        try:
            store.set(AGREED, "\n".join(_differences(store, world_size, asked)))
        except NotSaid as silent:
            store.set(AGREED, f"{SILENT}{silent}")
            raise
    text = _told(store)
    if text.startswith(SILENT):
        raise NotSaid(text.removeprefix(SILENT))
    if text:
        raise UserError(text.split("\n"))


def _told(store: Any) -> str:
    """What rank 0 found; it may itself have waited for one that says nothing."""
    for _ in range(2):
        try:
            text: str = store.get(AGREED).decode()
        except NotSaid:
            continue
        return text
    raise NotSaid("rank 0 did not say in time whether all ranks run the same")


def _differences(store: Any, world_size: int, asked: Asked) -> list[str]:
    found = []
    for rank in range(1, world_size):
        try:
            theirs: Asked = json.loads(store.get(f"sumgrad/asked/{rank}"))
        except NotSaid:
            raise NotSaid(f"rank {rank} did not say in time what it runs") from None
        differing = dict(_unlike(asked, theirs))
        if differing:
            shown = "; ".join(f"{name}: {words}" for name, words in list(differing.items())[:3])
            found.append(f"rank {rank} was asked for another check than rank 0: {shown}")
    more = [f"and {len(found) - MAX_SHOWN} more ranks"] if len(found) > MAX_SHOWN else []
    return found[:MAX_SHOWN] + more


def _unlike(mine: Mapping[str, str], theirs: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for name in {**mine, **theirs}:
        if mine.get(name) != theirs.get(name):
            yield name, f"{theirs.get(name, 'not there')} there, {mine.get(name, 'not there')} here"


def _sources(workload: str) -> Iterator[tuple[str, bytes]]:
    """The workload's own file and the modules that it has imported from the same folder."""
    try:
        own = Path(inspect.getfile(find_class(workload, "--workload"))).resolve()
    except (TypeError, UserError):
        return
    folder = own.parent
    files = {own}
    for module in list(sys.modules.values()):
        name = getattr(module, "__file__", None)
        file = Path(name or "")  # torch has modules whose file is a bare name
        if file.suffix == ".py" and file.is_absolute() and folder in file.resolve().parents:
            files.add(file.resolve())
    for file in sorted(files):
        if "site-packages" not in file.relative_to(folder).parts:
            yield str(file.relative_to(folder)), file.read_bytes()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
