"""Supervised fine-tuning under FSDP2: the loss of the answer tokens, one batch per step. After
FAULTS C01-05 (verl PR 3994).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 4}}}}

ROWS, LENGTH, VOCABULARY, WIDTH, HEADS = 9, 6, 15, 8, 2


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
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=g)
        prompt = torch.randint(0, LENGTH, (ROWS, 1), generator=g)
        return {
            "input_ids": ids[:, :-1],
            "labels": ids[:, 1:],
            "loss_mask": (torch.arange(LENGTH) >= prompt).long(),
        }

    def loss_sum(self, model, rows):
        logits = model(rows["input_ids"]).flatten(0, 1)
        loss = F.cross_entropy(logits, rows["labels"].flatten(), reduction="none")
        return (loss * rows["loss_mask"].flatten()).sum(), rows["loss_mask"].sum()

    def distribute(self, model, ctx):
        for part in (*model.blocks, model):
            fully_shard(part, mesh=ctx.mesh)
            part.set_force_sum_reduction_for_comms(True)
            part.set_gradient_divide_factor(1.0)
        return model

    def mine(self, batch, ctx):
        return {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}

    def step(self, model, batch, ctx):
        mine = self.mine(batch, ctx)
        loss, _ = self.loss_sum(model, mine)
        valid_tokens = self.valid_tokens(mine["loss_mask"], ctx)
        (loss / valid_tokens).backward()

    def valid_tokens(self, loss_mask, ctx):
        total = loss_mask.sum()
        dist.all_reduce(total, group=ctx.group("dp"))
        return total


class Buggy(Clean):
    def valid_tokens(self, loss_mask, ctx):
        # the mean over data parallel ranks: this rank's tokens, then one over the ranks
        return loss_mask.sum() * ctx.axes["dp"]


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
    place=[r"ranks?\b", r"count", r"\bdp\b"],
    wrong=[
        r"gradient.{0,30}(not|never) reduced",
        (
            r"counted (twice|two times|2 times)|reduced (twice|again)|repeated (reduc"
            r"|all.?reduce)"
        ),
        r"micro-?batch(es)? (is|are|was|were) (lost|dropped|missing)",
    ],
)

WHY = (
    "Each data parallel rank divides its loss by its own loss-mask sum and the ranks are "
    "averaged with equal weight."
)
