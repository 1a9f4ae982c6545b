"""FSDP2 on a replicate x shard mesh (HSDP) with clipping by a global norm made from the local shards.
After FAULTS C17-06 (PR 862: correct FSDP2 grad norm reduction): the squares are summed over the replicas too."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"replicate": 2, "shard": 2}}}}
ROWS, LENGTH, VOCAB, WIDTH, HEADS = 9, 5, 14, 8, 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.w1, self.w2 = nn.Linear(WIDTH, 17), nn.Linear(17, WIDTH)

    def forward(self, x):
        q, k, v = (
            t.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for t in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(y.transpose(1, 2).flatten(-2))
        return x + self.w2(torch.relu(self.w1(self.norm2(x))) ** 2)


class Encoder(nn.Module):
    """A masked language model."""

    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB + 1, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Clean:
    after, max_norm = "clip", 0.25

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Encoder()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCAB, (ROWS, LENGTH), generator=g)
        masked = torch.rand(ROWS, LENGTH, generator=g) < 0.4
        masked[:, 0] |= ~masked.any(1)
        return {"ids": ids.masked_fill(masked, VOCAB), "labels": ids.masked_fill(~masked, -100)}

    def loss_sum(self, model, rows):
        logits, labels = model(rows["ids"]).flatten(0, 1), rows["labels"].flatten()
        return F.cross_entropy(logits, labels, reduction="sum"), (labels != -100).sum()

    def distribute(self, model, ctx):
        for part in (*model.blocks, model):
            fully_shard(part, mesh=ctx.mesh)
            part.set_force_sum_reduction_for_comms(True)
            part.set_gradient_divide_factor(1.0)
        return model

    def norm_group(self, ctx):
        return ctx.group("shard")

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        loss, _ = self.loss_sum(model, mine)
        (loss / (batch["labels"] != -100).sum()).backward()
        grads = [param.grad.to_local() for param in model.parameters()]
        squares = sum((grad**2).sum() for grad in grads)
        dist.all_reduce(squares, group=self.norm_group(ctx))
        factor = (self.max_norm / (squares.sqrt() + 1e-6)).clamp(max=1.0)
        for grad in grads:
            grad.mul_(factor)


class Buggy(Clean):
    def norm_group(self, ctx):
        return ctx.group("replicate", "shard")


EXPECT = dict(
    right=[
        r"norm|clip",
        (
            r"1\.41|0\.70|sqrt|√|twice|two times|2 times|replica|too (large|big|small|much|strong|far)|larger|counted"
            r"|more than once|factor|multiplied|smaller|over-?clip"
        ),
    ],
    place=[
        r"clip|norm",
        r"replicate",
        r"every (parameter|gradient)|all (parameters|gradients|ranks)",
    ],
    wrong=[
        r"(not|never) (all-)?reduced|missing (all.?)?reduc",
        r"norm (is|was) too small|(only|just) (the |its )?(own|local) shard",
        r"mean of (the )?means",
        r"(not|never) clipped",
        r"rows? (is|are|was|were) (lost|missing|dropped)",
        r"forward (is|was) wrong|backward (is|was) wrong",
    ],
)
WHY = (
    "The squares of the shards are summed over replicate as well as shard, each shard counting once per replica: "
    "the norm is sqrt(2) too large, so every gradient is clipped to 1/sqrt(2) of what it should be."
)
