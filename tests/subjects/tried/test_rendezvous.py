"""The rendezvous of real ranks over Gloo: one leaves, the others too, and they go on together."""

from __future__ import annotations

import json

import pytest
from sumgrad.launch.local.launcher import RankJob

pytestmark = pytest.mark.distributed


def rounds(guard):
    """Three steps; the second of them rank 1 leaves, each time before something else."""
    from sumgrad.launch.rank import local_group
    from sumgrad.subjects.program.tried.board import Board
    from sumgrad.subjects.program.tried.rendezvous import Rendezvous

    env, told = guard.env, []
    with local_group(guard) as ledger:
        board = Board(env.rendezvous.with_name("board"), env.rank, env.world_size)
        own = Rendezvous(board, env.rank)
        own.patience_s = 20.0
        for leaves in (None, "ring", None, "sum", None):
            told.append(one_round(own, ledger, env, leaves))
            guard_all_are_here(ledger)
    (env.directory / f"told{env.rank}").write_text(json.dumps(told))


def guard_all_are_here(ledger):
    import torch.distributed as dist

    with ledger.label("0/setup"):
        dist.barrier()


def one_round(own, ledger, env, leaves):
    from sumgrad.subjects.program.tried.rendezvous import Parted

    try:
        with own.round(as_it_is=leaves is None) as through, ledger.label("structure/0/step"):
            ledger.interpose = through
            return step(env.rank, env.world_size, leaves if env.rank == 1 else None)
    except (Parted, KeyError) as error:
        return type(error).__name__
    finally:
        ledger.interpose = None


def step(rank, size, leaves):
    """What comes around a ring, in which both ways are waited for in either order, and its sum."""
    import torch
    import torch.distributed as dist

    if leaves == "ring":
        raise KeyError
    x, y = torch.full((3,), float(rank)), torch.zeros(3)
    works = [dist.isend(x, (rank + 1) % size), dist.irecv(y, (rank - 1) % size)]
    for work in works if rank % 2 else works[::-1]:
        work.wait()
    if leaves == "sum":
        raise KeyError
    dist.all_reduce(y)
    if rank == 0:
        dist.send(y, 2)
    elif rank == 2:
        dist.recv(y, 0)
    return y.tolist()


def test_ranks_that_part_go_on_together(sumgrad_launcher, tmp_path):
    job = RankJob(target=f"{__file__}:rounds", num_ranks=3, directory=tmp_path, timeout_s=60.0)
    outcomes = sumgrad_launcher.run(job)
    assert [outcome.status for outcome in outcomes] == ["ok"] * 3, outcomes
    told = [json.loads((tmp_path / f"told{rank}").read_text()) for rank in range(3)]
    right, parted = [3.0] * 3, ["Parted", "KeyError", "Parted"]
    assert [*zip(*told, strict=True)] == [
        (right,) * 3, tuple(parted), (right,) * 3, tuple(parted), (right,) * 3
    ]  # fmt: skip
