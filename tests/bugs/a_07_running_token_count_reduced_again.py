"""Accumulation with a running token count, gradients scaled once at the end of the window.
After FAULTS C02-12 (review of torchtune PR 1917).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}

ROWS, LENGTH, VOCABULARY, WIDTH, HEADS = 9, 6, 16, 8, 2
STEPS = 3


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
    reduce_running_count = False

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

    def mine(self, batch, ctx):
        return {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}

    def step(self, model, batch, ctx):
        mine = self.mine(batch, ctx)
        num_tokens = torch.zeros((), dtype=torch.int64)
        for i in range(STEPS):
            micro = {k: v.tensor_split(STEPS)[i] for k, v in mine.items()}
            loss, current_num_tokens = self.loss_sum(model, micro)
            num_tokens += current_num_tokens
            if self.reduce_running_count:
                dist.all_reduce(num_tokens)  # so that the progress bar shows all ranks
            loss.backward()
        if not self.reduce_running_count:
            dist.all_reduce(num_tokens)
        for param in model.parameters():
            dist.all_reduce(param.grad)
            param.grad /= num_tokens


class Buggy(Clean):
    reduce_running_count = True


EXPECT = dict(
    right=[r"0\.26|3\.81|count|denominator|divisor|divided by"],
    place=[
        (
            r"every (rank|parameter|gradient)|all (ranks|parameters|gradients)|scale|factor"
            r"|uniform|count|all.?reduce"
        )
    ],
    wrong=[
        r"gradient.{0,30}(not|never) reduced",
        r"mean of (the )?means",
        r"rows? .{0,30}(lost|missing|dropped)",
    ],
)

WHY = (
    "The running token count, already reduced, is all-reduced again after each micro-batch, "
    "so the one divisor is too large by a common factor."
)
