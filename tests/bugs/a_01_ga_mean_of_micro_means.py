"""A Trainer step under DDP with two accumulated micro-batches of variable length. After FAULTS
C01-01 (transformers PR 34191).
"""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}

ROWS, LENGTH, VOCABULARY, WIDTH, HEADS = 8, 6, 17, 8, 2
ACCUMULATION = 2


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        parts = self.qkv(x).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(WIDTH), Attention()
        self.ln_2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, WIDTH)
        self.wpe = nn.Embedding(LENGTH, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(2))
        self.ln_f = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids):
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=g)
        lengths = torch.randint(1, LENGTH + 1, (ROWS, 1), generator=g)
        padding = torch.arange(LENGTH) >= lengths
        return {"ids": ids[:, :-1], "labels": ids[:, 1:].masked_fill(padding, -100)}

    def loss_sum(self, model, rows):
        labels = rows["labels"]
        logits = model(rows["ids"]).flatten(0, 1)
        loss = F.cross_entropy(logits, labels.flatten(), reduction="sum")
        return loss, (labels != -100).sum()

    def distribute(self, model, ctx):
        return DistributedDataParallel(model)

    def mine(self, batch, ctx):
        return {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}

    def step(self, model, batch, ctx):
        mine = self.mine(batch, ctx)
        num_items_in_batch = (mine["labels"] != -100).sum()
        dist.all_reduce(num_items_in_batch)
        for i in range(ACCUMULATION):
            inputs = {k: v.tensor_split(ACCUMULATION)[i] for k, v in mine.items()}
            last = i == ACCUMULATION - 1
            with contextlib.nullcontext() if last else model.no_sync():
                self.compute_loss(model, inputs, num_items_in_batch, ctx).backward()

    def compute_loss(self, model, inputs, num_items_in_batch, ctx):
        loss, _ = self.loss_sum(model, inputs)
        return loss * ctx.world_size / num_items_in_batch  # DDP averages


class Buggy(Clean):
    def compute_loss(self, model, inputs, num_items_in_batch, ctx):
        logits = model(inputs["ids"])
        loss = F.cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten())
        return loss / ACCUMULATION


EXPECT = dict(
    right=[
        (
            r"mean of (the )?means|(own|local) (count|denominator|number|divisor|mean|weight)"
            r"|micro.?batch.{0,60}count|(count|number).{0,20} of (its|each|their"
            r"|the) (own )?(micro|rank|chunk|part|shard|stretch)|averag.{0,60}(micro|rank"
            r"|chunk|part|shard|means)|means.{0,60}averag|(its|their) own (valid "
            r"|loss.?mask )?(tokens|rows|sum|number|weights|positions)"
        )
    ],
    place=[r"micro", r"count", r"every rank|all ranks|each rank"],
    wrong=[
        r"gradient.{0,30}(not|never) reduced",
        (
            r"counted (twice|two times|2 times)|reduced (twice|again)|repeated (reduc"
            r"|all.?reduce)"
        ),
    ],
)

WHY = (
    "Every micro-batch of every rank takes the mean over its own valid tokens, and these "
    "means are averaged with equal weight."
)
