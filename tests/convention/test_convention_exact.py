"""The convention's functions in one process: what they give to a collective and take from it.

The other rank of each group is played: its all_reduce adds what that rank would have sent.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from sumgrad import convention
from torch.distributed.tensor import Partial, Replicate, Shard


@pytest.fixture
def other(monkeypatch):
    """`other.sends`: what the other rank adds, call by call; `other.calls`: what was asked."""
    played = SimpleNamespace(calls=[], sends=lambda sent: sent.clone(), rank={})

    def all_reduce(tensor, op=None, group=None):
        played.calls.append((tensor.detach().clone(), op, group))
        tensor.add_(played.sends(tensor))

    monkeypatch.setattr(convention.dist, "all_reduce", all_reduce)
    monkeypatch.setattr(convention.dist, "get_rank", lambda group=None: played.rank.get(group, 0))
    return played


def test_sum_reduce_sends_one_flat_tensor_for_each_dtype_and_writes_the_sums_back(other):
    other.sends = lambda sent: torch.arange(sent.numel()).to(sent.dtype) + 1
    a = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)
    b = torch.tensor([10.0, 20.0], dtype=torch.bfloat16)
    c = torch.tensor(5.0, dtype=torch.float64, requires_grad=True)
    turned = torch.zeros(3, 2, dtype=torch.bfloat16).T
    convention.sum_reduce_([a, b, c, turned], group="g")
    assert [(sent.tolist(), op, group) for sent, op, group in other.calls] == [
        ([1, 2, 3, 4, 5], torch.distributed.ReduceOp.SUM, "g"),
        ([10, 20, 0, 0, 0, 0, 0, 0], torch.distributed.ReduceOp.SUM, "g"),
    ]
    assert a.tolist() == [[2, 4], [6, 8]]
    assert c.item() == 10
    assert b.tolist() == [11, 22]
    assert turned.tolist() == [[3, 4, 5], [6, 7, 8]]
    convention.sum_reduce_([])
    assert len(other.calls) == 2


def test_a_sum_over_ranks_is_a_new_tensor(other):
    mine = torch.tensor([1.0, 2.0], requires_grad=True)
    total = convention.sum_over_ranks(mine, "g")
    assert total.tolist() == [2, 4]
    assert mine.tolist() == [1, 2]
    assert not total.requires_grad
    assert other.calls[0][1:] == (torch.distributed.ReduceOp.SUM, "g")


def test_every_trained_parameter_takes_part(other):
    used, unused, frozen = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
    frozen.requires_grad_(False)
    used.grad = torch.tensor([1.0, 2.0])
    convention.sum_reduce_gradients([frozen, used, unused], group="g")
    ((sent, _, group),) = other.calls
    assert sent.tolist() == [1, 2, 0, 0]
    assert group == "g"
    assert (used.grad.tolist(), unused.grad.tolist(), frozen.grad) == ([2, 4], [0, 0], None)


def test_counts_are_integers_of_any_size_and_nothing_else(other):
    other.sends = torch.ones_like
    assert convention.global_count(2**53, group="g") == 2**53 + 1
    assert convention.global_count(0) == 1
    assert convention.global_count(3.0) == 4
    sent, op, group = other.calls[0]
    assert (sent.dtype, op, group) == (torch.int64, torch.distributed.ReduceOp.SUM, "g")
    for wrong in (-1, 1.5, True, math.nan):
        with pytest.raises(ValueError, match="expected an integer >= 0"):
            convention.global_count(wrong)
    assert len(other.calls) == 3


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_replicated_contribution_is_the_leaders(other, rank):
    other.rank = {"g": rank, None: 7}
    weight = torch.tensor(3.0, requires_grad=True)
    loss = convention.contribute_once(weight * weight, group="g")
    assert convention.is_leader("g") == (rank == 0)
    assert not convention.is_leader()
    assert loss.item() == (9 if rank == 0 else 0)
    assert loss.requires_grad == (rank == 0)


def test_a_residual_has_the_global_value_and_the_local_gradient(other):
    other.sends = lambda sent: torch.tensor([10.0, 20.0], dtype=sent.dtype)
    local = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    own = 3 * local
    total = convention.global_residual(own, group="g")
    assert own.tolist() == [3, 6]
    assert total.tolist() == [13, 26]
    assert other.calls[0][1:] == (torch.distributed.ReduceOp.SUM, "g")
    (slope,) = torch.autograd.grad((total * total).sum(), local)
    assert slope.tolist() == [2 * 13 * 3, 2 * 26 * 3]


def dtensor(local, placements, coordinate):
    """What global_grad_norm reads of a DTensor."""
    mesh = SimpleNamespace(get_coordinate=lambda: coordinate)
    return SimpleNamespace(device_mesh=mesh, placements=placements, to_local=lambda: local)


def test_norms_count_the_leaders_part_and_shards_once(other):
    other.rank = {"leads": 0, "follows": 1}
    other.sends = lambda sent: torch.full_like(sent, 16.0)
    three, four = torch.tensor([3.0]), torch.tensor([4.0], dtype=torch.float64)
    norm = convention.global_grad_norm([(three, "leads"), (None, "leads")], group="all")
    assert (norm.item(), norm.dtype) == (5, torch.float64)
    assert other.calls[0][2] == "all"
    assert other.calls[0][1] == torch.distributed.ReduceOp.SUM

    def counted(*grads):
        convention.global_grad_norm(grads)
        return other.calls[-1][0].item()

    assert counted((three, "leads"), (four, "leads")) == 25
    assert counted((three, "follows"), (four, "leads")) == 16
    assert counted((three, ["leads", "leads"]), (four, ("leads", "follows"))) == 9
    assert counted((three, []), (four, None)) == 25
    assert counted((torch.tensor([math.nan]), [])) != counted((three, []))
    half = torch.full((3,), 300.0, dtype=torch.float16)  # its square is no float16
    assert counted((half, [])) == 270000
    wide = torch.tensor([1e-200], dtype=torch.float64)  # nor is this one a float32
    assert counted((wide, [])) == 0
    assert counted((torch.tensor([1e30], dtype=torch.float64), [])) == pytest.approx(1e60)


def test_of_a_dtensor_the_first_coordinate_of_each_replicated_axis_counts(other):
    def counted(placements, coordinate):
        grad = dtensor(torch.tensor([3.0]), placements, coordinate)
        convention.global_grad_norm([(grad, [])])
        return other.calls[-1][0].item() == 9

    assert counted([Replicate(), Shard(0)], (0, 1))
    assert not counted([Replicate(), Shard(0)], (1, 0))
    assert not counted([Shard(0), Replicate()], (0, 1))
    assert counted([Shard(0), Replicate()], (1, 0))
    assert not counted([Shard(0)], None)
    with pytest.raises(ValueError, match="expected a fully reduced one"):
        counted([Shard(0), Partial()], (0, 0))


def test_clipping_scales_by_the_norm_only_where_it_is_too_large():
    grads = [torch.tensor([3.0]), None, torch.tensor([4.0], dtype=torch.float64)]
    factor = convention.clip_by_global_norm_(grads, norm=torch.tensor(5.0).double(), max_norm=2.5)
    assert factor.item() == pytest.approx(0.5, rel=1e-6)
    assert factor.item() == 2.5 / (5 + 1e-6)
    assert grads[0].item() == pytest.approx(1.5)
    assert grads[2].item() == 4 * factor.item()
    same = [torch.tensor([3.0])]
    assert convention.clip_by_global_norm_(same, norm=torch.tensor(3.0), max_norm=4.0).item() == 1
    assert same[0].item() == 3
    bad = [torch.tensor([3.0])]
    convention.clip_by_global_norm_(bad, norm=torch.tensor(math.nan), max_norm=4.0)
    assert bad[0].isnan().all()
    shard = torch.tensor([8.0])
    convention.clip_by_global_norm_(
        [dtensor(shard, [Shard(0)], (0,))], norm=torch.tensor(4.0), max_norm=2.0
    )
    assert shard.item() == pytest.approx(4)
    for wrong in (0, -1, math.nan):
        with pytest.raises(ValueError, match="expected a number > 0"):
            convention.clip_by_global_norm_([], norm=torch.tensor(1.0), max_norm=wrong)
