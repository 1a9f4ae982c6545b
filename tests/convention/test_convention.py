"""The convention on real ranks: what each function promises, and that its wrong twin breaks it."""

from __future__ import annotations

import contextlib

import pytest

pytestmark = pytest.mark.distributed


def tensors(ranks, *shapes):
    import torch

    generator = torch.Generator().manual_seed(ranks.rank)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


@pytest.mark.distributed(ranks=3)
def test_sum_reduce(ranks):
    import torch
    from sumgrad.convention import sum_reduce_

    mine = tensors(ranks, (2, 3), (5,), ())
    mine.append(mine[0].T.clone().T)  # not contiguous
    mine.append(torch.full((4,), ranks.rank + 1, dtype=torch.bfloat16))
    wanted = [x.clone() for x in mine]
    gathered = [[torch.zeros_like(w.contiguous()) for _ in range(3)] for w in wanted]
    for into, w in zip(gathered, wanted, strict=True):
        torch.distributed.all_gather(into, w.contiguous())
    sum_reduce_(mine)
    for got, parts in zip(mine, gathered, strict=True):
        torch.testing.assert_close(got, sum(parts), rtol=1e-12, atol=1e-12)


@pytest.mark.distributed(ranks=3)
def test_sum_reduce_gradients_takes_parameters_without_a_gradient(ranks):
    import torch
    from sumgrad.convention import sum_reduce_gradients

    used, unused, frozen = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
    frozen.requires_grad_(False)
    if ranks.rank != 1:  # a rank without work still joins
        used.grad = torch.full((2,), float(ranks.rank + 1))
    sum_reduce_gradients([used, unused, frozen])
    assert used.grad.tolist() == [4.0, 4.0]
    assert unused.grad.tolist() == [0.0, 0.0]
    assert frozen.grad is None


@pytest.mark.distributed(ranks=3)
@pytest.mark.parametrize("over", [None, (0, 2)])
def test_ddp_sums_with_the_hook(ranks, over):
    import torch
    import torch.distributed as dist
    from sumgrad.convention import ddp_sum_hook
    from torch.nn.parallel import DistributedDataParallel

    group = dist.new_group(over) if over else None
    if over and ranks.rank not in over:
        return
    model = torch.nn.Linear(2, 1, bias=False)
    ddp = DistributedDataParallel(model, process_group=group)
    ddp.register_comm_hook(group, ddp_sum_hook)
    ddp(torch.full((1, 2), 10.0**ranks.rank)).sum().backward()
    assert model.weight.grad.tolist() == [[101.0 if over else 111.0] * 2]


@pytest.mark.distributed(ranks=3)
@pytest.mark.parametrize("count", [0, 1, 2**53 + 1])
def test_global_count_is_exact(ranks, count):
    from sumgrad.convention import global_count

    assert global_count(count + ranks.rank) == 3 * count + 3


@pytest.mark.distributed(ranks=2)
@pytest.mark.parametrize("count", [-1, 1.5, True, float("nan")])
def test_global_count_refuses_what_is_no_count(ranks, count):
    from sumgrad.convention import global_count

    with pytest.raises(ValueError, match="expected an integer"):
        global_count(count)


@pytest.mark.distributed(ranks=4)
def test_contribute_once(ranks):
    import torch
    from sumgrad.convention import contribute_once, is_leader, sum_reduce_gradients

    weight = torch.nn.Parameter(torch.tensor([2.0, 3.0]))
    loss = contribute_once(weight.square().sum())
    if loss.requires_grad:
        loss.backward()
    assert loss.requires_grad == is_leader() == (ranks.rank == 0)
    sum_reduce_gradients([weight])
    assert weight.grad.tolist() == [4.0, 6.0]
    weight.grad = None  # the fault: everybody adds it
    weight.square().sum().backward()
    sum_reduce_gradients([weight])
    assert weight.grad.tolist() == [16.0, 24.0]


@pytest.mark.distributed(ranks=3)
def test_global_residual_is_the_global_value_with_the_local_gradient(ranks):
    import torch
    from sumgrad.convention import global_residual, sum_reduce_gradients

    rows = torch.arange(6, dtype=torch.float64).reshape(3, 2) + 1

    def statistic(weight, chosen):
        return (chosen * weight).square().sum(0)

    def loss(total):
        return (total * torch.log2(1 + total)).sum()

    alone = torch.nn.Parameter(torch.tensor([0.5, -0.3], dtype=torch.float64))
    loss(statistic(alone, rows)).backward()
    weight = torch.nn.Parameter(alone.detach().clone())
    total = global_residual(statistic(weight, rows[ranks.rank : ranks.rank + 1]))
    torch.testing.assert_close(total, statistic(weight, rows), rtol=1e-14, atol=0)
    loss(total).backward()
    sum_reduce_gradients([weight])
    torch.testing.assert_close(weight.grad, alone.grad, rtol=1e-14, atol=0)
    weight.grad = None  # the fault: the rank's own sum
    loss(statistic(weight, rows[ranks.rank : ranks.rank + 1])).backward()
    sum_reduce_gradients([weight])
    assert not torch.allclose(weight.grad, alone.grad, rtol=1e-2)


