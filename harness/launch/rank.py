"""What one rank does in a check, and what its reference's process does, under either launcher."""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from sumgrad.base.memory import keep_freed_memory
from sumgrad.base.outcome import SETUP
from sumgrad.launch.guard import HELPERS, RankGuard
from sumgrad.launch.room import have_room
from sumgrad.ledger.process_group import BACKEND, Ledger, register_backend
from sumgrad.record.bits import BITS, write_bits
from sumgrad.record.ranks import RankFiles
from sumgrad.record.reference import write_reference
from sumgrad.record.spec import RunSpec, read_spec
from sumgrad.subjects.subject import subject_of

PROGRESS = ".progress"
FIRST_PORT, NUM_PORTS = 20_000, 10_000  # below those that a system gives away
GROUP_PATIENCE_S = 60  # the watchdog speaks first; the group's own timeout is a last resort


def check_rank(guard: RankGuard) -> dict[str, Any]:
    """A locally started rank: rendezvous by file, then the run that run.json describes."""
    spec = read_spec(guard.env.directory)
    if have_room(spec, guard.env.world_size):
        keep_freed_memory()
    with local_group(guard, spec.device) as ledger:
        return run_rank(guard, spec, ledger)


@contextmanager
def local_group(guard: RankGuard, device: str = "cpu") -> Iterator[Ledger]:
    """The recorded default group of a locally started rank, all ranks connected."""
    env, ledger = guard.env, start_ledger(guard, device)
    # Libraries ask the environment, as torchrun sets it, whether they are one process of several.
    os.environ.update({name: str(env.rank) for name in ("RANK", "LOCAL_RANK")})
    os.environ.update({name: str(env.world_size) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")})
    # Nothing of ours listens there: the same on all ranks, for what a step opens itself.
    port = FIRST_PORT + zlib.crc32(str(env.rendezvous).encode()) % NUM_PORTS
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    dist.init_process_group(
        BACKEND,
        store=dist.FileStore(str(env.rendezvous), env.world_size),  # type: ignore[attr-defined]
        rank=env.rank,
        world_size=env.world_size,
        timeout=timedelta(seconds=env.timeout_s + GROUP_PATIENCE_S),
    )
    try:
        meet(ledger)
        yield ledger
    finally:
        if dist.is_initialized():  # a step that has ended it is told of by what it could not do
            dist.destroy_process_group()


def meet(ledger: Ledger) -> None:
    """Wait until all are connected: a rank that fails at once must not look like a lost one."""
    with ledger.label(SETUP):
        dist.barrier()


def start_ledger(guard: RankGuard, device: str = "cpu") -> Ledger:
    """Open this rank's ledger and make the recording backend known. device: of the ranks."""
    guard.ledger = Ledger(guard.env.file(".ledger.jsonl"))
    register_backend(guard.ledger, nccl=device == "cuda")
    return guard.ledger


def run_rank(guard: RankGuard, spec: RunSpec, ledger: Ledger) -> dict[str, Any]:
    """Run all tiers and steps on an initialised default group; write this rank's gradients.

    Returns what goes into the rank's end record.
    """
    rank = guard.env.rank
    files = RankFiles(guard.env.directory, rank)
    result = subject_of(spec).run_rank(rank, ledger, files)
    return {**result, "grads": files.finish()}


def reference_helper(guard: RankGuard, *, piece: str) -> None:
    """One piece of the reference, in a process beside the ranks."""
    directory, said = guard.env.directory.parent, guard.env.file(PROGRESS)
    spec = read_spec(directory)
    if have_room(spec, spec.steps):
        keep_freed_memory()
    try:
        store_reference(directory, spec, piece, progress=said.write_text)
    finally:
        said.unlink(missing_ok=True)


def reference_progress(directory: Path) -> list[str]:
    """What the processes that compute the reference are at."""
    lines = []
    for path in sorted((directory / HELPERS / "ranks").glob(f"*{PROGRESS}")):
        with contextlib.suppress(OSError):  # it has just ended
            lines.append(path.read_text())
    return lines


def store_reference(
    directory: Path,
    spec: RunSpec,
    piece: str,
    *,
    progress: Callable[[str], object] = lambda _: None,
) -> None:
    """Compute and write one piece of the reference."""
    if piece == f"tier {BITS}":
        progress("the bits of one process")
        for step, tensors, problems in subject_of(spec).bits():
            write_bits(directory, step, tensors, problems)
        return
    shared: dict[int, str] = {}
    for tier, reference in list(subject_of(spec).references(piece, progress=progress)):
        write_reference(directory, tier, reference, shared=shared)
