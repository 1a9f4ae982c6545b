"""A graph classifier (GIN, small graphs of unlike size, padded) in DDP of three ranks whose data give 3, 2 and 1 micro-batches: the loop runs under `with model.join():`. no_sync does not work inside join (pytorch/pytorch issue
#44425), so every backward reduces; the loss of each micro-batch is its sum over the rows of the whole step, times the ranks for DDP's average. The right program takes each micro-batch's reduced gradient
out of .grad, adds it up elsewhere and clears .grad; at the end the ranks that joined early receive the sum from the rank that came last, for they have not seen its last reductions.

The bug: the micro-batches are accumulated in .grad, as one does without join. DDP reduces the whole of .grad again with each backward, which is harmless while all ranks take part, since all hold the same earlier average. But a rank
that has joined shadows the all-reduce with zeros (pytorch/pytorch PR #42577) and the average is still over three: the earlier average comes back times 2/3, then times 1/3.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
NODES = [4, 6, 3, 5, 7, 4, 6, 3, 5, 7, 4]
ROWS, MOST, KINDS, WIDTH, CLASSES = len(NODES), max(NODES), 5, 8, 3
PARTS = [[(0, 2), (2, 4), (4, 5)], [(5, 7), (7, 9)], [(9, 11)]]


class Graphs(nn.Module):
    def __init__(self):
        super().__init__()
        self.kind = nn.Embedding(KINDS, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 10), nn.Tanh(), nn.Linear(10, WIDTH)) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, kind, edges, there):
        h = self.kind(kind) * there[..., None]
        for layer in self.layers:
            h = torch.tanh(layer(1.1 * h + edges.to(h.dtype) @ h)) * there[..., None]
        return self.head(h.sum(1))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Graphs()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        there = torch.arange(MOST) < torch.tensor(NODES)[:, None]
        upper = (
            (torch.rand(ROWS, MOST, MOST, generator=g) < 0.4).triu(1)
            & there[:, None]
            & there[:, :, None]
        )
        return {
            "kind": torch.randint(KINDS, (ROWS, MOST), generator=g),
            "edges": upper | upper.transpose(1, 2),
            "there": there,
            "label": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        logits = model(rows["kind"], rows["edges"], rows["there"])
        return F.cross_entropy(logits, rows["label"], reduction="sum"), len(rows["label"])

    def distribute(self, model, ctx):
        return DistributedDataParallel(model)

    def backwards(self, model, batch, ctx):
        """Yields after the backward of each of this rank's micro-batches."""
        for first, end in PARTS[ctx.rank]:
            loss = self.loss_sum(model, {k: v[first:end] for k, v in batch.items()})[0]
            (loss * ctx.world_size / ROWS).backward()
            yield

    def step(self, model, batch, ctx):
        total = [torch.zeros_like(p) for p in model.parameters()]
        with model.join():
            for _ in self.backwards(model, batch, ctx):
                for t, p in zip(total, model.parameters()):
                    t += p.grad
                    p.grad = None
        for t, p in zip(total, model.parameters()):
            dist.broadcast(t, src=0)
            p.grad = t


class Buggy(Clean):
    def step(self, model, batch, ctx):
        with model.join():
            for _ in self.backwards(model, batch, ctx):
                pass
        for p in model.parameters():
            dist.broadcast(p.grad, src=0)


EXPECT = dict(
    right=[
        r"micro.?batch|rows? \d",
        r"factor|scale|scaled|weigh|multipl|divid|averag|shrink|shrunk|too small|2/3|1/3|2/9|0\.\d+",
        r"again|reduced (each|every)|earlier|first|second|accumul|join|zero|0\.2|2/9|1/3|before",
    ],
    place=[r"micro.?batch|join|all.?reduce|rows? \d"],
    wrong=[
        r"(never|not) (been )?(all.?)?reduced|missing all.?reduc",
        r"each rank .{0,20}own (count|number|denominator)",
        r"micro.?batch\S* .{0,20}(lost|dropped|never read|overwritten)",
        r"row 4 .{0,20}(is wrong|too small|too large|scaled|lost)",
        r"ranks? (hold|have|has) different|differ(s)? (from rank to rank|between ranks)",
        r"forward (is wrong|goes wrong)|goes wrong in the forward",
        r"rows? .{0,20}(never read|read twice)",
    ],
)
WHY = (
    "Ranks 0, 1, 2 have 3, 2, 1 micro-batches. After the first backward .grad is the right average A1. In the second, rank 2 has joined and gives zeros, ranks 0 and 1 each give A1 plus their own: the average over 3 is 2/3*A1 plus the right second share. In the third only rank 0 is left: everything before is "
    "multiplied by 1/3. So the first micro-batches of all three ranks (rows 0-1, 5-6, 9-10) enter with 2/9 of their weight, the second ones of ranks 0 and 1 (rows 2-3, 7-8) with 1/3, and the third, row 4 of rank 0, is right. All parameters alike; after the broadcast from rank 0 all ranks hold the same wrong "
    "gradient. Forward, rows, the division by 11 rows and the average over the initial world size are right. The fix is to keep what has been reduced out of .grad (or not to accumulate under join)."
)
