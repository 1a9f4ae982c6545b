"""FSDP2 with a sampler that shuffles all rows and takes every third one for each rank.
After FAULTS class C16 (replica placement of data and random state): the shuffle is seeded by rank."""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, FEATURES, HIDDEN, CODE = 14, 9, 14, 5


class Coder(nn.Module):
    def __init__(self, a, b, c):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(a, b), nn.LayerNorm(b), nn.Linear(b, c)

    def forward(self, x):
        return self.second(F.gelu(self.norm(self.first(x))))


class AutoEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = Coder(FEATURES, HIDDEN, CODE), Coder(CODE, HIDDEN, FEATURES)
        self.temperature = nn.Parameter(torch.ones(CODE))

    def forward(self, x):
        return self.decoder(torch.tanh(self.encoder(x) * self.temperature))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return AutoEncoder()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        x = torch.randn(ROWS, FEATURES, generator=g)
        return {"x": x, "corrupt": x * (torch.rand(ROWS, FEATURES, generator=g) < 0.8)}

    def loss_sum(self, model, rows):
        return F.mse_loss(model(rows["corrupt"]), rows["x"], reduction="sum"), len(rows["x"])

    def distribute(self, model, ctx):
        for part in (model.encoder, model.decoder, model):
            fully_shard(part, mesh=ctx.mesh)
            part.set_force_sum_reduction_for_comms(True)
            part.set_gradient_divide_factor(1.0)
        return model

    def shuffle_seed(self, ctx):
        return self.seed + 7

    def step(self, model, batch, ctx):
        g = torch.Generator().manual_seed(self.shuffle_seed(ctx))
        mine = torch.randperm(ROWS, generator=g)[ctx.rank :: ctx.world_size]
        loss, _ = self.loss_sum(model, {k: v[mine] for k, v in batch.items()})
        (loss / ROWS).backward()


class Buggy(Clean):
    def shuffle_seed(self, ctx):
        return self.seed + 7 + ctx.rank


EXPECT = dict(
    right=[
        r"rows?\b|samples?",
        (
            r"twice|two times|2 times|more than once|repeated|duplicat|several|thrice|three times|missing|lost|dropped|never"
            r"|absent|not (used|seen|counted|in|there)|\b0 times|weights? (of )?[02]|overlap|zero times|no rank|by none|partition|two or three"
        ),
    ],
    place=[r"rows? \W?\d", r"rows?", r"sampl"],
    wrong=[
        r"gradients? (is|are|was|were) (not|never) (all-)?reduced|missing (all.?)?reduc",
        r"mean of (the )?means|own count",
        r"reduced (twice|again)",
        r"forward (is|was) wrong|backward (is|was) wrong",
        r"stale|not zeroed",
        r"only (the )?(encoder|decoder)",
    ],
)
WHY = (
    "Each rank shuffles with its own seed, so the ranks' every-third rows are not a partition: some rows are "
    "taken by two or three ranks and others by none."
)
