"""Noise prediction by a small U-Net that is cut into a pipeline of three by hand (GPipe, three micro-batches); the skip connection goes from
the first stage straight to the last. After hand-written pipelines with skips: backwards run from the last micro-batch to the first, but the
skip's gradients are sent home from first to last.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"pp": 3}}}}
ROWS, COLOURS, SIDE, WIDTH, TIMES, MICRO = 6, 2, 8, 6, 10, 3


class Down(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Embedding(TIMES, WIDTH)
        self.skip = nn.Conv2d(COLOURS, WIDTH, 3, padding=1)
        self.down = nn.Conv2d(WIDTH, 2 * WIDTH, 3, stride=2, padding=1)

    def forward(self, x, t):
        skip = F.silu(self.skip(x) + self.time(t)[:, :, None, None])
        return F.silu(self.down(skip)), skip


class Middle(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.GroupNorm(3, 2 * WIDTH)
        self.conv = nn.Conv2d(2 * WIDTH, 2 * WIDTH, 3, padding=1)

    def forward(self, h):
        return h + F.silu(self.conv(self.norm(h)))


class Up(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.ConvTranspose2d(2 * WIDTH, WIDTH, 2, stride=2)
        self.join = nn.Conv2d(2 * WIDTH, WIDTH, 3, padding=1)
        self.out = nn.Conv2d(WIDTH, COLOURS, 1)

    def forward(self, h, skip):
        return self.out(F.silu(self.join(torch.cat([self.up(h), skip], 1))))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = Down(), Middle(), Up()


def noisy(rows):
    keep = (1 - (rows["t"].to(rows["x"].dtype) + 1) / (TIMES + 1))[:, None, None, None]
    return keep.sqrt() * rows["x"] + (1 - keep).sqrt() * rows["noise"]


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return UNet()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        shape = ROWS, COLOURS, SIDE, SIDE
        return {
            "x": torch.randn(shape, generator=g).cumsum(3) * 0.5,
            "noise": torch.randn(shape, generator=g),
            "t": torch.randint(TIMES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        h, skip = model.first(noisy(rows), rows["t"])
        out = model.third(model.second(h), skip)
        return F.mse_loss(out, rows["noise"], reduction="sum"), rows["noise"].numel()

    def distribute(self, model, ctx):
        for stage, name in enumerate(("first", "second", "third")):
            if stage != ctx.coords["pp"]:
                setattr(model, name, None)
        return model

    def home(self, skips):
        """The order in which the gradients of the skips are sent to the first stage."""
        return reversed(skips)

    def step(self, model, batch, ctx):
        me, group = ctx.coords["pp"], ctx.group("pp")
        parts = [{k: v[i] for k, v in batch.items()} for i in torch.arange(ROWS).chunk(MICRO)]
        b, small = ROWS // MICRO, SIDE // 2
        deep, wide = (b, 2 * WIDTH, small, small), (b, WIDTH, SIDE, SIDE)

        def get(shape, peer):
            x = torch.empty(shape, dtype=ctx.dtype)
            dist.recv(x, group=group, group_src=peer)
            return x

        def put(x, peer):
            dist.send(x.detach().contiguous(), group=group, group_dst=peer)

        if me == 0:
            kept = [model.first(noisy(p), p["t"]) for p in parts]
            for h, skip in kept:
                put(h, 1)
                put(skip, 2)
            grads = [get(deep, 1) for _ in parts]
            for (h, skip), grad in zip(reversed(kept), grads, strict=True):
                torch.autograd.backward([h, skip], [grad, get(wide, 2)])
        elif me == 1:
            kept = []
            for _ in parts:
                h = get(deep, 0).requires_grad_()
                kept.append((h, model.second(h)))
                put(kept[-1][1], 2)
            for h, out in reversed(kept):
                out.backward(get(deep, 2))
                put(h.grad, 0)
        else:
            kept, skips = [], []
            for p in parts:
                skips.append(get(wide, 0).requires_grad_())
                h = get(deep, 1).requires_grad_()
                loss = F.mse_loss(model.third(h, skips[-1]), p["noise"], reduction="sum")
                kept.append((h, loss / batch["noise"].numel()))
            for h, loss in reversed(kept):
                loss.backward()
                put(h.grad, 1)
            for skip in self.home(skips):
                put(skip.grad, 0)


class Buggy(Clean):
    def home(self, skips):
        return skips


EXPECT = dict(
    right=[
        r"backward|gradient that reaches|gradient .{0,40}(goes into|of what|output|sent|received)",
        r"first|skip",
    ],
    place=[r"first|skip|rank 0"],
    wrong=[
        r"(never|not) (been )?(all.?)?reduced|missing (all.?)?reduc",
        r"(counted|reduced|summed|added) (twice|again|\d times)",
        r"forward .{0,30}goes wrong in",
        r"(gradient|backward) of (the )?(second|third)\S* .{0,20}(is|are) wrong",
        r"divi(des|ded|sor)|denominator",
        r"other targets",
    ],
)
WHY = (
    "The last stage sends the skips' gradients in the order of the micro-batches while the first stage, which runs its backwards from the last "
    "to the first, takes them for the reverse: micro-batches 0 and 2 get each other's gradient at the output of `first`'s skip, number 1 its "
    "own. So `first.skip` and `first.time` on rank 0 are wrong; `first.down`, which has its gradient from the middle stage, and all of "
    "`second` and `third` are right, as is the forward."
)
