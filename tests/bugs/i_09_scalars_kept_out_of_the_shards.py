"""A decoder with learned scalar gates under FSDP2. After PyTorch's `fully_shard`, which refuses parameters without dimensions, and the
advice in its threads to pass them as `ignored_params`: what is ignored is not reduced either.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, LENGTH, WIDTH, VOCABULARY, MICRO_BATCHES = 13, 8, 9, 20, 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 13), nn.Linear(13, WIDTH)
        self.gate1, self.gate2 = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.tensor(0.4))

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        x = x + self.gate1 * self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.gate2 * self.down(F.silu(self.up(self.norm2(x))))


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Gated()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=g)
        lengths = torch.randint(2, LENGTH + 1, (ROWS, 1), generator=g)
        return {
            "ids": ids[:, :-1],
            "labels": ids[:, 1:].masked_fill(torch.arange(LENGTH) >= lengths, -100),
        }

    def loss_sum(self, model, rows):
        labels = rows["labels"]
        loss = F.cross_entropy(model(rows["ids"]).flatten(0, 1), labels.flatten(), reduction="sum")
        return loss, (labels != -100).sum()

    def distribute(self, model, ctx):
        scalars = {p for p in model.parameters() if p.dim() == 0}
        for part in (*model.blocks, model):
            fully_shard(part, mesh=ctx.mesh, ignored_params=scalars)
            part.set_force_sum_reduction_for_comms(True)
            part.set_gradient_divide_factor(1.0)
        return model

    def finish(self, model):
        for param in model.parameters():
            if param.dim() == 0:
                dist.all_reduce(param.grad)

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        count = (mine["labels"] != -100).sum()
        dist.all_reduce(count)
        for i in range(MICRO_BATCHES):
            model.set_requires_gradient_sync(i == MICRO_BATCHES - 1)
            loss, _ = self.loss_sum(
                model, {k: v.tensor_split(MICRO_BATCHES)[i] for k, v in mine.items()}
            )
            (loss / count).backward()
        self.finish(model)


class Buggy(Clean):
    def finish(self, model):
        pass


EXPECT = dict(
    right=[
        r"gate",
        r"(not|never|n't|no|missing|without|lacks?|un|only)[ -]?.{0,50}(reduc|summed|sum\b|added|combin|synchroni|averag)|partial|"
        r"own (part|rows|share)|local|differ\w*",
    ],
    place=[r"gate"],
    wrong=[
        r"\b(norm|qkv|out|up|down|embed|head)\S* (is|are|has|have|was|were) (a )?wrong",
        r"(counted|reduced|summed) (twice|again|\d times)",
        r"forward (pass )?(is|was) (wrong|different)|forward differs",
        r"mean of (the )?(rank |ranks' )?means",
        r"(all|every) parameters? (is|are) (wrong|not reduced)",
    ],
)
WHY = (
    "blocks.*.gate1 and gate2 are scalars that FSDP2 was told to ignore, so nobody sums their gradients over dp: each of the three "
    "ranks holds that of its own rows, different on each rank. "
    "All sharded parameters are right."
)
