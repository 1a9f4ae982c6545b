"""SimCLR with a small convolutional encoder written by hand, under DistributedDataParallel. The embeddings of both views are gathered from all ranks with gradients (ranks have unlike numbers of images); each rank computes the loss of its own anchors
against all 2N embeddings: the positive of embedding i is (i + N) mod 2N, as in the single-process code, where the views lie [all first views; all second views].

The bug: one gather instead of two. `gather(torch.cat([z1, z2]))` puts the ranks one after another, [first and second views of rank 0; first and second views of rank 1; ...], and the index arithmetic stays that of [all first; all second].
Origin: the order of views after all_gather in multi-GPU SimCLR / SupCon ports (PyTorch Lightning Bolts, HobbitLong/SupContrast threads on DDP).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, SIZE, WIDTH, OUT, TEMPERATURE = 10, 8, 8, 6, 0.5


class GatherRows(torch.autograd.Function):
    """Rows of all ranks, rank after rank; unlike numbers of rows are padded on the way."""

    @staticmethod
    def forward(ctx, x, sizes, group):
        ctx.sizes, ctx.group = sizes, group
        padded = F.pad(x, (0, 0, 0, max(sizes) - len(x))).contiguous()
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([p[:n] for p, n in zip(parts, sizes, strict=True)])

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        dist.all_reduce(g, group=ctx.group)
        return g.split(ctx.sizes)[dist.get_rank(ctx.group)], None, None


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, WIDTH, 3, padding=1), nn.GroupNorm(2, WIDTH)
        self.down, self.norm2 = nn.Conv2d(WIDTH, WIDTH, 3, stride=2), nn.GroupNorm(2, WIDTH)
        self.projector = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, OUT))

    def forward(self, x):
        x = F.gelu(self.norm(self.stem(x)))
        x = F.gelu(self.norm2(self.down(x)))
        return F.normalize(self.projector(x.mean((2, 3))), dim=1)


def contrast(anchors, everything, places, positives):
    """Sum over anchors; `places`: where each anchor itself lies in `everything`."""
    logits = anchors @ everything.T / TEMPERATURE
    itself = F.one_hot(places, len(everything)).bool()
    return F.cross_entropy(logits.masked_fill(itself, -1e9), positives, reduction="sum")


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Encoder()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        base = torch.randn(ROWS, 3, SIZE, SIZE, generator=g)
        noise = torch.randn(2, ROWS, 3, SIZE, SIZE, generator=g) * 0.7
        return {"view1": base + noise[0], "view2": base.flip(3) + noise[1]}

    def loss_sum(self, model, rows):
        dtype = next(model.parameters()).dtype
        n = len(rows["view1"])
        z = model(torch.cat([rows["view1"], rows["view2"]]).to(dtype))
        places = torch.arange(2 * n)
        return contrast(z, z, places, (places + n) % (2 * n)), 2 * n

    def distribute(self, model, ctx):
        return DistributedDataParallel(model)

    def gather(self, z1, z2, sizes, group):
        """[all first views; all second views]"""
        return torch.cat([GatherRows.apply(z, sizes, group) for z in (z1, z2)])

    def step(self, model, batch, ctx):
        dtype = next(model.parameters()).dtype
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        sizes = [len(v) for v in batch["view1"].tensor_split(ctx.world_size)]
        z = model(torch.cat([mine["view1"], mine["view2"]]).to(dtype))
        everything = self.gather(*z.chunk(2), sizes, ctx.group("dp"))
        n, begin = sum(sizes), sum(sizes[: ctx.rank])
        own = begin + torch.arange(sizes[ctx.rank])
        places = torch.cat([own, own + n])
        loss = contrast(z, everything, places, (places + n) % (2 * n))
        (loss * ctx.world_size / (2 * n)).backward()


class Buggy(Clean):
    def gather(self, z1, z2, sizes, group):
        return GatherRows.apply(torch.cat([z1, z2]), [2 * n for n in sizes], group)


EXPECT = dict(
    right=[
        r"(?i)order|position|place|index|target|label|positive|pair|row|permut|column|interleav|layout|gather",
        r"(?i)gather|contrast|loss|target|positive|logits|negative|view|similarit",
    ],
    place=[r"(?i)gather|loss|target|positive|contrast|logits|view|order"],
    wrong=[
        r"(?i)(gradient|backward) of the (gather|collective) (is|was) (wrong|missing)|gathered without gradient|no gradient (flows )?through the gather",
        r"(?i)(never|not) (been )?(all.?)?reduced|missing all.?reduc|(reduced|summed) (twice|again)",
        r"(?i)divided by (its|their) own|divisor is wrong|wrong divisor|factor (of )?(1/)?[23]\b",
        r"(?i)only (on )?rank \d|rank \d alone|rank 0 is right",
        r"(?i)(encoder|stem|down|projector)'?s? forward (is|goes) wrong|embeddings (are|were) wrong",
        r"(?i)rows? .{0,20}(lost|missing|never read)",
    ],
)
WHY = (
    "z1 and z2 are joined before the gather, so the 20 embeddings lie as [v1 of 0-3; v2 of 0-3; v1 of 4-6; v2 of 4-6; v1 of 7-9; v2 of 7-9], while positions and positives are computed for [v1 of 0-9; v2 of 0-9]. Anchor i (v1 of image i: place i; v2: place 10 + i) masks what lies at its place and takes for its positive what lies at place + 10 mod 20. "
    "Wrong positives: v1 of images 0-6 and v2 of images 4-9 (v1 of image 0 is drawn to v1 of image 6, say; v2 of image 4 to v2 of image 0); right by chance for v2 of 0-3 and v1 of 7-9. Masked is another embedding, and the anchor itself stays among the candidates, for v1 of images 4-9 and v2 of images 0-6. So every anchor, on all three ranks, has at least one of the two wrong. "
    "Encoder forward, the embeddings, the gather's backward, the divisor (20) and the reduction are right; the gradient is that of another contrastive loss, in all 12 parameters, alike on all ranks. Fix: gather each view by itself (or reorder after the gather)."
)
