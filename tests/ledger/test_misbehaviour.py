"""The process group below a Program: what it wraps, what it changes, what it costs."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from sumgrad.faults.collective import CollectiveFault
from sumgrad.faults.misbehaviour import Misbehaviour
from sumgrad.ledger.delegation import DELEGATED, unrecorded_operations
from sumgrad.ledger.operations import FAMILIES, disagreement_of, group_name
from sumgrad.subjects.exchanges import Exchanges
from sumgrad.topology.pools import parse_topology
from sumgrad.topology.yaml_source import YamlSource


def topology(**pools):
    data = {"name": "t", "workload": "w", "pools": {n: {"axes": a} for n, a in pools.items()}}
    return parse_topology(YamlSource(path=__file__, data=data, lines={}))


def test_every_operation_of_torchs_process_group_is_known():
    """Fails when torch adds a method: record it, or say that it moves no data.

    new_window gives one-sided access to memory and reconfigure other members: a step that calls
    them is UNKNOWN.
    """
    assert unrecorded_operations() <= {"new_window", "reconfigure"}
    assert set(FAMILIES) == set(DELEGATED)


@pytest.mark.parametrize(
    ("ranks", "name"),
    [
        ((0, 3), "dp"),
        ((0, 1, 2), "tp"),
        ((0, 1, 2, 3, 4, 5), "dp+tp"),
        ((0, 4), "0,4"),
        ((2,), "self"),
    ],
)
def test_groups_are_named_by_axes(ranks, name):
    assert group_name(topology(train={"dp": 2, "tp": 3}), ranks) == name


def test_groups_of_several_pools_carry_the_pool():
    two = topology(a={"dp": 3}, b={"dp": 2})
    assert group_name(two, (3, 4)) == "b.dp"
    assert group_name(two, (0, 1, 2, 3, 4)) == "world"
    assert group_name(two, (0, 3)) == "0,3"


def event(n, op="allreduce", numel=3, group=(0, 1), **more):
    base = {"n": n, "label": "s/0/step", "op": op, "group": list(group), "dtype": "float32",
            "numel": numel, "site": "a.py:1"}  # fmt: skip
    return {**base, **more}


def test_disagreements_between_ledgers():
    same = {0: [event(0), event(1)], 1: [event(0), event(1)]}
    assert not list(disagreement_of(same))
    (other,) = disagreement_of({**same, 1: [event(0), event(1, numel=4)]})
    assert other.mismatch
    assert other.number == 1
    (short,) = disagreement_of({**same, 1: [event(0)]})
    assert not short.mismatch
    assert short.absent == (1,)
    sizes = {0: [event(0, op="alltoall_base", numel=3)], 1: [event(0, op="alltoall_base", numel=5)]}
    assert not list(disagreement_of(sizes))  # uneven splits are lawful


# ---- on ranks ------------------------------------------------------------------------------------

SHAPE = {"train": {"dp": 3}}


def faulty(kind: str, call) -> tuple[torch.Tensor, bool]:
    """The result of a collective under a fault, and whether a bit changed."""
    ledger = dist.group.WORLD._ledger
    bad = Misbehaviour(CollectiveFault(kind=kind, target="allreduce@dp"), topology(**SHAPE))
    ledger.interpose = bad
    try:
        with ledger.label("test/0/step"):
            out = call()
    finally:
        ledger.interpose = None
    assert bad.calls == 1
    return out, bad.changed


EXPECTED = {
    "avg": [[2.0] * 3] * 3,
    "skip": [[1.0] * 3, [2.0] * 3, [3.0] * 3],
    "double": [[18.0] * 3] * 3,
    "subgroup": [[3.0] * 3, [3.0] * 3, [3.0] * 3],
    "copy": [[1.0] * 3, [2.0] * 3, [3.0] * 3],
    "missing_wait": [[6.0, 1.0, 1.0], [6.0, 2.0, 2.0], [6.0, 3.0, 3.0]],
    "early": [[3.0] * 3] * 3,
    "low_precision": [[6.0] * 3] * 3,
    "scale_one": [[6.003] * 3] * 3,
}


@pytest.mark.distributed(ranks=3)
@pytest.mark.parametrize("kind", sorted(EXPECTED))
def test_what_each_fault_does_to_an_all_reduce(ranks, kind):
    def call():
        x = torch.full((3,), ranks.rank + 1.0, dtype=torch.float64)
        dist.all_reduce(x)
        return x

    out, changed = faulty(kind, call)
    torch.testing.assert_close(out, torch.tensor(EXPECTED[kind][ranks.rank], dtype=torch.float64))
    assert changed == (kind != "low_precision")


@pytest.mark.distributed(ranks=3)
def test_a_copy_that_is_gathered_leaves_the_others_empty(ranks):
    """Several tensors of one call are not added up by what stands for its ended work."""
    bad = Misbehaviour(CollectiveFault(kind="copy", target="all_gather@dp"), topology(**SHAPE))
    ledger = dist.group.WORLD._ledger
    ledger.interpose = bad
    parts = [torch.full((2,), 7.0) for _ in range(3)]
    with ledger.label("test/0/step"):
        dist.all_gather(parts, torch.full((2,), ranks.rank + 1.0))
    ledger.interpose = None
    own = [[ranks.rank + 1.0] * 2 if i == ranks.rank else [0.0] * 2 for i in range(3)]
    assert [part.tolist() for part in parts] == own


@pytest.mark.distributed(ranks=3)
@pytest.mark.parametrize(("kind", "got"), [("avg", [2, 2, 2]), ("subgroup", [3, 3, 3])])
def test_what_is_observed_is_what_is_carried_out(ranks, kind, got):
    """What goes in is the rank's own, and what comes out is what its buffer then has."""
    ledger = dist.group.WORLD._ledger
    exchanges = Exchanges(ledger, lambda op, args: ({}, None))
    ledger.observe = exchanges.observe
    exchanges.begin_step()
    try:
        faulty(kind, lambda: dist.all_reduce(torch.full((3,), ranks.rank + 1.0)))
    finally:
        ledger.observe = None
    (one,) = exchanges.found
    assert one.given.tolist() == [ranks.rank + 1.0] * 3
    assert one.got.tolist() == [float(got[ranks.rank])] * 3


