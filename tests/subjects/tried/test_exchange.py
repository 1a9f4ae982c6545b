"""Operations of real ranks through memory: what they give is what Gloo gives."""

from __future__ import annotations

import json

import pytest
from sumgrad.launch.local.launcher import RankJob

pytestmark = pytest.mark.distributed
RANKS = 3
# Whether small operations may go by memory, and whether the step is known to end: then none does.
WAYS = ((False, False), (True, False), (True, False), (True, True))


def both_ways(guard):
    """Each step by Gloo, by memory, and so again; and how often Gloo carried something out."""
    import torch
    from sumgrad.launch.rank import local_group
    from sumgrad.subjects.program.tried.board import Board
    from sumgrad.subjects.program.tried.exchange import Exchange
    from sumgrad.subjects.program.tried.rendezvous import Rendezvous

    torch.set_num_threads(1)
    env, told = guard.env, {}
    with local_group(guard) as ledger:
        place = env.rendezvous
        board = Board(place.with_name("board"), env.rank, RANKS)
        exchange = Exchange(place.with_name("exchange"), env.rank, RANKS)
        own = Rendezvous(board, env.rank, exchange)
        own.patience_s = 20.0
        for name, step in steps(env.rank).items():
            gave, carried = [], []
            for own.by_memory, as_it_is in WAYS:
                gloo = counted(ledger)
                try:
                    with own.round(as_it_is=as_it_is) as through, ledger.label("structure/0/step"):
                        ledger.interpose = through
                        gave.append(listed(step()))
                except RuntimeError as error:
                    gave.append(str(error).splitlines()[0])
                finally:
                    ledger.interpose = None
                carried.append(gloo())
                barrier(ledger)
            told[name] = gave, carried
    (env.directory / f"told{env.rank}").write_text(json.dumps(told))


def barrier(ledger):
    import torch.distributed as dist

    with ledger.label("0/setup"):
        dist.barrier()


def counted(ledger):
    """How often something was carried out below a group since."""
    from sumgrad.ledger import backends

    kept, times = backends.carry_out, []

    def carry_out(*args):
        times.append(args)
        return kept(*args)

    backends.carry_out = carry_out

    def end():
        backends.carry_out = kept
        return len(times)

    return end


def listed(value):
    if isinstance(value, list | tuple):
        return [listed(one) for one in value]
    return [str(value.dtype), [*value.shape], value.double().reshape(-1).tolist()]


