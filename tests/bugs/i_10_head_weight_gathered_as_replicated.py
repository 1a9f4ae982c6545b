"""A decoder whose output matrix is a DTensor cut over three data-parallel ranks and gathered by hand for a chunked cross entropy outside
the FSDP2 modules. After FAULTS C05-07 (Automodel PR 1260) and torchtitan / Liger threads on `lm_head.weight.full_tensor()`: without
gradient placements the backward is a slice.
"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Shard, distribute_tensor
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, LENGTH, WIDTH, VOCABULARY, CHUNKS = 10, 9, 8, 23, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gate, self.up, self.down = (
            nn.Linear(WIDTH, 12),
            nn.Linear(WIDTH, 12),
            nn.Linear(12, WIDTH),
        )

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Trunk(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = Trunk()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Decoder()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=g)
        lengths = torch.randint(2, LENGTH + 1, (ROWS, 1), generator=g)
        return {
            "ids": ids[:, :-1],
            "labels": ids[:, 1:].masked_fill(torch.arange(LENGTH) >= lengths, -100),
        }

    @staticmethod
    def chunked_loss(hidden, weight, labels):
        pairs = zip(
            hidden.flatten(0, 1).tensor_split(CHUNKS),
            labels.flatten().tensor_split(CHUNKS),
            strict=True,
        )
        return sum(F.cross_entropy(h @ weight.T, y, reduction="sum") for h, y in pairs)

    def loss_sum(self, model, rows):
        loss = self.chunked_loss(model.trunk(rows["ids"]), model.head.weight, rows["labels"])
        return loss, (rows["labels"] != -100).sum()

    def distribute(self, model, ctx):
        for part in (*model.trunk.blocks, model.trunk):
            fully_shard(part, mesh=ctx.mesh)
            part.set_force_sum_reduction_for_comms(True)
            part.set_gradient_divide_factor(1.0)
        model.head.weight = nn.Parameter(
            distribute_tensor(model.head.weight.detach(), ctx.mesh, [Shard(0)])
        )
        return model

    def whole(self, weight):
        return weight.full_tensor(grad_placements=[Partial("sum")])

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        loss = self.chunked_loss(
            model.trunk(mine["ids"]), self.whole(model.head.weight), mine["labels"]
        )
        (loss / (batch["labels"] != -100).sum()).backward()


class Buggy(Clean):
    def whole(self, weight):
        return weight.full_tensor()


EXPECT = dict(
    right=[
        r"head",
        r"(not|never|n't|no|missing|without|lacks?|un|only)[ -]?.{0,50}(reduc|summed|sum\b|added|combin|synchroni|averag|contribut|rows)|"
        r"partial|own (part|rows|share|data)|local",
    ],
    place=[r"head"],
    wrong=[
        r"(trunk|blocks|embed)\S* (is|are|has|have|was|were) (a )?wrong",
        r"(counted|reduced|summed) (twice|again|\d times)",
        r"forward (pass )?(is|was) (wrong|different)|forward differs",
        r"mean of (the )?(rank |ranks' )?means",
        r"(all|every) parameters? (is|are) (wrong|not reduced)",
    ],
)
WHY = (
    "full_tensor() without gradient placements takes the gradient of the gathered head.weight for replicated and gives each rank its "
    "slice of its own gradient, so no sum over dp takes place: the shard of head.weight on rank r has only what rank r's own rows give. "
    "The trunk, reduced by FSDP2, and the forward are right."
)