@pytest.mark.distributed(ranks=3)
def test_norm_counts_replicas_once_and_shards_always(ranks):
    import torch
    import torch.distributed as dist
    from sumgrad.convention import clip_by_global_norm_, global_grad_norm

    replicated = torch.tensor([3.0, 4.0])
    shard = torch.tensor([float(ranks.rank)], dtype=torch.float64)
    own = dist.new_group([ranks.rank], use_local_synchronization=True)
    norm = global_grad_norm([(replicated, None), (shard, own), (None, None), (shard, ())])
    assert float(norm) == pytest.approx((25 + 2 * (0 + 1 + 4)) ** 0.5, rel=1e-15)
    grads = [replicated, shard]
    factor = clip_by_global_norm_(grads, norm=norm, max_norm=1.0)
    assert float(factor) == pytest.approx(1 / (35**0.5 + 1e-6), rel=1e-12)
    assert replicated.tolist() == pytest.approx([3 * float(factor), 4 * float(factor)], rel=1e-6)
    assert float(clip_by_global_norm_(grads, norm=torch.tensor(0.5), max_norm=1.0)) == 1.0
    with pytest.raises(ValueError, match="max_norm"):
        clip_by_global_norm_(grads, norm=norm, max_norm=0)
    nan = global_grad_norm([(torch.tensor([float("nan")]), None)])
    assert torch.isnan(nan)


@pytest.mark.distributed(ranks=4)
def test_norm_of_dtensors(ranks):
    import torch
    from sumgrad.convention import global_grad_norm
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    full = torch.arange(12, dtype=torch.float64).reshape(6, 2)
    for placements in (
        [Replicate(), Shard(0)],
        [Replicate(), Replicate()],
        [Shard(0), Shard(1)],
        [Shard(0), Replicate()],
    ):
        grad = distribute_tensor(full, mesh, placements)
        norm = global_grad_norm([(grad, ())])
        assert float(norm) == pytest.approx(float(full.norm()), rel=1e-14), placements
    from torch.distributed.tensor import DTensor

    partial = DTensor.from_local(full, mesh, [Partial(), Replicate()])
    with pytest.raises(ValueError, match="fully reduced"):
        global_grad_norm([(partial, ())])


@pytest.mark.distributed(ranks=4)
def test_reduction_of_shards_and_replicas(ranks):
    """HSDP: shards over one axis, replicas over the other; the sum runs over the replicas."""
    import torch
    from sumgrad.convention import sum_reduce_gradients
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    full = torch.arange(10, dtype=torch.float64).reshape(5, 2)
    weight = torch.nn.Parameter(distribute_tensor(full, mesh, [Replicate(), Shard(0)]))
    weight.grad = distribute_tensor(full, mesh, [Replicate(), Shard(0)])
    local = weight.grad.to_local().clone()
    sum_reduce_gradients([weight], group=mesh.get_group("replica"))
    torch.testing.assert_close(weight.grad.to_local(), 2 * local, rtol=0, atol=0)


@pytest.mark.distributed(ranks=3)
def test_messages_of_any_order_arrive(ranks):
    import torch
    from sumgrad.subjects.planned.exchange import Parcel, exchange

    def parcel(edge, peer, payload):
        return Parcel(edge=edge, peer=peer, a=0, b=2, tag=5, payload=payload)

    others = [r for r in range(3) if r != ranks.rank]
    receives = [parcel("to", r, torch.full((4,), float("nan"))) for r in others]
    sends = [parcel("to", r, torch.full((4,), float(ranks.rank))) for r in others]
    exchange(sends, receives)
    assert [r.payload.tolist() for r in receives] == [[float(r)] * 4 for r in others]


@pytest.mark.distributed(ranks=2)
@pytest.mark.parametrize(("numel", "edge"), [(3, "a"), (5, "a"), (4, "b")])
def test_messages_of_another_size_or_edge_are_refused(ranks, numel, edge):
    import torch
    from sumgrad.subjects.planned.exchange import MessageError, Parcel, exchange

    if ranks.rank == 0:
        payload = torch.ones(numel)
        sent = Parcel(edge=edge, peer=1, a=0, b=1, tag=3, payload=payload)
        with contextlib.suppress(RuntimeError):  # the other rank refuses, and may be gone by then
            exchange([sent], [])
    else:
        wanted = Parcel(edge="a", peer=0, a=0, b=1, tag=3, payload=torch.zeros(4))
        with pytest.raises(MessageError, match="rank 0 sent the header"):
            exchange([], [wanted])
