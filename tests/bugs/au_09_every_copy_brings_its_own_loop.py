"""Graph network on graphs whose edges are dealt out over three ranks (vertex cut, as in DistGNN): every rank sums the messages of its edges, and an all-reduce adds up the partial sums of the copies of a node; the mean is taken over
the degree of the whole graph plus one for the self-loop. Every node has a master rank, which takes its loss. Two micro-batches of graphs.

The bug: each rank adds self-loops to its part of the graph, for all nodes that occur in it, so a node is added to its own messages once for every rank that has a copy of it. Nodes with more than one self-edge are the subject of
dmlc/dgl PR 482 (fix self-edge bug in GCN and GAT); the halo copies of a partition that of dmlc/dgl PR 1076.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"gp": 3}}}}
GRAPHS, NODES, FEATURES, WIDTH, CLASSES = 5, 7, 4, 6, 3
PARTS = [(0, 3), (3, 5)]
RANKS = 3
MASTER = torch.arange(NODES) % RANKS


class SumCopies(torch.autograd.Function):
    """Sum of the partial sums of all ranks; backward: sum of all ranks' gradients."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Convolution(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.message = nn.Linear(width, WIDTH)

    def forward(self, x, edges, degree, group=None):
        x = edges @ self.message(x)
        if group is not None:
            x = SumCopies.apply(x, group)
        return torch.tanh(x / degree[..., None])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolutions = nn.ModuleList([Convolution(FEATURES), Convolution(WIDTH)])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x, edges, degree, group=None):
        for convolution in self.convolutions:
            x = convolution(x, edges, degree, group)
        return self.head(x)


def own_part(edges, rank, every_copy):
    """The rank's edges with self-loops."""
    number = torch.arange(NODES)
    dealt = (number[:, None] + 2 * number[None]) % RANKS == rank
    own = edges * dealt
    loops = (rank == MASTER).expand(len(edges), NODES)
    if every_copy:
        loops = loops | (own.sum(1) + own.sum(2) > 0)
    return own + torch.diag_embed(loops.to(own.dtype))


class Clean:
    every_copy = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        edges = (torch.rand(GRAPHS, NODES, NODES, generator=g) < 0.3).float()
        return {
            "x": torch.randn(GRAPHS, NODES, FEATURES, generator=g),
            "edges": edges * (1 - torch.eye(NODES)),  # to, from
            "labels": torch.randint(CLASSES, (GRAPHS, NODES), generator=g),
        }

    def loss_sum(self, model, rows):
        edges, labels = rows["edges"], rows["labels"]
        degree = edges.sum(2) + 1
        logits = model(rows["x"], edges + torch.eye(NODES, dtype=edges.dtype), degree)
        return F.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), reduction="sum"
        ), labels.numel()

    def step(self, model, batch, ctx):
        group = ctx.group("gp")
        mine = ctx.rank == MASTER
        for low, high in PARTS:
            edges, labels = batch["edges"][low:high], batch["labels"][low:high]
            degree = edges.sum(2) + 1
            own = own_part(edges, ctx.rank, self.every_copy)
            logits = model(batch["x"][low:high], own, degree, group)[:, mine]
            loss = F.cross_entropy(logits.flatten(0, 1), labels[:, mine].flatten(), reduction="sum")
            (loss / batch["labels"].numel()).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    every_copy = True


EXPECT = dict(
    right=[
        r"(?i)forward|convolution|self.?loop|message|SumCopies|input|activations?|edges",
        r"(?i)wrong|other|different|differ|deviat|not (the )?(same|right)|too (much|large|many)|twice|several times|more than once|counted",
        r"(?i)convolutions?|self.?loop|message|SumCopies|edges|copies|graph",
    ],
    place=[r"(?i)convolutions?(\.0)?|SumCopies|self.?loop|edges"],
    wrong=[
        r"(?i)param.{0,30}not (been )?(all.?)?reduced|gradients? .{0,20}(reduced|summed) (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|gradient.{0,20}factor of (1/)?[0-9]",
        r"(?i)forward is right|wrong only in the backward|goes wrong in the backward",
        r"(?i)(labels?|targets?|features) (is|are) (wrong|other|of)",
        r"(?i)backward of SumCopies.{0,20}wrong|adjoint",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|only (on )?rank [012]\b|only (the )?(first|last|second) micro.?batch",
    ],
)
WHY = (
    "The forward is wrong from convolutions.0 on (the sum of the messages, SumCopies), on all ranks alike, in both micro-batches and all graphs: a node whose edges lie on c ranks (its master always counts as one) gets its own "
    "message c times instead of once, since every rank adds a self-loop for each node that occurs in its edges. Nodes with one copy get the right sum in the first layer. The degree (divisor of the mean) counts the loop once and is"
    " right. The output of `message` of the first layer is right, what comes behind its sum not. So the gradients of all parameters are wrong, equally on all ranks. SumCopies with its backward, the loss at the masters, labels, "
    "divisor 35 and the final all-reduce are right. Fix: the self-loop at the master rank only."
)
