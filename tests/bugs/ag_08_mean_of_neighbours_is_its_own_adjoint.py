"""Node classification on small undirected molecule graphs with two GraphSAGE layers (mean of the neighbours) under DDP on three ranks with accumulation; the graphs of a micro-batch are joined with node offsets, and the mean over
neighbours is an own autograd Function, since it should keep only the degrees for the backward. Divisor: number of nodes.

The bug: "the graph is undirected, so the aggregation is symmetric": the backward calls the same mean on the gradient. The sum over neighbours is symmetric, the mean is not: the right adjoint divides every node's gradient by that
node's own degree before it is sent to the neighbours, not the sum by the degree of the receiver. After rusty1s/pytorch_sparse (matmul with reduce="mean" needs the row counts on the transposed side) and dgSPARSE-Lib PR 21 (SpMM
backward check).
"""

import contextlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
FEATURES, WIDTH, CLASSES, MOST, EDGES = 4, 7, 3, 6, 7
GRAPHS = [
    (4, [(0, 1), (0, 2), (0, 3)]),
    (3, [(0, 1), (1, 2)]),
    (6, [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 0), (0, 3)]),
    (5, [(0, 1), (0, 2), (0, 3), (0, 4), (1, 2)]),
    (2, [(0, 1)]),
    (5, [(0, 1), (1, 2), (2, 0), (2, 3), (3, 4)]),
    (4, [(0, 1), (1, 2), (2, 3), (1, 3)]),
    (6, [(0, 1), (0, 2), (0, 3), (3, 4), (3, 5)]),
]
PARTS = [[(0, 1), (1, 3)], [(3, 5), (5, 6)], [(6, 7), (7, 8)]]


def mean_over(x, source, target):
    degree = torch.bincount(target, minlength=len(x)).clamp(min=1).to(x.dtype)
    return torch.zeros_like(x).index_add(0, target, x[source]) / degree[:, None]


class NeighbourMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, source, target, same_again):
        ctx.save_for_backward(source, target)
        ctx.same_again = same_again
        return mean_over(x, source, target)

    @staticmethod
    def backward(ctx, grad):
        source, target = ctx.saved_tensors
        if ctx.same_again:
            return mean_over(grad, source, target), None, None, None
        degree = torch.bincount(target, minlength=len(grad)).clamp(min=1).to(grad.dtype)
        sent = (grad / degree[:, None])[target]
        return torch.zeros_like(grad).index_add(0, source, sent), None, None, None


class Sage(nn.Module):
    def __init__(self, inside, outside):
        super().__init__()
        self.own, self.neighbours = nn.Linear(inside, outside), nn.Linear(inside, outside)
        self.same_again = False

    def forward(self, x, source, target):
        mean = NeighbourMean.apply(x, source, target, self.same_again)
        return self.own(x) + self.neighbours(mean)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(FEATURES, WIDTH)
        self.first, self.second = Sage(WIDTH, WIDTH), Sage(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x, source, target):
        x = F.silu(self.first(torch.tanh(self.embed(x)), source, target))
        return self.head(torch.tanh(self.second(x, source, target)))


def joined(rows):
    """Nodes, labels and both directions of the edges of these graphs in one graph."""
    nodes = rows["nodes"].tolist()
    x = torch.cat([a[:n] for a, n in zip(rows["x"], nodes)])
    label = torch.cat([a[:n] for a, n in zip(rows["label"], nodes)])
    offset = rows["nodes"].cumsum(0) - rows["nodes"]
    there = rows["edges"][:, :, 0] >= 0
    pairs = (rows["edges"] + offset[:, None, None])[there]
    return x, label, torch.cat([pairs[:, 0], pairs[:, 1]]), torch.cat([pairs[:, 1], pairs[:, 0]])


def node_loss(model, rows):
    x, label, source, target = joined(rows)
    return F.cross_entropy(model(x, source, target), label, reduction="sum")


class Clean:
    same_again = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        edges = torch.full((len(GRAPHS), EDGES, 2), -1)
        for row, (_, pairs) in enumerate(GRAPHS):
            edges[row, : len(pairs)] = torch.tensor(pairs)
        return {
            "x": torch.randn(len(GRAPHS), MOST, FEATURES, generator=g),
            "label": torch.randint(CLASSES, (len(GRAPHS), MOST), generator=g),
            "nodes": torch.tensor([n for n, _ in GRAPHS]),
            "edges": edges,
        }

    def loss_sum(self, model, rows):
        return node_loss(model, rows), int(rows["nodes"].sum())

    def distribute(self, model, ctx):
        model.first.same_again = model.second.same_again = self.same_again
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        nodes = int(batch["nodes"].sum())
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                (node_loss(model, rows) * ctx.world_size / nodes).backward()


class Buggy(Clean):
    same_again = True


EXPECT = dict(
    right=[
        r"(?i)NeighbourMean|first|second|embed|aggregat|neighbour|sage",
        r"(?i)backward|adjoint|gradient (of|that|from|in)|hands? (back|on)|way back",
    ],
    place=[r"(?i)NeighbourMean|second|first|aggregat|sage"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)(head|second(\.(own|neighbours))?)\.(weight|bias) (is|are) wrong",
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)|no_sync.{0,40}(wrong|missing|too (early|late))",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own count|factor of (1/)?[0-9]",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)",
        r"(?i)only (on )?rank [012]\b|rank [012] alone|edges? (is|are) (missing|wrong)|offsets? (is|are) wrong",
    ],
)
WHY = (
    "All ranks, all micro-batches: the forward is right, the backward of NeighbourMean is wrong wherever neighbours have different degrees (all graphs but row 4, a single edge, whose two nodes have degree 1). Node u should receive "
    "the sum over its neighbours v of g_v / degree(v) and receives the sum of g_v / degree(u). Seen backwards it goes wrong first in `second` (the gradient of its input, i.e. of the output of `first`), then again in `first`. So "
    "the gradients of first.own, first.neighbours and embed are wrong in direction; second.own, second.neighbours and head are right (their gradients need the right forward mean and the right output gradient only). Edges, offsets, "
    "divisor 35, no_sync, reduction are right. Fix: divide by the degree before sending, not after."
)
