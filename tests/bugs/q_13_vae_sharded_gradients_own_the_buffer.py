"""A variational autoencoder with gradients sharded by hand as in ZeRO-2: each of three micro-batches is reduce-scattered into a receive
buffer and added to the shard that this rank keeps; whole gradients are gathered for the optimizer at the end. After reports on reused
communication buffers: the first micro-batch's shard is the buffer itself and not a copy.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, SIDE, WIDTH, LATENT, MICRO = 11, 6, 8, 3, 3


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 4, 3, stride=2, padding=1),
            nn.ELU(),
            nn.Flatten(),
            nn.Linear(36, WIDTH),
            nn.ELU(),
        )
        self.mean, self.spread = nn.Linear(WIDTH, LATENT), nn.Linear(WIDTH, LATENT)
        self.decoder = nn.Sequential(nn.Linear(LATENT, 13), nn.ELU(), nn.Linear(13, SIDE * SIDE))

    def forward(self, x, noise):
        h = self.encoder(x)
        mean, spread = self.mean(h), self.spread(h)
        out = self.decoder(mean + (0.5 * spread).exp() * noise)
        fit = F.binary_cross_entropy_with_logits(out, x.flatten(1), reduction="sum")
        return fit + 0.5 * (mean.square() + spread.exp() - 1 - spread).sum()


class Sharded:
    """This rank's shard of every gradient, flat, summed over ranks and micro-batches."""

    def __init__(self, params, group, keep):
        self.params, self.group, self.keep = list(params), group, keep
        self.n = dist.get_world_size(group)
        self.buffers = [p.new_empty(-(-p.numel() // self.n)) for p in self.params]
        self.shards = [None] * len(self.params)

    def add(self):
        for i, (p, buffer) in enumerate(zip(self.params, self.buffers, strict=True)):
            flat = F.pad(p.grad.flatten(), (0, self.n * len(buffer) - p.numel()))
            dist.reduce_scatter_tensor(buffer, flat, group=self.group)
            if self.shards[i] is None:
                self.shards[i] = self.keep(buffer)
            else:
                self.shards[i] += buffer
            p.grad = None

    def gather(self):
        for p, shard in zip(self.params, self.shards, strict=True):
            flat = shard.new_empty(self.n * len(shard))
            dist.all_gather_into_tensor(flat, shard, group=self.group)
            p.grad = flat[: p.numel()].view_as(p).clone()


class Clean:
    keep = staticmethod(torch.clone)

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Autoencoder()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.rand(ROWS, 1, SIDE, SIDE, generator=g),
            "noise": torch.randn(ROWS, LATENT, generator=g),
        }

    def loss_sum(self, model, rows):
        return model(rows["x"], rows["noise"]), len(rows["x"])

    def step(self, model, batch, ctx):
        n, me = ctx.axes["dp"], ctx.coords["dp"]
        sharded = Sharded(model.parameters(), ctx.group("dp"), self.keep)
        for at in torch.arange(ROWS).tensor_split(n)[me].tensor_split(MICRO):
            (model(batch["x"][at], batch["noise"][at]) / ROWS).backward()
            sharded.add()
        sharded.gather()


class Buggy(Clean):
    keep = staticmethod(lambda buffer: buffer)


EXPECT = dict(
    right=[
        r"micro.?batch|backward|call|last|third|rows",
        r"last|twice|2 times|2x|third|micro.?batch 2|micro.?batch 3|lost|missing|overwrit|factor|counted",
    ],
    place=[r"(all|every|each) (rank|param|gradient)|reduc|shard|buffer|micro.?batch|backward"],
    wrong=[
        r"(never|not) (been )?(all.?)?reduced|missing (all.?)?reduc",
        r"forward .{0,30}goes wrong in",
        r"own (count|denominator|divisor)",
        r"reduced (over )?too (early|few)",
        r"backward of (the )?(encoder|decoder|mean|spread)\S* (is )?wrong",
        r"last micro.?batch (is )?(lost|missing|never)",
    ],
)
WHY = (
    "The shard kept from the first micro-batch is the receive buffer, which the next reduce-scatter overwrites before it is added to itself: "
    "after the third, every gradient on every rank is twice the third micro-batch's (rows 3, 7 and 10), and the first two are gone. "
    "Forward, backward, divisor and each single reduction are right."
)