def steps(rank):
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    some = [dist.new_group([0, 2]), dist.new_group([1, 2])]
    every = dist.new_group([0, 1, 2])

    def numbers(*shape, dtype=torch.float64):
        seeded = torch.Generator().manual_seed(rank + 7)
        return (10 * torch.randn(*shape, generator=seeded, dtype=torch.float64)).to(dtype)

    def reduced(op=dist.ReduceOp.SUM, dtype=torch.float64, group=None):
        x = numbers(4, 3, dtype=dtype).t()  # not contiguous
        dist.all_reduce(x, op=op, group=group)
        return x

    def later():
        x, y = numbers(5), numbers(5)
        works = [dist.all_reduce(x, async_op=True), dist.all_reduce(y, async_op=True)]
        before = x.clone()
        for work in works[::-1]:
            work.wait()
        return before * 0, x, y

    def gathered():
        into, out = [torch.zeros(2, 2) for _ in range(RANKS)], torch.zeros(6, 2)
        dist.all_gather(into, numbers(2, 2).float())
        dist.all_gather_into_tensor(out, numbers(2, 2).float())
        return into, out

    def scattered():
        one, two = torch.zeros(2).double(), torch.zeros(2, 3).double()
        dist.reduce_scatter(one, [numbers(2) * i for i in range(RANKS)])
        dist.reduce_scatter_tensor(two, numbers(6, 3), op=dist.ReduceOp.MAX)
        return one, two

    def exchanged():
        sent = [rank + 1, 0, 2]
        taken = [[1, 2, 3], [0, 0, 0], [2, 2, 2]][rank]
        out = torch.zeros(sum(taken), 2).double()
        dist.all_to_all_single(out, numbers(sum(sent), 2), taken, sent)
        equal = torch.zeros(6).double()
        dist.all_to_all_single(equal, numbers(6))
        return out, equal

    def broadcast():
        flags, x = numbers(4) > 0, numbers(2, 2)
        dist.broadcast(flags, 1)
        dist.broadcast(x, 2, group=every)
        dist.barrier()
        return flags, x

    def in_groups():
        x, y = numbers(3), numbers(3)
        if rank != 1:
            dist.all_reduce(x, group=some[0])
        if rank != 0:
            dist.all_reduce(y, group=some[1])
            dist.broadcast(y, 2, group=some[1])
        for _ in range(5):
            dist.all_reduce(x, group=every)
        return x, y

    def large():
        x = numbers(1 << 15)
        dist.all_reduce(x)
        return x[:3]

    def unlike():
        """One rank brings too much: then all do it as ever."""
        sizes = [1 << 15 if rank == 0 else 2, 1, 1]
        taken = [1 << 15, 2, 2] if rank == 0 else [1, 1, 1]
        out = torch.zeros(sum(taken)).double()
        dist.all_to_all_single(out, numbers(sum(sizes)), taken, sizes)
        return out[-3:]

    after, before = (rank + 1) % RANKS, (rank - 1) % RANKS

    def passed_on(times=3, size=5, dtype=torch.float64):
        """Round the ring, all that are sent begun before any is waited for."""
        held = [numbers(size, dtype=dtype) + i for i in range(times)]
        got = [torch.zeros_like(one) for one in held]
        works = [dist.irecv(one, before, tag=i % 2) for i, one in enumerate(got)]
        works += [dist.isend(one, after, tag=i % 2) for i, one in enumerate(held)]
        for work in works[::-1]:
            work.wait()
        return [one[-3:] for one in got]

    def in_a_batch():
        one, two = torch.zeros(2, 3).double(), torch.zeros(4, dtype=torch.int64)
        every = [dist.P2POp(dist.isend, numbers(2, 3), after),
                 dist.P2POp(dist.irecv, one, before),
                 dist.P2POp(dist.isend, numbers(4, dtype=torch.int64), before, tag=1),
                 dist.P2POp(dist.irecv, two, after, tag=1)]  # fmt: skip
        for work in dist.batch_isend_irecv(every):
            work.wait()
        return one, two

    def in_turn():
        """What is made of what was received is sent on; nothing is sent as nothing."""
        x, nothing = numbers(3), torch.zeros(0).double()
        if rank:
            dist.recv(x, rank - 1)
            dist.recv(nothing, rank - 1)
        if rank + 1 < RANKS:
            dist.send(x * 2, rank + 1)
            dist.send(nothing, rank + 1)
        return x, nothing

    def ddp():
        torch.manual_seed(3)
        model = DistributedDataParallel(nn.Linear(3, 2).double())
        model(numbers(4, 3)).square().sum().backward()
        return [p.grad for p in model.parameters()]

    def fsdp():
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        torch.manual_seed(3)
        model = fully_shard(nn.Linear(3, 2).double(), mesh=init_device_mesh("cpu", (RANKS,)))
        model.set_force_sum_reduction_for_comms(True)
        model.set_gradient_divide_factor(1.0)
        model(numbers(4, 3)).square().sum().backward()
        return [p.grad.to_local() for p in model.parameters()]

    op = dist.ReduceOp
    return {
        "sum": reduced, "max": lambda: reduced(op.MAX), "min": lambda: reduced(op.MIN),
        "product": lambda: reduced(op.PRODUCT), "whole": lambda: reduced(dtype=torch.int64),
        "float32": lambda: reduced(dtype=torch.float32),
        "bfloat16": lambda: reduced(dtype=torch.bfloat16), "average": lambda: reduced(op.AVG),
        "later": later, "gathered": gathered, "scattered": scattered, "exchanged": exchanged,
        "broadcast": broadcast, "groups": in_groups, "large": large, "unlike": unlike,
        "ddp": ddp, "fsdp": fsdp, "passed on": passed_on, "in a batch": in_a_batch,
        "in turn": in_turn, "passed in bfloat16": lambda: passed_on(dtype=torch.bfloat16),
        "many passed on": lambda: passed_on(40), "much passed on": lambda: passed_on(2, 1 << 19),
    }  # fmt: skip


BY_GLOO = {"bfloat16", "average", "large", "unlike", "much passed on"}  # as ever
# Of two ways of 20 each the first 16 that are sent and taken go by memory.
MANY, LATER = "many passed on", 2 * 2 * (20 - 16)


def test_what_memory_gives_is_what_gloo_gives(sumgrad_launcher, tmp_path):
    job = RankJob(target=f"{__file__}:both_ways", num_ranks=RANKS, directory=tmp_path,
                  timeout_s=90.0)  # fmt: skip
    outcomes = sumgrad_launcher.run(job)
    assert [outcome.status for outcome in outcomes] == ["ok"] * RANKS, outcomes
    for rank in range(RANKS):
        told = json.loads((tmp_path / f"told{rank}").read_text())
        for name, ((gloo, *by_memory), (often, *less, as_it_is)) in told.items():
            assert as_it_is == often > 0, name
            assert isinstance(gloo, list), gloo
            by_gloo = LATER if name == MANY else often if name in BY_GLOO else 0
            assert set(less) == {by_gloo}, (name, less)
            for one in by_memory:
                assert_alike(gloo, one, f"{name} on rank {rank}")


def assert_alike(gloo, one, where):
    if isinstance(gloo[0], str):
        assert gloo[:2] == one[:2], where
        assert one[2] == pytest.approx(gloo[2], rel=1e-5 if "32" in gloo[0] else 1e-12), where
        return
    assert len(gloo) == len(one), where
    for a, b in zip(gloo, one, strict=True):
        assert_alike(a, b, where)
