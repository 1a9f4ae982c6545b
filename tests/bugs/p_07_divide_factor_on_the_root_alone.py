"""A language model under HSDP (fully_shard over a 2 x 2 mesh of replicas and shards), losses divided by the global count of tokens, so that the
gradients are to be summed and not averaged. After reports on set_gradient_divide_factor of FSDP2: it is set on the root module alone, the
blocks are FSDP modules of their own.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "fsdp": 2}}}}
ROWS, LENGTH, VOCAB, WIDTH, HEADS = 11, 6, 22, 12, 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 21), nn.Linear(21, WIDTH)

    def forward(self, x):
        q, k, v = (
            t.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for t in self.qkv(self.norm(x)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids):
        x = self.embed(ids) + self.place.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def token_loss(model, rows):
    logits = model(rows["ids"]).flatten(0, 1)
    return F.cross_entropy(logits, rows["labels"].flatten(), ignore_index=-1, reduction="sum")


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return LM()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=g)
        lengths = torch.randint(2, LENGTH + 1, (ROWS, 1), generator=g)
        labels = ids[:, 1:].where(torch.arange(LENGTH) < lengths, -1)
        return {"ids": ids[:, :-1], "labels": labels}

    def loss_sum(self, model, rows):
        return token_loss(model, rows), (rows["labels"] >= 0).sum()

    def sums(self, model):
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)

    def distribute(self, model, ctx):
        for block in model.blocks:
            fully_shard(block, mesh=ctx.mesh)
        fully_shard(model, mesh=ctx.mesh)
        for module in (model, *model.blocks):
            module.set_force_sum_reduction_for_comms(True)  # Gloo has no PREMUL_SUM
        self.sums(model)
        return model

    def step(self, model, batch, ctx):
        count = (batch["labels"] >= 0).sum()
        n, me = ctx.world_size, ctx.coords["dp"] * ctx.axes["fsdp"] + ctx.coords["fsdp"]
        own = torch.arange(ROWS).tensor_split(n)[me]
        micro = own.tensor_split(2)
        for m, at in enumerate(micro):
            model.set_requires_gradient_sync(m == len(micro) - 1)
            (token_loss(model, {k: v[at] for k, v in batch.items()}) / count).backward()


class Buggy(Clean):
    def sums(self, model):
        model.set_gradient_divide_factor(1.0)


EXPECT = dict(
    right=[
        r"blocks",
        r"1/4|0\.25|divided by (the )?(4|world|number of ranks)|averag|mean|quarter|(4|four) (times )?too small|factor",
    ],
    place=[r"blocks"],
    wrong=[
        r"(embed|place|head)\S* (is|are|has|have|gets?) .{0,20}(wrong|factor|1/4|0\.25)",
        r"(counted|reduced|summed|added) (twice|again|\d times)",
        r"(own|local) (count|denominator|divisor)|mean of (the )?means",
        r"forward .{0,40}(goes|is) wrong in|gradient that reaches \S* is wrong",
        r"(over|of) too few ranks|(never|not) (been )?(all.?)?reduced",
    ],
)
WHY = (
    "set_gradient_divide_factor(1.0) is called on the root only, it does not reach the blocks, which keep FSDP's default average over the 2 x 2 ranks. "
    "All parameters of blocks.0 and blocks.1 have 1/4 of their gradient; embed, place, norm and head, which belong to the root, are right. Forward, "
    "backward and losses are right."
)
