"""Accumulation of three micro-batches under DDP, synchronised by a step counter. After FAULTS
class C12 (accelerate: incomplete window at the end of the data).
"""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}

ROWS, LENGTH, VOCABULARY, WIDTH, HEADS = 9, 5, 14, 8, 2
WINDOW = 3


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
        self.norm1, self.attn = nn.LayerNorm(WIDTH), Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids):
        x = self.embed(ids) + self.position(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Clean:
    gradient_accumulation_steps = WINDOW

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
        count = (mine["labels"] != -100).sum()
        dist.all_reduce(count)
        for i in range(WINDOW):
            micro = {k: v.tensor_split(WINDOW)[i] for k, v in mine.items()}
            sync_gradients = (i + 1) % self.gradient_accumulation_steps == 0
            with contextlib.nullcontext() if sync_gradients else model.no_sync():
                loss, _ = self.loss_sum(model, micro)
                (loss * ctx.world_size / count).backward()


class Buggy(Clean):
    gradient_accumulation_steps = 2  # of the config; the window at the end has three


EXPECT = dict(
    right=[
        (
            r"early|before (the )?(last|third|final)|after (the |its )?(first |second )?(reduc"
            r"|all.?reduce)|(last|third|final|micro.?batch|later).{0,80}(not reduced|own|local"
            r"|not summed|unreduced|never)|(not reduced|own|local|unreduced).{0,80}(last|third"
            r"|micro.?batch)"
        )
    ],
    place=[r"micro|last|third|all.?reduce|rows"],
    wrong=[
        r"mean of (the )?means",
        (
            r"counted (twice|two times|2 times)|reduced (twice|again)|repeated (reduc"
            r"|all.?reduce)"
        ),
        r"(never|not) (any )?collective",
    ],
)

WHY = (
    "DDP reduces after the second micro-batch; the third runs under no_sync and stays local "
    "on top of the reduced gradient."
)