@pytest.mark.distributed(ranks=3)
def test_a_stale_buffer_adds_what_the_last_rank_sent_before(ranks):
    bad = Misbehaviour(CollectiveFault(kind="stale", target="allreduce@dp"), topology(**SHAPE))
    ledger = dist.group.WORLD._ledger
    ledger.interpose = bad
    got = []
    with ledger.label("test/0/step"):
        for _ in range(2):
            bad.begin_step()
            x = torch.full((2,), ranks.rank + 1.0)
            dist.all_reduce(x)
            got.append(x.tolist())
    ledger.interpose = None
    assert got == [[6.0, 6.0], [9.0, 9.0]]


@pytest.mark.distributed(ranks=2)
def test_messages_in_a_batch_arrive(ranks):
    """torch 2.14 asks the group for its backend first, and 2.15's pipeline what that can do."""
    group, cpu, other = dist.group.WORLD, torch.device("cpu"), 1 - ranks.rank
    backend = group._get_backend(cpu)
    assert backend is group  # nothing goes around the ledger
    assert not backend.supports_coalescing
    assert not backend.supports_splitting
    assert not backend.supports_tensor_alloc(cpu)
    assert backend.options._timeout.total_seconds() > 0
    sent, got = torch.full((2,), ranks.rank + 1.0), torch.zeros(2)
    started = group._ledger.num_operations
    ops = [dist.P2POp(dist.isend, sent, other), dist.P2POp(dist.irecv, got, other)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert got.tolist() == [other + 1.0] * 2
    assert group._ledger.num_operations == started + 2


@pytest.mark.distributed(ranks=3)
def test_one_gathered_tensor_and_a_barrier_without_work(ranks):
    """gather_single, new in torch 2.14, on a backend without it; monitored_barrier gives None."""
    out, options = torch.zeros(3, 2), dist.GatherOptions()
    options.rootRank = 1
    held = torch.full((2,), float(ranks.rank))
    group = dist.group.WORLD
    group.gather_single(out if ranks.rank == 1 else held.new_empty(0), held, options).wait()
    assert out.tolist() == [[r * (ranks.rank == 1)] * 2 for r in range(3)]
    assert group.monitored_barrier() is None
    assert not group._ledger.open_ops


@pytest.mark.distributed(ranks=3)
def test_what_gloo_refuses_is_refused(ranks):
    """torch carries out some collectives by the backend's name, and gloo's way wants rank 0."""
    from torch.distributed.nn import functional

    assert dist.get_backend() is dist.Backend.GLOO
    assert dist.get_backend(dist.group.WORLD) is dist.Backend.GLOO
    dist.monitored_barrier()  # which torch has for gloo alone
    pair = dist.new_group([1, 2])
    held = torch.ones(2, requires_grad=True)
    gathered = torch.stack(functional.all_gather(held))
    gathered.sum().backward()
    assert held.grad.tolist() == [3.0, 3.0]
    if ranks.rank:
        mine = torch.ones(2, requires_grad=True)
        with pytest.raises(ValueError, match="not part of"):
            torch.stack(functional.all_gather(mine, group=pair)).sum().backward()


@pytest.mark.distributed(ranks=3)
def test_recording_costs_little(ranks):
    """An all-reduce through the recording group against one straight on Gloo, side by side."""
    import time

    inner = dist.group.WORLD._inner
    x = torch.ones(4096)

    def seconds(call) -> float:
        best = []
        for _ in range(15):
            dist.barrier()
            started = time.perf_counter()
            for _ in range(10):
                call()
            best.append(time.perf_counter() - started)
        return min(best)

    straight = seconds(lambda: inner.allreduce([x]).wait())
    recorded = seconds(lambda: dist.all_reduce(x))
    assert recorded < 10 * straight  # 1.2 to 2 times is usual; the bound is for a busy machine
