"""A two-layer graph attention network on one graph of nine nodes, cut by edges: each of three ranks has a third of the edges and computes their scores and messages; for every receiving node the
exponentials and the weighted messages are summed over the ranks, and each rank goes on with all nodes. Rows are snapshots of the nodes' features, in two micro-batches. The attention layers' parameters are
summed over the ranks (each sees its edges), what follows is computed alike everywhere.

The bug: the number that is subtracted before the exponential for stability is the greatest score among the rank's own edges of a node, not among all, so that exponentials of unlike scales are added up. After
edge softmax on partitioned graphs (DGL and PyG users who cut edges instead of nodes).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"parts": 3}}}}
NODES, ROWS, INPUTS, WIDTH, CLASSES = 9, 5, 4, 6, 3
PAIRS = [
    (i, j) for i in range(NODES) for j in range(NODES) if i == j or (3 * i + 5 * j) % 7 in (1, 4)
]
SOURCE, TARGET = torch.tensor(PAIRS).t()[
    :, torch.randperm(len(PAIRS), generator=torch.Generator().manual_seed(5))
]


class Sum(torch.autograd.Function):
    """Sum over the ranks, all of which go on to compute the same."""

    @staticmethod
    def forward(fctx, x, group):
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(fctx, grad):
        return grad, None


class Enter(torch.autograd.Function):
    """The same nodes on all ranks go into parts that differ."""

    @staticmethod
    def forward(fctx, x, group):
        fctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(fctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=fctx.group)
        return grad, None


class Edges:
    """All edges of the graph, in one process."""

    source, target = SOURCE, TARGET

    def enter(self, x):
        return x

    def total(self, x):
        return x

    def shift(self, scores):
        """Of each edge, the greatest score of its receiving node."""
        return self.greatest(scores)[:, self.target]

    def greatest(self, scores):
        index = self.target.expand_as(scores)
        low = scores.new_full((len(scores), NODES), -1e30)
        return low.scatter_reduce(1, index, scores.detach(), "amax")


class OwnEdges(Edges):
    def __init__(self, ctx):
        self.group = ctx.group("parts")
        self.source, self.target = (
            x.tensor_split(ctx.world_size)[ctx.rank] for x in (SOURCE, TARGET)
        )

    def enter(self, x):
        return Enter.apply(x, self.group)

    def total(self, x):
        return Sum.apply(x, self.group)

    def shift(self, scores):
        most = self.greatest(scores)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.group)
        return most[:, self.target]


class PartitionEdges(OwnEdges):
    def shift(self, scores):
        return self.greatest(scores)[:, self.target]


class Attention(nn.Module):
    def __init__(self, inputs):
        super().__init__()
        self.map = nn.Linear(inputs, WIDTH)
        self.sends = nn.Linear(WIDTH, 1, bias=False)
        self.receives = nn.Linear(WIDTH, 1, bias=False)

    def forward(self, x, edges):
        h = self.map(edges.enter(x))
        score = 4 * F.leaky_relu(
            self.sends(h)[:, edges.source, 0] + self.receives(h)[:, edges.target, 0], 0.2
        )
        e = (score - edges.shift(score)).exp()
        zeros = h.new_zeros(len(h), NODES, WIDTH)
        messages = zeros.index_add(1, edges.target, e[..., None] * h[:, edges.source])
        normaliser = zeros[..., 0].index_add(1, edges.target, e)
        return edges.total(messages) / edges.total(normaliser)[..., None]


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Attention(INPUTS), Attention(WIDTH)])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x, edges):
        for layer in self.layers:
            x = F.elu(layer(x, edges))
        return self.head(x)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Network()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": 2 * torch.randn(ROWS, NODES, INPUTS, generator=g),
            "y": torch.randint(CLASSES, (ROWS, NODES), generator=g),
        }

    def loss(self, model, rows, edges):
        logits = model(rows["x"], edges).flatten(0, 1)
        return F.cross_entropy(logits, rows["y"].flatten(), reduction="sum")

    def loss_sum(self, model, rows):
        return self.loss(model, rows, Edges()), rows["y"].numel()

    def edges(self, ctx):
        return OwnEdges(ctx)

    def step(self, model, batch, ctx):
        edges = self.edges(ctx)
        for p in model.parameters():
            p.grad = None
        for n in range(2):
            part = {k: v.tensor_split(2)[n] for k, v in batch.items()}
            (self.loss(model, part, edges) / batch["y"].numel()).backward()
        for p in model.layers.parameters():
            dist.all_reduce(p.grad, group=ctx.group("parts"))


class Buggy(Clean):
    def edges(self, ctx):
        return PartitionEdges(ctx)


EXPECT = dict(
    right=[
        r"max|greatest|shift|stabil|scale|offset|exponential|exp\b",
        r"softmax|normalis|normaliz|denominator|attention|exponential|exp\b|weights",
        r"own (edges|rank|part|score)|local|each rank|per.?rank|not (reduced|all.?reduced|common|shared)|different|unlike|MAX|across|over (the|all) ranks",
    ],
    place=[r"\bshift\b", r"PartitionEdges|OwnEdges", r"greatest", r"Attention"],
    wrong=[
        r"(parameters?|gradient).{0,30}(not|never) (all.?)?reduced|reduced twice",
        r"Enter.{0,40}(missing|wrong)|Sum.{0,40}backward.{0,20}(wrong|should)",
        r"softmax over the own edges only|normaliser.{0,30}(not summed|own edges only)",
        r"self.?loop|degree|edges? (counted twice|lost|missing)|micro.?batch",
    ],
)
WHY = (
    "Each rank subtracts the greatest score of its own edges of a node before the exponential; messages and normaliser are then summed over the ranks, so that edges of rank r weigh exp(score - m_r) with a different m_r. "
    "A common number would cancel between numerator and denominator, unlike ones do not: the attention weights are wrong for every node whose edges lie on several ranks, forward and backward, on all ranks, in both layers "
    "and micro-batches. All parameters' gradients are wrong. Fix: all-reduce the greatest scores with MAX before they are subtracted (OwnEdges.shift)."
)
