"""A graph transformer-like network with Laplacian eigenvectors as node positions, whose signs are flipped at random, one sign for each eigenvector of each graph (as the datasets of GraphGPS/SAN do). Graphs
are divided over two data parallel ranks, the nine nodes of each over two more ("nodes": 5 and 4), which gather each other's messages. Two micro-batches, summed gradients.

The bug: the random stream of the flip is offset by the rank of the worker, "so that augmentations differ between workers". Between ranks that hold nodes of the same graph they must not: half of the nodes
have the eigenvector with one sign, the others with the other. The usual worker_init_fn/seed + rank advice, used unchanged under graph parallelism.
"""

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "nodes": 2}}}}
ROWS, NODES, FEATURES, VECTORS, WIDTH = 9, 9, 4, 3, 8


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.own, self.message = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, adjacency, h, gather):
        heard = adjacency @ gather(torch.tanh(self.message(h)))
        return h + torch.tanh(self.own(h) + heard)


class GraphNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Linear(FEATURES, WIDTH)
        self.position = nn.Sequential(nn.Linear(VECTORS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x, vectors, adjacency, gather):
        h = self.features(x) + self.position(2 * vectors)
        for layer in self.layers:
            h = layer(adjacency, h, gather)
        return self.head(h).squeeze(-1)


class GatheredNodes(torch.autograd.Function):
    @staticmethod
    def forward(fctx, own, lo, hi, group):
        fctx.place, fctx.group = slice(lo, hi), group
        full = own.new_zeros(own.shape[0], NODES, own.shape[2])
        full[:, lo:hi] = own
        dist.all_reduce(full, group=group)
        return full

    @staticmethod
    def backward(fctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=fctx.group)
        return grad[:, fctx.place], None, None, None


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return GraphNet()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        upper = (torch.rand(ROWS, NODES, NODES, generator=g) < 0.4).float().triu(1)
        adjacency = upper + upper.transpose(1, 2)
        laplacian = torch.diag_embed(adjacency.sum(-1)) - adjacency
        return {
            "graph": torch.arange(ROWS),
            "adjacency": adjacency,
            "x": torch.randn(ROWS, NODES, FEATURES, generator=g),
            "vectors": torch.linalg.eigh(laplacian)[1][..., 1 : VECTORS + 1].contiguous(),
            "target": torch.randn(ROWS, NODES, generator=g),
        }

    def flipped(self, vectors, graphs, worker=0):
        """Eigenvectors with random signs, one for each vector of each graph."""
        signs = []
        for graph in graphs.tolist():
            g = torch.Generator().manual_seed(1000 * self.seed + 17 * graph + worker)
            signs.append(2 * torch.randint(2, (VECTORS,), generator=g) - 1)
        return vectors * torch.stack(signs)[:, None]

    def loss_sum(self, model, rows):
        vectors = self.flipped(rows["vectors"], rows["graph"])
        out = model(rows["x"], vectors, rows["adjacency"], lambda h: h)
        return (out - rows["target"]).square().sum(), out.numel()

    def augment(self, part, ctx):
        return self.flipped(part["vectors"], part["graph"])

    def step(self, model, batch, ctx):
        nodes = torch.arange(NODES).tensor_split(ctx.axes["nodes"])[ctx.coords["nodes"]]
        lo, hi = int(nodes[0]), int(nodes[-1]) + 1
        mine = {k: x.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, x in batch.items()}
        mine = {k: x if k == "graph" else x[:, lo:hi] for k, x in mine.items()}

        def gather(h):
            return GatheredNodes.apply(h, lo, hi, ctx.group("nodes"))

        for n in range(2):
            part = {k: x.tensor_split(2)[n] for k, x in mine.items()}
            out = model(part["x"], self.augment(part, ctx), part["adjacency"], gather)
            loss = (out - part["target"]).square().sum()
            (loss / batch["target"].numel()).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp", "nodes"))


class Buggy(Clean):
    def augment(self, part, ctx):
        worker = ctx.coords["nodes"]
        return self.flipped(part["vectors"], part["graph"], worker)


EXPECT = dict(
    right=[
        r"sign|flip|random|seed|draw|generator|augment|stream",
        (
            r"(rank|worker|nodes).{0,80}(differ|other|own|unlike|not the same|another|different|depend|offset|disagree)|(differ|other|own|unlike|not the same|another|different|depend|offset|disagree).{0,80}(rank|worker|nodes)"
        ),
    ],
    place=[r"augment", r"flipped", r"vectors", r"worker", r"position"],
    wrong=[
        r"(parameter|gradient)s?.{0,30}(not reduced|reduced twice|never reduced)|missing (all.?)?reduc",
        r"GatheredNodes.{0,40}(wrong|missing|twice)|adjacency.{0,30}wrong|micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|only the last micro.?batch",
        r"divisor|mean of means|dropout mask|wrong group|same (seed|mask|signs).{0,30}on all ranks",
    ],
)
WHY = (
    "augment seeds the signs with the coordinate along nodes, so the ranks with nodes 5 to 8 (coords nodes = 1, ranks 1 and 3) flip other eigenvectors than the ranks with nodes 0 to 4 of the same graphs. Their "
    "position encodings have wrong signs in some of the graphs, the other half hears them through the gathered messages, and gradients are wrong on all ranks after the sum. A right cause says that the random "
    "signs (seed) depend on the node rank and differ within one graph. Fix: seed by graph only."
)
