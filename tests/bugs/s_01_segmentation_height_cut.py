"""Semantic segmentation by a small stack of convolutions with the height of the images cut over three ranks (4, 4 and 3 lines), the lines
beside the cuts exchanged by p2p in an autograd.Function; two micro-batches. After the well-known kind of mistake in hand-written halo
exchanges: the lines that come back in the backward are written with `=` where they belong to a sum.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"sp": 3}}}}
IMAGES, CHANNELS, HEIGHT, BREADTH, WIDTH, KINDS, MICRO = 4, 3, 11, 6, 5, 4, 2


def swap(up, down, group):
    """`up` goes to the rank above, `down` to the one below; what comes from above and from below, or None at the image's border."""
    me, n = dist.get_rank(group), dist.get_world_size(group)
    got, ops = [None, None], []
    for i, (peer, line) in enumerate([(me - 1, up), (me + 1, down)]):
        if 0 <= peer < n:
            got[i], peer = torch.empty_like(line), dist.get_global_rank(group, peer)
            ops.append(dist.P2POp(dist.isend, line.contiguous(), peer, group))
            ops.append(dist.P2POp(dist.irecv, got[i], peer, group))
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return got


class Halo(torch.autograd.Function):
    """One line more above and below: the neighbours', zeros at the border."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        above, below = swap(x[:, :, :1].contiguous(), x[:, :, -1:].contiguous(), group)
        zero = torch.zeros_like(x[:, :, :1])
        return torch.cat([zero if above is None else above, x, zero if below is None else below], 2)

    @staticmethod
    def backward(ctx, grad):
        above, below = swap(grad[:, :, :1].contiguous(), grad[:, :, -1:].contiguous(), ctx.group)
        own = grad[:, :, 1:-1].clone()
        if above is not None:
            own[:, :, :1] += above
        if below is not None:
            own[:, :, -1:] += below
        return own, None


class Careless(Halo):
    @staticmethod
    def backward(ctx, grad):
        above, below = swap(grad[:, :, :1].contiguous(), grad[:, :, -1:].contiguous(), ctx.group)
        own = grad[:, :, 1:-1].clone()
        if above is not None:
            own[:, :, :1] = above
        if below is not None:
            own[:, :, -1:] = below
        return own, None


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Conv2d(CHANNELS, WIDTH, 3, padding=(0, 1))
        self.middle = nn.Conv2d(WIDTH, WIDTH, 3, padding=(0, 1))
        self.last = nn.Conv2d(WIDTH, WIDTH + 1, 3, padding=(0, 1))
        self.head = nn.Conv2d(WIDTH + 1, KINDS, 1)

    def forward(self, x, pad):
        h = F.gelu(self.enter(pad(x)))
        h = F.gelu(self.middle(pad(h)))
        return self.head(F.gelu(self.last(pad(h))))


def pixel_loss(logits, kinds):
    return F.cross_entropy(logits, kinds, reduction="sum", ignore_index=-1)


class Clean:
    halo = Halo

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        kind = torch.randint(-1, KINDS, (IMAGES, HEIGHT, BREADTH), generator=g)
        return {"x": torch.randn(IMAGES, CHANNELS, HEIGHT, BREADTH, generator=g), "kind": kind}

    def loss_sum(self, model, rows):
        logits = model(rows["x"], lambda h: F.pad(h, (0, 0, 1, 1)))
        return pixel_loss(logits, rows["kind"]), (rows["kind"] >= 0).sum()

    def step(self, model, batch, ctx):
        n, me, group = ctx.axes["sp"], ctx.coords["sp"], ctx.group("sp")
        x = batch["x"].tensor_split(n, 2)[me]
        kind = batch["kind"].tensor_split(n, 1)[me]
        count = (batch["kind"] >= 0).sum()
        for a, b in zip(x.chunk(MICRO), kind.chunk(MICRO), strict=True):
            logits = model(a, lambda h: self.halo.apply(h, group))
            (pixel_loss(logits, b) / count).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    halo = Careless


EXPECT = dict(
    right=[
        r"backward|gradient (that|of what|which) (reaches|comes|goes)",
        r"middle|last|halo|careless|autograd.?function",
        r"between|halo|careless|rows?|positions?|lines?|vectors?|elements?|reach",
    ],
    place=[r"middle|last|halo|careless", r"rank"],
    wrong=[
        r"forward is (wrong|right up to)|forward goes wrong",
        r"(never|not) (been )?(all.?)?reduced|missing (all.?)?reduc",
        r"(own|local) (count|denominator|divisor)",
        r"(backward|gradient) of (the )?`?head`? .{0,20}wrong",
        r"(counted|reduced|summed|added) (twice|again|\d times)",
    ],
)
WHY = (
    "Halo's backward overwrites the gradient of the first and last own lines beside a cut with what the neighbour sends back, instead of adding "
    "it: the own part of those lines is lost (last line on rank 0, first and last on rank 1, first on rank 2). The forward is right everywhere, "
    "`head` and `last` get right gradients; the gradient that reaches `middle`'s output is the first wrong one, so `middle` and `enter` are wrong."
)
