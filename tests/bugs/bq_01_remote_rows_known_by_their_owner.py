"""Node classification on graphs cut over three ranks (4, 4 and 3 of eleven nodes): three GraphSAGE layers of equal width, each of which needs the rows of the other ranks' nodes twice, for its messages and for its gate. The remote rows
are therefore fetched once and kept in a store for the rest of the layer; the store is new for each of the two micro-batches. Gradients are summed over the ranks.

The bug: the store knows what it keeps by the peers' node range and not by the layer, so layers two and three read the remote rows that were fetched for layer one. After reports on halo / feature caches in distributed GNN trainers
(DistDGL- and PipeGCN-like code) where a boundary cache meant for input features is asked for hidden layers as well: stale remote embeddings.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"nodes": 3}}}}
NODES, FEATURES, WIDTH, CLASSES, ROWS, LAYERS = 11, 5, 7, 4, 5, 3


class Sage(nn.Module):
    def __init__(self):
        super().__init__()
        self.own = nn.Linear(WIDTH, WIDTH)
        self.neighbour = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate = nn.Linear(WIDTH, WIDTH)

    def messages(self, a, full):
        return self.neighbour(a @ full / a.sum(-1, keepdim=True).clamp(min=1))

    def gating(self, a, full):
        return torch.sigmoid(self.gate((a @ full) / NODES))

    def update(self, h, message, gate):
        return h + torch.tanh(self.own(h) + gate * message)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(FEATURES, WIDTH)
        self.layers = nn.ModuleList(Sage() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, a, x):
        h = torch.tanh(self.encoder(x))
        for layer in self.layers:
            h = layer.update(h, layer.messages(a, h), layer.gating(a, h))
        return self.head(h)


class GatherNodes(torch.autograd.Function):
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


class HaloStore:
    """Remote rows, fetched when first asked for."""

    def __init__(self, lo, hi, group):
        self.lo, self.hi, self.group, self.kept = lo, hi, group, {}

    def key(self, layer):
        return layer, self.lo, self.hi

    def full(self, h, layer):
        key = self.key(layer)
        if key not in self.kept:
            self.kept[key] = GatherNodes.apply(h, self.lo, self.hi, self.group)
        full = self.kept[key]
        return torch.cat([full[:, : self.lo], h, full[:, self.hi :]], 1)


class PeerHaloStore(HaloStore):
    def key(self, layer):
        return self.lo, self.hi


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        upper = (torch.rand(ROWS, NODES, NODES, generator=g) < 0.35).float().triu(1)
        labels = torch.randint(CLASSES, (ROWS, NODES), generator=g)
        labels[torch.rand(ROWS, NODES, generator=g) < 0.3] = -100
        return {
            "adjacency": upper + upper.transpose(1, 2),
            "x": torch.randn(ROWS, NODES, FEATURES, generator=g),
            "labels": labels,
        }

    def loss_sum(self, model, rows):
        out = model(rows["adjacency"], rows["x"])
        return F.cross_entropy(out.flatten(0, 1), rows["labels"].flatten(), reduction="sum"), (
            rows["labels"] >= 0
        ).sum()

    def store(self, lo, hi, ctx):
        return HaloStore(lo, hi, ctx.group("nodes"))

    def strip(self, model, part, lo, hi, ctx):
        a, store = part["adjacency"][:, lo:hi], self.store(lo, hi, ctx)
        h = torch.tanh(model.encoder(part["x"][:, lo:hi]))
        for i, layer in enumerate(model.layers):
            message = layer.messages(a, store.full(h, i))
            h = layer.update(h, message, layer.gating(a, store.full(h, i)))
        out = model.head(h)
        return F.cross_entropy(
            out.flatten(0, 1), part["labels"][:, lo:hi].flatten(), reduction="sum"
        )

    def step(self, model, batch, ctx):
        own = torch.arange(NODES).tensor_split(ctx.world_size)[ctx.rank]
        lo, hi = int(own[0]), int(own[-1]) + 1
        count = (batch["labels"] >= 0).sum()
        for p in model.parameters():
            p.grad = None
        for n in range(2):
            part = {k: v.tensor_split(2)[n] for k, v in batch.items()}
            (self.strip(model, part, lo, hi, ctx) / count).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("nodes"))


class Buggy(Clean):
    def store(self, lo, hi, ctx):
        return PeerHaloStore(lo, hi, ctx.group("nodes"))


EXPECT = dict(
    right=[
        r"cache|stale|store|kept|reus|earlier layer|first layer|previous layer|another layer|layer (0|1|one)|only (once|one)|fewer|missing (gather|all.?reduce|exchange)|not (fetched|gathered|exchanged) (again|anew)|never (fetched|gathered|exchanged)|once instead of",
        r"remote|halo|gather|fetch|exchange|neighbour|neighbor|other ranks|all.?reduce|full\b|store|kept|cache",
    ],
    place=[
        r"HaloStore|GatherNodes",
        r"\bfull\b|\bkey\b|kept",
        r"halo|remote|all.?reduce|gather",
        r"strip|layers?\.(1|2)|messages|gating",
    ],
    wrong=[
        r"parameter.{0,40}(not|never) reduced|reduced twice|gradient.{0,20}counted twice",
        r"divisor|mean of means|own count|wrong labels",
        r"micro.?batch.{0,30}(lost|dropped|overwrit)|of the (previous|last|other) micro.?batch",
        r"backward of (GatherNodes|the gather).{0,30}(wrong|missing)",
    ],
)
WHY = (
    "The remote nodes' rows are fetched for the first layer and found in the store again in layers two and three, since its key is the node range alone: one gather in place of three per micro-batch. On all three ranks messages and gates of the later layers mix fresh own rows with "
    "remote rows of layer one, so forward and gradients are wrong wherever an edge crosses ranks, and the later layers' gradients reach remote nodes past layers one and two. "
    "A right cause says that the remote (gathered, halo) rows of a layer are those kept from an earlier layer, i.e. that the gather is missing in layers two and three. Fix: put the layer into the key."
)
