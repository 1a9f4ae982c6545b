"""Node classification with a generalised PageRank network (a small MLP, then three hops over the normalised adjacency, each hop with a learnt weight) over thirteen nodes that are divided among three
ranks, 5, 4 and 4. Before a hop each rank fetches, with an all-to-all that can be differentiated, the rows of foreign nodes that its own nodes have edges to. The loss is over the eleven labelled
nodes; the gradients are summed over the ranks.

The bug: the foreign rows are fetched once, before the first hop, and serve all hops, so that from the second hop on the neighbours on other ranks are those of hop zero. After reports about stale
boundary rows in partitioned graph training (historical embeddings that were meant for sampling, halo caches of DistDGL-like code, PipeGCN-like shortcuts).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"gp": 3}}}}
NODES, FEATURES, HIDDEN, CLASSES, HOPS, LABELLED = 13, 5, 6, 3, 3, 11


class PageRankNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(FEATURES, HIDDEN)
        self.second = nn.Linear(HIDDEN, CLASSES)
        self.weights = nn.Parameter(0.3 * 0.7 ** torch.arange(HOPS + 1.0))

    def start(self, x):
        return self.second(torch.tanh(self.first(x)))

    def forward(self, x, adjacency):
        h = self.start(x)
        out = self.weights[0] * h
        for hop in range(HOPS):
            h = adjacency @ h
            out = out + self.weights[hop + 1] * h
        return out


class Swap(torch.autograd.Function):
    """Rows to the ranks that asked for them; gradients back to the rows' owners."""

    @staticmethod
    def forward(ctx, rows, sends, receives, group):
        ctx.sends, ctx.receives, ctx.group = sends, receives, group
        out = rows.new_empty(sum(receives), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), receives, sends, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        back = grad.new_empty(sum(ctx.sends), grad.shape[1])
        dist.all_to_all_single(back, grad.contiguous(), ctx.sends, ctx.receives, group=ctx.group)
        return back, None, None, None


class Part:
    """What a rank knows of the divided graph."""

    def __init__(self, adjacency, rank, size):
        owned = torch.arange(NODES).tensor_split(size)
        asks = []  # asks[a][b]: nodes of b that a has edges to
        for a in range(size):
            linked = (adjacency[owned[a]] != 0).any(0)
            asks.append(
                [owned[b][linked[owned[b]]] if a != b else owned[b][:0] for b in range(size)]
            )
        self.nodes = owned[rank]
        self.sends = [len(asks[a][rank]) for a in range(size)]
        self.receives = [len(part) for part in asks[rank]]
        self.given = torch.cat([asks[a][rank] for a in range(size)]) - self.nodes[0]
        self.foreign = torch.cat(asks[rank])
        self.inner = adjacency[self.nodes][:, self.nodes]
        self.outer = adjacency[self.nodes][:, self.foreign]


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return PageRankNet()

    def graph(self, dtype):
        g = torch.Generator().manual_seed(self.seed + 2)
        x = torch.randn(NODES, FEATURES, generator=g)
        edges = torch.rand(NODES, NODES, generator=g) < 0.22
        edges = edges | edges.T | torch.eye(NODES, dtype=torch.bool)
        edges[torch.arange(NODES), (torch.arange(NODES) + 1) % NODES] = True
        edges = (edges | edges.T).to(dtype)
        scale = edges.sum(1).rsqrt()
        return x.to(dtype), scale[:, None] * edges * scale

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "node": torch.randperm(NODES, generator=g)[:LABELLED].sort().values,
            "label": torch.randint(CLASSES, (LABELLED,), generator=g),
        }

    def loss_sum(self, model, rows):
        logits = model(*self.graph(model.weights.dtype))
        return F.cross_entropy(logits[rows["node"]], rows["label"], reduction="sum"), len(
            rows["label"]
        )

    def fetch(self, h, part, group):
        return Swap.apply(h[part.given], part.sends, part.receives, group)

    def propagate(self, model, h, part, group):
        out = model.weights[0] * h
        for hop in range(HOPS):
            foreign = self.fetch(h, part, group)
            h = part.inner @ h + part.outer @ foreign
            out = out + model.weights[hop + 1] * h
        return out

    def step(self, model, batch, ctx):
        for p in model.parameters():
            p.grad = None
        x, adjacency = self.graph(model.weights.dtype)
        part = Part(adjacency, ctx.rank, ctx.world_size)
        out = self.propagate(model, model.start(x[part.nodes]), part, ctx.group("gp"))
        own = torch.isin(batch["node"], part.nodes)
        logits = out[batch["node"][own] - part.nodes[0]]
        (F.cross_entropy(logits, batch["label"][own], reduction="sum") / LABELLED).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("gp"))


class Buggy(Clean):
    def propagate(self, model, h, part, group):
        out = model.weights[0] * h
        foreign = self.fetch(h, part, group)
        for hop in range(HOPS):
            h = part.inner @ h + part.outer @ foreign
            out = out + model.weights[hop + 1] * h
        return out


EXPECT = dict(
    right=[
        r"forward|hop|halo|foreign|neighbou?r|fetch|exchange|all.?to.?all|boundar|other ranks|stale|propagat",
        r"stale|once|only one|single|fewer|missing|hop|each|every|propagat|fetch|differ|forward|old",
    ],
    place=[
        r"propagate",
        r"fetch",
        r"swap",
        r"all.?to.?all",
        r"\bhops?\b",
        r"graph|neighbou?r|halo",
    ],
    wrong=[
        r"not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)",
        r"wrong divisor|mean of means|divi(ded|des) by (its|their) own",
        r"backward .{0,40}all.?to.?all .{0,30}(missing|wrong)|gradients? .{0,30}sent to the wrong",
        r"adjacency .{0,40}(normalised|degree).{0,30}(own|local)",
    ],
)
WHY = (
    "Buggy.propagate calls fetch once, with the output of the MLP, and uses the same foreign rows in all three hops; in hops two and three a rank's nodes get from their neighbours on other ranks the values "
    "of hop zero instead of those after the hop before. The first hop is right everywhere. After it the rows of nodes with foreign neighbours are wrong on all three ranks, hence the logits and the loss, and in the "
    "gradients the paths that cross ranks twice or three times are missing: first, second and the learnt weights of hops two and three are wrong. The all-to-all itself with its way back, the "
    "adjacency, the divisor 11 and the sum over the ranks are right. Fix: fetch inside the loop, before each hop."
)
