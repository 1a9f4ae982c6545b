"""Image-text contrastive step with cached representations (GradCache) over two towers under FSDP2 on three ranks with unlike numbers of rows;
every rank has all representations and computes the loss of the whole batch. After CLIP trainers with a learnable temperature outside of the
wrapped towers: its gradient, whole on every rank, is all-reduced like a part.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, SIDE, WORDS, LONG, WIDTH, CHUNKS = 8, 6, 17, 5, 9, 2


class Image(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 7, 3, stride=2)
        self.out = nn.Linear(7 * 4, WIDTH)

    def forward(self, x):
        return F.normalize(self.out(F.gelu(self.conv(x)).flatten(1)), dim=1)


class Text(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        self.out = nn.Sequential(nn.Linear(8, 11), nn.GELU(), nn.Linear(11, WIDTH))

    def forward(self, x):
        return F.normalize(self.out(self.words(x).mean(1)), dim=1)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = Image(), Text()
        self.scale = nn.Parameter(torch.tensor([1.5]))

    def loss(self, a, b):
        logits = a @ b.mT * self.scale.exp()
        y = torch.arange(len(a))
        both = (
            F.cross_entropy(logits, y, reduction="sum"),
            F.cross_entropy(logits.mT, y, reduction="sum"),
        )
        return sum(both) / 2


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Pair()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "image": torch.randn(ROWS, 3, SIDE, SIDE, generator=g),
            "text": torch.randint(WORDS, (ROWS, LONG), generator=g),
        }

    def loss_sum(self, model, rows):
        return model.loss(model.image(rows["image"]), model.text(rows["text"])), len(rows["text"])

    def distribute(self, model, ctx):
        fully_shard(model.image, mesh=ctx.mesh)
        fully_shard(model.text, mesh=ctx.mesh)
        return model

    def outside(self, model):
        """Parameters outside of the towers whose gradients are parts."""
        return []

    def step(self, model, batch, ctx):
        n, me, group = ctx.axes["dp"], ctx.coords["dp"], ctx.group("dp")
        at = torch.arange(ROWS).tensor_split(n)[me]
        chunks = at.tensor_split(CHUNKS)
        whole = []
        for name in ("image", "text"):
            table = torch.zeros(ROWS, WIDTH, dtype=ctx.dtype)
            with torch.no_grad():
                for c in chunks:
                    table[c] = getattr(model, name)(batch[name][c])
            dist.all_reduce(table, group=group)
            whole.append(table.requires_grad_())
        (model.loss(*whole) / ROWS).backward()
        for name, table in zip(("image", "text"), whole, strict=True):
            for c in chunks:
                # fully_shard takes the mean over the ranks
                (getattr(model, name)(batch[name][c]) * table.grad[c] * n).sum().backward()
        for p in self.outside(model):
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    def outside(self, model):
        return [model.scale]


EXPECT = dict(
    right=[r"scale", r"factor|times|\b3\b|counted|again|already|n x|reduced"],
    place=[r"scale"],
    wrong=[
        r"(never|not) (been )?(all.?)?reduced|missing (all.?)?reduc",
        r"(image|text)\S* .{0,30}(is|are|goes) wrong",
        r"forward .{0,30}goes wrong in",
        r"own (count|denominator|divisor)",
        r"(all|every|each) (parameter|gradient)s? (is|are|has|have) .{0,20}(factor|times)",
        r"temperature of (another|the other)",
    ],
)
WHY = (
    "Every rank computes the loss of the whole batch, so the gradient of `scale` is complete on each of the three; the all-reduce (sum) over dp "
    "makes it 3 times the right one on every rank. The towers' gradients, cached, sliced and reduced by FSDP2, are right."
)
