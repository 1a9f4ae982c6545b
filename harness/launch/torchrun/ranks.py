"""The check under torchrun: every rank runs this; the ranks agree on what and where.

They find the run directory through the rendezvous store; where a rank cannot see it (another
machine, no shared disk), it has one of its own.
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from sumgrad.base.commands import torchrun_prefix
from sumgrad.base.errors import UserError
from sumgrad.base.files import write_json
from sumgrad.launch.ask import CheckOptions, make_directory, make_spec, torchrun_command
from sumgrad.launch.guard import RankEnv
from sumgrad.launch.torchrun.agent import NotSaid, Store, StoreGone
from sumgrad.launch.torchrun.agreement import agree, asked_of
from sumgrad.launch.torchrun.member import Member, Progress, Report, alone, ended_unknown
from sumgrad.record.spec import RunSpec, write_spec
from sumgrad.topology.pools import load_topology


def under_torchrun() -> bool:
    """Whether torchrun (or anything that sets the same variables) started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def run_torchrun_rank(
    options: CheckOptions, *, report: Report, progress: Progress = lambda _: None
) -> int:
    """Run this rank, judge if it is this rank's turn, and return the process's exit code.

    report: called by the judging rank with the verdict and its directory. progress: called by
    every rank with what it is doing.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    check_world_size(options, world_size)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    spec = make_spec(options, prefix=[*torchrun_prefix(world_size), "--topology"])
    wait = timedelta(seconds=options.timeout_s)
    try:
        store, _, _ = next(iter(dist.rendezvous("env://", timeout=wait)))  # type: ignore[attr-defined]
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        ended_unknown(
            f"rank {rank} on {socket.gethostname()} did not reach {address}, where the ranks meet: "
            f"{str(error).splitlines()[0]}"
        )
    store.set_timeout(wait)
    kept = Store(store, seconds=options.timeout_s)
    try:
        agree(kept, rank, world_size, asked_of(spec))
        directory, shared = _agree_on_directory(kept, rank, options, spec)
    except StoreGone as gone:
        alone(f"{gone}, while the ranks agreed on what to run")
    except NotSaid as silent:
        if rank == 0:
            time.sleep(
                1
            )  # whoever else waits hears it, before the store ends with this host's agent
        ended_unknown(f"{silent}; rank {rank} has waited for it" if rank else str(silent))
    env = RankEnv(
        rank=rank,
        world_size=world_size,
        directory=directory,
        rendezvous=directory,
        timeout_s=options.timeout_s,
    )
    member = Member(env, spec, kept, shared=shared, report=report, progress=progress)
    return member.run(dist.PrefixStore("sumgrad/group", store))  # type: ignore[attr-defined]


def check_world_size(options: CheckOptions, world_size: int) -> None:
    """UserError with the right command line if torchrun started another number of ranks."""
    topology = load_topology(options.topology)
    if topology.world_size != world_size:
        raise UserError(
            f"{options.topology}: got {world_size} ranks from torchrun, expected "
            f"{topology.world_size}; the right command is\n  "
            + torchrun_command(topology, options.topology)
        )


def _agree_on_directory(
    store: Store, rank: int, options: CheckOptions, spec: RunSpec
) -> tuple[Path, bool]:
    """Rank 0 makes it; the others see it, or get a local one of their own."""
    key = "sumgrad/directory"
    if rank == 0:
        try:
            directory = make_directory(options, spec.topology.name).resolve()
            write_spec(directory, spec)
        except UserError as error:
            store.set(key, "!" + str(error))
            raise
        write_json(directory / "ranks" / "token.json", {"host": socket.gethostname()})
        store.set(key, str(directory))
        return directory, True
    text = store.get(key).decode()
    if text.startswith("!"):
        raise UserError(text[1:])
    directory = Path(text)
    if sees(directory):
        return directory, True
    local = make_directory(replace(options, out=None), spec.topology.name).resolve()
    write_spec(local, spec)
    return local, False


def sees(directory: Path) -> bool:
    """Whether this rank shares rank 0's run directory."""
    return (directory / "ranks" / "token.json").exists()
