"""Segmentation of images whose height is cut over three ranks (spatial parallelism): every convolution fetches rows of pixels from both
neighbours first. Two micro-batches, pixels to ignore. After reports on hand-written halo exchanges: in the backward, what comes back from
the neighbours is added at the wrong ends.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"sp": 3}}}}
ROWS, HEIGHT, WIDTH, CLASSES, MICRO = 5, 13, 6, 4, 2


def trade(up, down, group):
    """Send one tensor to the rank above and one to the rank below; what those sent comes back, zeros outside of the image."""
    me, n = dist.get_rank(group), dist.get_world_size(group)
    from_up, from_down, ops = torch.zeros_like(up), torch.zeros_like(down), []
    for peer, out, into in ((me - 1, up, from_up), (me + 1, down, from_down)):
        if 0 <= peer < n:
            ops += [
                dist.P2POp(dist.isend, out.contiguous(), group=group, group_peer=peer),
                dist.P2POp(dist.irecv, into, group=group, group_peer=peer),
            ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return from_up, from_down


class Halo(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, size, group, crossed):
        ctx.rest = size, group, crossed
        above, below = trade(x[:, :, :size], x[:, :, -size:], group)
        return torch.cat([above, x, below], 2)

    @staticmethod
    def backward(ctx, grad):
        size, group, crossed = ctx.rest
        from_up, from_down = trade(grad[:, :, :size], grad[:, :, -size:], group)
        own = grad[:, :, size:-size].clone()
        if crossed:
            from_up, from_down = from_down, from_up
        own[:, :, :size] += from_up
        own[:, :, -size:] += from_down
        return own, None, None, None


class Segmenter(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=(0, 1))
        self.wide = nn.Conv2d(6, 8, 3, padding=(0, 2), dilation=2)
        self.fine = nn.Conv2d(8, 8, 3, padding=(0, 1))
        self.head = nn.Conv2d(8, CLASSES, 1)

    def forward(self, x, pad):
        x = F.gelu(self.stem(pad(x, 1)))
        x = F.gelu(self.wide(pad(x, 2)))
        x = x + F.gelu(self.fine(pad(x, 1)))
        return self.head(x)


def pixels(logits, kinds):
    return F.cross_entropy(logits, kinds, ignore_index=-100, reduction="sum")


class Clean:
    crossed = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Segmenter()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        kind = torch.randint(CLASSES, (ROWS, HEIGHT, WIDTH), generator=g)
        kind[torch.rand(kind.shape, generator=g) < 0.2] = -100
        return {"image": torch.randn(ROWS, 3, HEIGHT, WIDTH, generator=g), "kind": kind}

    def loss_sum(self, model, rows):
        logits = model(rows["image"], lambda x, size: F.pad(x, (0, 0, size, size)))
        return pixels(logits, rows["kind"]), (rows["kind"] >= 0).sum()

    def step(self, model, batch, ctx):
        n, me, group = ctx.axes["sp"], ctx.coords["sp"], ctx.group("sp")
        count = (batch["kind"] >= 0).sum()
        image, kind = (batch[k].tensor_split(n, d)[me] for k, d in (("image", 2), ("kind", 1)))
        for x, y in zip(image.tensor_split(MICRO), kind.tensor_split(MICRO), strict=True):
            logits = model(x, lambda h, size: Halo.apply(h, size, group, self.crossed))
            (pixels(logits, y) / count).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    crossed = True


EXPECT = dict(
    right=[
        r"backward|gradient that reaches|gradient .{0,40}(goes into|of what|output)",
        r"stem|wide|fine|halo|pad",
    ],
    place=[r"stem|wide|fine|halo|trade|pad"],
    wrong=[
        r"(never|not) (been )?all.?reduced|missing (all.?)?reduc",
        r"forward .{0,40}(is|goes|are) wrong",
        r"(divid|count|denominator)\S* (by )?(its|the|their) own",
        r"(counted|reduced|summed|added) (twice|again|\d times)",
        r"backward of (the )?head\S* (is )?wrong|(gradient|grad) of head\S* (is )?wrong",
        r"other targets|ignored pixels",
    ],
)
WHY = (
    "The halo's backward adds the gradient that came from the rank above to the lowest own rows and the one from below to the highest. The "
    "forward is right everywhere. `fine` and `head` have right gradients; the gradient that reaches the output of `wide` is wrong in the "
    "rows next to the cuts, and so are the gradients of `wide` and, once more, of `stem`, on all ranks."
)
