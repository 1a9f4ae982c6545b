"""A two-layer graph convolution with the nodes cut over three ranks and the features of foreign neighbours fetched by all-to-all (halo
exchange). After reports on partitioned graph training: the degree in the normalisation of the messages is counted in the own partition's
edges only.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"part": 3}}}}
NODES, INPUTS, WIDTH, CLASSES, NEAR = 14, 6, 9, 5, 3


class Halo(torch.autograd.Function):
    """The rows that the other ranks ask for go out, the foreign rows come in."""

    @staticmethod
    def forward(ctx, h, theirs, sent, got, group):
        ctx.save_for_backward(theirs)
        ctx.rest = sent, got, group, len(h)
        out = h.new_empty(sum(got), h.shape[1])
        dist.all_to_all_single(out, h[theirs], got, sent, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        (theirs,) = ctx.saved_tensors
        sent, got, group, length = ctx.rest
        back = grad.new_empty(sum(sent), grad.shape[1])
        dist.all_to_all_single(back, grad.contiguous(), sent, got, group=group)
        return (
            grad.new_zeros(length, grad.shape[1]).index_add_(0, theirs, back),
            None,
            None,
            None,
            None,
        )


class Graph(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(INPUTS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.skip = nn.Linear(INPUTS, WIDTH, bias=False)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x, spread):
        h = F.gelu(spread(self.first(x)))
        return self.head(self.norm(spread(self.second(h)) + self.skip(x)))


def node_loss(logits, rows):
    each = F.cross_entropy(logits, rows["kind"], reduction="none")
    return (each * rows["labelled"]).sum()


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Graph()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        near = (torch.rand(NODES, NEAR, generator=g).square() * NODES).long()
        return {
            "id": torch.arange(NODES),
            "x": torch.randn(NODES, INPUTS, generator=g),
            "near": near,
            "kind": torch.randint(CLASSES, (NODES,), generator=g),
            "labelled": torch.rand(NODES, generator=g) < 0.7,
        }

    @staticmethod
    def messages(own, table, at, degree_own, degree_at):
        """The mean over a node and its neighbours, weighed by the roots of both degrees."""
        near = (table[at] / degree_at.sqrt()[..., None]).sum(1)
        return (near + own / degree_own.sqrt()[:, None]) / degree_own.sqrt()[:, None]

    def loss_sum(self, model, rows):
        n = len(rows["x"])
        at = torch.full((NODES,), n)  # a neighbour that is not among the rows gives nothing
        at[rows["id"]] = torch.arange(n)
        near = at[rows["near"]]
        degree = 1 + torch.bincount(near.flatten(), minlength=n + 1).to(rows["x"].dtype)

        def spread(h):
            table = torch.cat([h, torch.zeros_like(h[:1])])
            return self.messages(h, table, near, degree[:n], degree[near])

        logits = model(rows["x"], spread)
        return node_loss(logits, rows), rows["labelled"].sum()

    def degrees(self, near, group):
        counts = torch.bincount(near.flatten(), minlength=NODES)
        dist.all_reduce(counts, group=group)
        return 1 + counts

    def step(self, model, batch, ctx):
        n, me, group = ctx.axes["part"], ctx.coords["part"], ctx.group("part")
        parts = torch.arange(NODES).tensor_split(n)
        own, starts = parts[me], torch.tensor([int(p[0]) for p in parts])
        mine = {k: v[own] for k, v in batch.items()}
        near = mine["near"]
        ids = near.unique()
        foreign = ids[(ids < own[0]) | (ids > own[-1])]
        owner = torch.bucketize(foreign, starts[1:], right=True)
        got = torch.bincount(owner, minlength=n)
        sent = torch.empty_like(got)
        dist.all_to_all_single(sent, got, group=group)
        got, sent = got.tolist(), sent.tolist()
        theirs = foreign.new_empty(sum(sent))
        dist.all_to_all_single(theirs, foreign, sent, got, group=group)
        theirs = theirs - starts[me]
        at = torch.zeros(NODES, dtype=torch.long)
        at[own] = torch.arange(len(own))
        at[foreign] = len(own) + torch.arange(len(foreign))
        degree = self.degrees(near, group).to(ctx.dtype)

        def spread(h):
            table = torch.cat([h, Halo.apply(h, theirs, sent, got, group)])
            return self.messages(h, table, at[near], degree[own], degree[near])

        loss = node_loss(model(mine["x"], spread), mine)
        (loss / batch["labelled"].sum()).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    def degrees(self, near, group):
        return 1 + torch.bincount(near.flatten(), minlength=NODES)


EXPECT = dict(
    right=[
        r"forward|activation|output|input|spread|degree|first|message|loss|logit|neighbou?r|layer",
        r"first|degree|message|spread|neighbou?r|second|edges?|normali|layer|coupl|rows?",
    ],
    place=[
        r"first|second|spread|degree|message|norm|loss|forward|part|(all|every|each) (rank|param)"
    ],
    wrong=[
        r"(never|not) (been )?all.?reduced|gradients? .{0,30}(never|not) reduced",
        r"(counted|reduced|summed|added) (twice|again|\d times)",
        r"mean of (the )?means|own (count|denominator|divisor) of (labels|labelled|tokens)",
        r"(halo|all.?to.?all)\S* backward",
        r"only (head|norm|skip)\S* (is|are) wrong",
    ],
)
WHY = (
    "The degrees that weigh the messages are counted from the edges of the own nodes only, not summed over the parts, so a node that is a "
    "neighbour of foreign nodes has too small a degree, and another one on each rank. The messages after `first` are the first wrong "
    "values of the forward; all below, the loss, and all gradients are wrong. Reductions and loss divisor are right."
)
