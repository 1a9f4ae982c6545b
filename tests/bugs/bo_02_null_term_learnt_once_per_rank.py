"""Graph clustering by modularity (DMoN): a small graph network gives each node soft clusters S, the loss of a graph is -(Tr(S^T A S) - |S^T d|^2 / 2m) / 2m plus a collapse penalty |sum of S| sqrt(k)/n.
Ten nodes are cut over three ranks (4, 3 and 3), all ranks see all five graphs; the first hop reads data only, the clusters of the others are gathered for A S. Two micro-batches, gradients summed over
the ranks. S^T d and the cluster sizes are summed over the ranks, and each rank then computes the two terms made of them.

The bug: the sum over the ranks is torch.distributed.nn's all_reduce, whose backward sums the gradients of all ranks; but each rank computed the same terms from the sum, so that they count three times.
After the many reports about torch.distributed.nn.functional.all_reduce and a loss that is the same on each rank ("gradient is world size times too large").
"""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dnn
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"nodes": 3}}}}
NODES, FEATURES, WIDTH, CLUSTERS, ROWS = 10, 5, 7, 4, 5


class Clusters(nn.Module):
    def __init__(self):
        super().__init__()
        self.hop = nn.Linear(FEATURES, WIDTH)
        self.skip = nn.Linear(FEATURES, WIDTH, bias=False)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.assign = nn.Linear(WIDTH, CLUSTERS)

    def forward(self, adjacency, x, own):
        a = adjacency[:, own]
        h = torch.tanh(
            self.hop(a @ x / a.sum(-1, keepdim=True).clamp(min=1)) + self.skip(x[:, own])
        )
        return (3 * self.assign(h + torch.tanh(self.hidden(h)))).softmax(-1)


class Gathered(torch.autograd.Function):
    """All nodes' rows on each rank; what the ranks do with them differs, so their gradients are summed."""

    @staticmethod
    def forward(fctx, own, lo, hi, group):
        fctx.place, fctx.group = (lo, hi), group
        full = own.new_zeros(own.shape[0], NODES, own.shape[2])
        full[:, lo:hi] = own
        dist.all_reduce(full, group=group)
        return full

    @staticmethod
    def backward(fctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=fctx.group)
        return grad[:, slice(*fctx.place)], None, None, None


class SumForAll(torch.autograd.Function):
    """The sum over the ranks, of which every rank goes on to compute the same."""

    @staticmethod
    def forward(fctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(fctx, grad):
        return grad, None


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Clusters()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        upper = (torch.rand(ROWS, NODES, NODES, generator=g) < 0.4).float().triu(1)
        return {
            "adjacency": upper + upper.transpose(1, 2),
            "x": torch.randn(ROWS, NODES, FEATURES, generator=g),
        }

    def loss_sum(self, model, rows):
        a = rows["adjacency"]
        s = model(a, rows["x"], slice(0, NODES))
        degree = a.sum(-1)
        inside = (s * (a @ s)).sum((1, 2))
        return self.whole_terms(
            degree.sum(1), inside, (s * degree[..., None]).sum(1), s.sum(1)
        ).sum(), len(a)

    @staticmethod
    def whole_terms(twice_m, inside, volumes, sizes):
        modularity = (inside - volumes.square().sum(1) / twice_m) / twice_m
        return sizes.norm(dim=1) * CLUSTERS**0.5 / NODES - modularity

    def over_nodes(self, x, ctx):
        return SumForAll.apply(x, ctx.group("nodes"))

    def strip_loss(self, model, part, lo, hi, ctx):
        a, group = part["adjacency"], ctx.group("nodes")
        s = model(a, part["x"], slice(lo, hi))
        degree = a.sum(-1)
        inside = (s * (a[:, lo:hi] @ Gathered.apply(s, lo, hi, group))).sum((1, 2))
        volumes = self.over_nodes((s * degree[:, lo:hi, None]).sum(1), ctx)
        sizes = self.over_nodes(s.sum(1), ctx)
        return self.whole_terms(degree.sum(1), inside, volumes, sizes).sum()

    def step(self, model, batch, ctx):
        own = torch.arange(NODES).tensor_split(ctx.world_size)[ctx.rank]
        lo, hi = int(own[0]), int(own[-1]) + 1
        for p in model.parameters():
            p.grad = None
        for n in range(2):
            part = {k: x.tensor_split(2)[n] for k, x in batch.items()}
            (self.strip_loss(model, part, lo, hi, ctx) / ROWS).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("nodes"))


class Buggy(Clean):
    def over_nodes(self, x, ctx):
        return dnn.all_reduce(x, group=ctx.group("nodes"))


EXPECT = dict(
    right=[
        r"all.?reduce|reduc|sum(med|s)?\b|over_nodes|collective",
        r"backward|gradient|adjoint|way back|cotangent",
        r"(3|three|world.?size|group.?size|number of ranks|each rank|every rank|all ranks).{0,40}|times|twice|again|replicat|identical|same (term|loss|value)",
    ],
    place=[
        r"over_nodes",
        r"dnn\.all_reduce|_AllReduce|distributed\.nn",
        r"volumes|sizes",
        r"whole_terms|strip_loss",
    ],
    wrong=[
        r"parameters?.{0,30}(not reduced|reduced twice|never reduced)|missing (all.?)?reduc",
        r"wrong group|micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|only the last micro.?batch",
        r"Gathered.{0,60}(wrong|missing|twice)|loss value is wrong|forward .{0,20}is wrong|(wrong|other) rows",
        r"divisor|mean of means|own nodes only|local nodes only",
    ],
)
WHY = (
    "volumes = S^T d and sizes = sum of S are summed over the three ranks, and each rank computes the null term and the collapse penalty from them, all alike; its own strip of S is only on one rank, so the "
    "gradient at the sum is already the whole one and has to be passed on as it is. torch.distributed.nn.functional.all_reduce sums it over the ranks in its backward, so what arrives at S from these two terms is "
    "three times too large on all ranks, in both micro-batches; the part through Tr(S^T A S) is right, and so are forward, loss, and the final reduction of the parameters. Fix: a sum with identity as its "
    "backward (or divide the two terms by the number of ranks)."
)
