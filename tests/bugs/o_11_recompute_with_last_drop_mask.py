"""A regressor with stochastic depth (masks drawn with the batch) on a hand-written interleaved pipeline: two stages of two chunks each,
full recomputation of each chunk in the backward, data parallelism of two, three micro-batches in flight. After reports on activation
checkpointing in pipelines where the recomputation reads state that a later forward has replaced.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "pp": 2}}}}
ROWS, LENGTH, INPUTS, WIDTH, CHUNKS, MICRO = 12, 5, 6, 8, 4, 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.around = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.up, self.down = nn.Linear(WIDTH, 10), nn.Linear(10, WIDTH)

    def forward(self, x, keep):
        y = self.around(self.norm(x).mT).mT
        return x + keep[:, None, None] * self.down(F.silu(self.up(y)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(INPUTS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(CHUNKS))
        self.head = nn.Linear(WIDTH, 2)

    def chunk(self, v, x, keep):
        x = self.enter(x) if v == 0 else x
        x = self.blocks[v](x, keep)
        return self.head(x) if v == CHUNKS - 1 else x


def weighted_error(out, rows):
    each = F.huber_loss(out, rows["y"], reduction="none").sum((1, 2))
    return (each * rows["weight"]).sum()


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, LENGTH, INPUTS, generator=g),
            "y": torch.randn(ROWS, LENGTH, 2, generator=g),
            "weight": torch.rand(ROWS, generator=g) + 0.3,
            "keep": (torch.rand(ROWS, CHUNKS, generator=g) < 0.6).float() / 0.6,
        }

    def loss_sum(self, model, rows):
        x = rows["x"]
        for v in range(CHUNKS):
            x = model.chunk(v, x, rows["keep"][:, v])
        return weighted_error(x, rows), rows["weight"].sum()

    def distribute(self, model, ctx):
        stage = ctx.coords["pp"]
        for v in range(CHUNKS):
            if v % 2 != stage:
                model.blocks[v] = nn.Identity()
        if stage == 0:
            model.head = None
        else:
            model.enter = None
        return model

    def forward_chunk(self, model, v, m, x, keep):
        self.keep[v] = keep
        self.saved[v, m] = x, keep
        with torch.no_grad():
            return model.chunk(v, x, keep)

    def recompute(self, model, v, m):
        x, keep = self.saved.pop((v, m))
        x = x.detach().requires_grad_(v > 0)
        return x, model.chunk(v, x, keep)

    def step(self, model, batch, ctx):
        stage, other = (
            ctx.coords["pp"],
            dist.get_process_group_ranks(ctx.group("pp"))[1 - ctx.coords["pp"]],
        )
        self.saved, self.keep = {}, {}
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        micro = [{k: v.tensor_split(MICRO)[m] for k, v in mine.items()} for m in range(MICRO)]
        for m, rows in enumerate(micro):
            for v in range(stage, CHUNKS, 2):
                x = rows["x"]
                if v > 0:
                    x = torch.empty(len(x), LENGTH, WIDTH, dtype=ctx.dtype)
                    dist.recv(x, other)
                out = self.forward_chunk(model, v, m, x, rows["keep"][:, v])
                if v < CHUNKS - 1:
                    dist.send(out.contiguous(), other)
        for m, rows in enumerate(micro):
            for v in reversed(range(stage, CHUNKS, 2)):
                x, out = self.recompute(model, v, m)
                if v == CHUNKS - 1:
                    (weighted_error(out, rows) / batch["weight"].sum()).backward()
                else:
                    dout = torch.empty_like(out)
                    dist.recv(dout, other)
                    out.backward(dout)
                if v > 0:
                    dist.send(x.grad.contiguous(), other)
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    def recompute(self, model, v, m):
        x, _ = self.saved.pop((v, m))
        x = x.detach().requires_grad_(v > 0)
        return x, model.chunk(v, x, self.keep[v])


EXPECT = dict(
    right=[
        r"recomput|second (forward|run|pass)|checkpoint|again|backward|keep|mask|drop|micro|forward",
        r"mask|keep|drop|differ|state|other|micro|stale|(block|chunk)\w*.{0,40}(gradient|backward)",
    ],
    place=[r"block|chunk|stage|\bpp\b|head|enter", r"micro|rows?"],
    wrong=[
        r"(counted|reduced|summed|added) (twice|again|\d times)",
        r"mean of (the )?means|own (count|denominator|divisor)",
        r"(never|not) (been )?(all.?)?reduced|missing (all.?)?reduc",
        r"(last|third) micro.?batch (is|was) (wrong|lost|missing)",
    ],
)
WHY = (
    "The recomputation of a chunk in the backward takes the stochastic-depth mask that the last forward left, not the micro-batch's own. "
    "The first pass is right; micro-batches one and two are recomputed with the third's mask, so their backward belongs to another "
    "function (also the loss that comes from the recomputed last chunk): all parameters are wrong on all ranks."
)
