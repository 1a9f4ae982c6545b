"""Layer-wise optimizer: updated parameters are gathered with the gradient buffer as receive buffer.
After FAULTS C12-07 (Megatron-LM PR 4609): the buffer is not zeroed after it, the backward adds.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}

ROWS, LENGTH, WIDTH, HEADS, VOCABULARY = 10, 5, 9, 3, 14


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = nn.Linear(WIDTH, 11, bias=False), nn.Linear(WIDTH, 11, bias=False)
        self.down = nn.Linear(11, WIDTH, bias=False)

    def forward(self, x):
        y = self.norm1(x)
        parts = (self.q(y), *self.kv(y).chunk(2, dim=-1))
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(-2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Bucket:
    """Flat parameters (each rank's optimizer owns a chunk) and flat gradients."""

    def __init__(self, params, ctx):
        self.params, self.ranks, self.rank = params, ctx.axes["dp"], ctx.coords["dp"]
        size = sum(p.numel() for p in params)
        size += -size % self.ranks
        self.grad_data = torch.zeros(size, dtype=params[0].dtype)
        self.group = ctx.group("dp")

    def views(self, flat):
        at = 0
        for param in self.params:
            yield param, flat[at : at + param.numel()].view_as(param)
            at += param.numel()

    def zero_grad(self):
        self.grad_data.zero_()
        for param, view in self.views(self.grad_data):
            param.grad = view

    def gather_params(self, into):
        flat = torch.cat([p.detach().flatten() for p in self.params])
        owned = F.pad(flat, (0, len(into) - len(flat))).chunk(self.ranks)[self.rank].clone()
        dist.all_gather(list(into.chunk(self.ranks)), owned, group=self.group)
        with torch.no_grad():
            for param, view in self.views(into):
                param.copy_(view)

    def reduce(self):
        dist.all_reduce(self.grad_data, group=self.group)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(VOCABULARY, (ROWS, LENGTH), generator=g),
            "labels": torch.randint(VOCABULARY, (ROWS, LENGTH), generator=g),
        }

    def loss_sum(self, model, rows):
        logits, labels = model(rows["ids"]).flatten(0, 1), rows["labels"].flatten()
        return F.cross_entropy(logits, labels, reduction="sum"), labels.numel()

    def distribute(self, model, ctx):
        outer = [*model.embed.parameters(), *model.norm.parameters(), *model.head.parameters()]
        self.outer = Bucket(outer, ctx)
        self.layers = [Bucket(list(block.parameters()), ctx) for block in model.blocks]
        return model

    def prepare(self):
        for bucket in self.layers:
            bucket.gather_params(into=bucket.grad_data)
            bucket.zero_grad()

    def step(self, model, batch, ctx):
        self.outer.gather_params(into=torch.empty_like(self.outer.grad_data))
        self.outer.zero_grad()
        self.prepare()
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        loss, _ = self.loss_sum(model, mine)
        (loss / (ROWS * LENGTH)).backward()
        for bucket in (self.outer, *self.layers):
            bucket.reduce()


class Buggy(Clean):
    def prepare(self):
        for bucket in self.layers:
            bucket.zero_grad()
            bucket.gather_params(into=bucket.grad_data)


EXPECT = dict(
    right=[
        r"stale|left.?over|not (been )?(zeroed|cleared|reset)|before the backward|accumulat|buffer"
        r"|carried|parameter'?s? (own )?value|values? of the (parameter|weight)|weights? (themsel|added|itself)"
        r"|weight decay|penalt|(add|extra|plus|foreign|something|constant|not (from|of) (any|the) row"
        r"|outside)|no (combination|row)|residual|unexplained|does not depend on the (rows|batch|data)"
        r"|proportional to the (param|weight)"
    ],
    place=[r"blocks"],
    wrong=[
        r"never (been )?(all.?)?reduced|is not reduced|missing (all.?)?reduc",
        r"counted (twice|two times|2 times)|reduced (twice|again)",
        r"forward (pass )?(is wrong|differs)",
        r"rows? .{0,30}(lost|missing|dropped)",
        r"(embed|head)\S* (is|has) (stale|left)",
    ],
)

WHY = (
    "The blocks' gradient buffers still hold the gathered parameters when the backward adds to "
    "them: after the sum each blocks gradient is the right one plus three times the parameter."
)
