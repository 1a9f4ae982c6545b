"""A two-stage pipeline by hand beside two replicas; a micro-batch's mean loss is weighted by its share of rows. After
torch.distributed.pipelining (micro-batches by tensor_split/chunk, losses combined by the user) and FAULTS C01: rows are cut by
torch.chunk (3, 3, 1), the weights come from tensor_split (3, 2, 2).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "pp": 2}}}}
ROWS, STEPS, SERIES, WIDTH, AHEAD, MICRO_BATCHES = 14, 8, 3, 7, 2, 3


class Encode(nn.Module):
    def __init__(self):
        super().__init__()
        self.inputs = nn.Linear(SERIES, WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        h = self.inputs(x)
        return self.norm(h + F.gelu(self.conv(h.mT)).mT)


class Forecast(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(STEPS, STEPS)
        self.hidden, self.out = nn.Linear(WIDTH, 9), nn.Linear(9, SERIES * AHEAD)

    def forward(self, h):
        h = h + torch.tanh(self.mix(h.mT)).mT
        return self.out(F.silu(self.hidden(h.mean(1)))).unflatten(1, (AHEAD, SERIES))


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.forecast = Encode(), Forecast()


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Forecaster()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        x = torch.randn(ROWS, STEPS + AHEAD, SERIES, generator=g).cumsum(1)
        return {"past": x[:, :STEPS], "future": x[:, STEPS:]}

    @staticmethod
    def row_losses(guess, future):
        return F.huber_loss(guess, future, reduction="none").mean((1, 2))

    def loss_sum(self, model, rows):
        losses = self.row_losses(model.forecast(model.encode(rows["past"])), rows["future"])
        return losses.sum(), len(losses)

    def distribute(self, model, ctx):
        delattr(model, ("forecast", "encode")[ctx.coords["pp"]])
        return model

    def shares(self, rows):
        return [len(part) / ROWS for part in rows.chunk(MICRO_BATCHES)]

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        past, future = (mine[k].chunk(MICRO_BATCHES) for k in ("past", "future"))
        held = []
        if ctx.coords["pp"] == 0:
            for rows in past:
                held.append(model.encode(rows))
                dist.send(held[-1].detach().contiguous(), ctx.rank + 1)
            for h in held:
                grad = torch.empty_like(h)
                dist.recv(grad, ctx.rank + 1)
                h.backward(grad)
        else:
            for rows, share in zip(future, self.shares(mine["past"])):
                h = torch.empty(len(rows), STEPS, WIDTH, dtype=ctx.dtype)
                dist.recv(h, ctx.rank - 1)
                loss = self.row_losses(model.forecast(h.requires_grad_()), rows).mean() * share
                held.append((h, loss))
            for h, loss in held:
                loss.backward()
                dist.send(h.grad.contiguous(), ctx.rank - 1)
        for param in model.parameters():
            dist.all_reduce(param.grad, group=ctx.group("dp"))


class Buggy(Clean):
    def shares(self, rows):
        return [len(part) / ROWS for part in rows.tensor_split(MICRO_BATCHES)]


EXPECT = dict(
    right=[
        r"micro.?batch|rows?",
        r"weight|scale|factor|\b2/3\b|0\.6|twice|\b2\b|coefficient|normali[sz]|too (large|small|much|little)|divided|mean|counted|differ",
    ],
    place=[r"micro.?batch", r"rows? \W?\d|rows", r"(all|every|each) (rank|parameter|stage)s?"],
    wrong=[
        r"(not|never) (all.?)?(reduced|summed|averaged)",
        r"forward (pass )?(is|was) wrong",
        r"reduced (twice|again)",
        r"only (the )?(encode|forecast|first stage|last stage)\S* (is|are) wrong",
        r"micro.?batch(es)? \S* ?(is|are|was|were) (lost|missing|dropped|left out)",
    ],
)
WHY = (
    "The seven rows of a replica are cut 3, 3, 1, but the mean losses are weighted 3, 2, 2 (of 14): the rows of the second micro- "
    "batch count 2/3, the single row of the third counts 2. The first is right; all parameters of both stages are wrong on all ranks."
)
