"""Message passing with a virtual node: per layer, the nodes take the mean of their neighbours, the virtual node takes its own state plus the sum of all nodes through a small net, and gives it back to all nodes. Nodes of each graph are cut over three
ranks (5, 4 and 4 of 13); neighbours are gathered, the sum for the virtual node is an all-reduce in forward and backward. Node regression, two micro-batches of graphs, gradients summed over the ranks.

The bug: the state of the virtual node, of which each rank has a copy, is added to the rank's sum before the all-reduce and so counts three times.
After the "bias added before the all-reduce" class of reports, here in partitioned graph training (OGB virtual node baselines made distributed).
"""

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"nodes": 3}}}}
GRAPHS, NODES, FEATURES, WIDTH, LAYERS = 5, 13, 4, 6, 3


class SumOverRanks(torch.autograd.Function):
    """Sum of the ranks' tensors; every rank uses it for its own nodes, so its gradients are summed too."""

    @staticmethod
    def forward(fctx, x, group):
        fctx.group = group
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(fctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=fctx.group)
        return grad, None


class GatherNodes(torch.autograd.Function):
    @staticmethod
    def forward(fctx, own, lo, hi, group):
        fctx.place = lo, hi, group
        full = own.new_zeros(own.shape[0], NODES, own.shape[2])
        full[:, lo:hi] = own
        dist.all_reduce(full, group=group)
        return full

    @staticmethod
    def backward(fctx, grad):
        lo, hi, group = fctx.place
        grad = grad.clone()
        dist.all_reduce(grad, group=group)
        return grad[:, lo:hi], None, None, None


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_loop = nn.Linear(WIDTH, WIDTH)
        self.neighbours = nn.Linear(WIDTH, WIDTH, bias=False)
        self.virtual = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


class GraphNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(FEATURES, WIDTH)
        self.virtual_node = nn.Parameter(torch.randn(WIDTH))
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.readout = nn.Linear(WIDTH, 1)

    def forward(self, x, adjacency, gather, pool):
        """x and the rows of adjacency are of the own nodes."""
        h = self.embed(x)
        v = self.virtual_node.expand(len(x), -1)
        degree = adjacency.sum(-1, keepdim=True).clamp(min=1)
        for layer in self.layers:
            h = h + v[:, None] / NODES
            h = torch.tanh(layer.self_loop(h) + layer.neighbours(adjacency @ gather(h) / degree))
            v = v + torch.tanh(layer.virtual(pool(h, v) / NODES))
        return self.readout(h + v[:, None])[..., 0]


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return GraphNet()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        upper = (torch.rand(GRAPHS, NODES, NODES, generator=g) < 0.3).float().triu(1)
        return {
            "adjacency": upper + upper.transpose(1, 2),
            "x": torch.randn(GRAPHS, NODES, FEATURES, generator=g),
            "y": torch.randn(GRAPHS, NODES, generator=g),
        }

    def loss_sum(self, model, rows):
        out = model(rows["x"], rows["adjacency"], lambda h: h, lambda h, v: h.sum(1) + v)
        return (out - rows["y"]).square().sum() / NODES, len(out)

    def pool_nodes(self, h, v, group):
        return SumOverRanks.apply(h.sum(1), group) + v

    def step(self, model, batch, ctx):
        group = ctx.group("nodes")
        own = torch.arange(NODES).tensor_split(ctx.world_size)[ctx.rank]
        lo, hi = int(own[0]), int(own[-1]) + 1
        for p in model.parameters():
            p.grad = None
        for m in range(2):
            part = {k: t.tensor_split(2)[m] for k, t in batch.items()}
            out = model(
                part["x"][:, lo:hi],
                part["adjacency"][:, lo:hi],
                lambda h: GatherNodes.apply(h, lo, hi, group),
                lambda h, v: self.pool_nodes(h, v, group),
            )
            loss = (out - part["y"][:, lo:hi]).square().sum()
            (loss / (NODES * GRAPHS)).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    def pool_nodes(self, h, v, group):
        return SumOverRanks.apply(h.sum(1) + v, group)


EXPECT = dict(
    right=[
        r"three times|3 times|3x|times|twice|every rank|each rank|all ranks|replicat|copies|copy|world.?size|counted|repeated|added on|before",
        r"sum|reduc|pool",
    ],
    place=[r"pool_nodes", r"SumOverRanks", r"virtual", r"\bv\b", r"\bpool\b"],
    wrong=[
        r"(parameters?|weights?|virtual_node).{0,30}(not reduced|never reduced|reduced twice)|missing (all.?)?reduc",
        r"(backward|adjoint) of SumOverRanks.{0,20}(wrong|missing)|identity backward",
        r"GatherNodes.{0,40}(wrong|missing|twice)|degree.{0,30}(wrong|own)",
        r"divisor|mean of means|micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|only the last micro.?batch",
    ],
)
WHY = (
    "v is the same on all three ranks, the nodes' sums are not. pool_nodes adds v to the rank's own sum and sums the result over the ranks, so v is in it three times in place of once, in each of the three layers and both micro-batches; the forward is that of another "
    "model on all ranks, and all gradients differ. The adjoint of the sum, the gather, the final reduction and the divisor are right. A right cause says that the replicated state of the virtual node is summed over the ranks. Fix: add v after the sum."
)
