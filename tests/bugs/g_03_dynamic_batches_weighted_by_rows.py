"""GRPO under FSDP2 with dynamic micro-batches: a rank packs its answers by a token budget, so micro-batches have unlike rows. After
verl's actor with use_dynamic_bsz (loss_scale_factor = rows of the micro-batch / ppo_mini_batch_size on a token mean) and FAULTS C01-09
(open-instruct PR 1161), C01-05 (verl PR 3994).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

TOPOLOGY = {"pools": {"actor": {"axes": {"dp": 3}}}}
GROUPS, ANSWERS, LENGTH, VOCAB, WIDTH, BUDGET = 3, 4, 9, 19, 8, 13


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out, self.up, self.down = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, 13),
            nn.Linear(13, WIDTH),
        )

    def forward(self, x):
        q, k, v = (
            t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1)
        )
        x = x + self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        return x + self.down(F.silu(self.up(x)))


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Policy()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = GROUPS * ANSWERS
        reward = torch.rand(GROUPS, ANSWERS, generator=g)
        spread = reward.std(1, keepdim=True)
        answer = torch.tensor([8, 3, 1, 5, 2, 6, 3, 4, 6, 1, 3, 8])[:, None]
        return {
            "ids": torch.randint(VOCAB, (rows, LENGTH), generator=g),
            "mask": torch.arange(1, LENGTH) <= answer,
            "old": -2.9 + 0.2 * torch.randn(rows, LENGTH - 1, generator=g),
            "advantage": ((reward - reward.mean(1, keepdim=True)) / spread).flatten(),
        }

    def loss_sum(self, model, rows):
        logits = model(rows["ids"])[:, :-1].log_softmax(-1)
        new = logits.gather(-1, rows["ids"][:, 1:, None])[..., 0]
        ratio, a = (new - rows["old"]).exp(), rows["advantage"][:, None]
        each = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.28) * a)
        return (each * rows["mask"]).sum(), rows["mask"].sum()

    def distribute(self, model, ctx):
        for part in (*model.blocks, model):
            fully_shard(part, mesh=ctx.mesh)
            part.set_force_sum_reduction_for_comms(True)
            part.set_gradient_divide_factor(1.0)
        return model

    @staticmethod
    def packed(lengths):
        """Row numbers, packed by the token budget (two packs on every rank)."""
        packs, room = [[]], BUDGET
        for row, length in enumerate(lengths):
            if length > room:
                packs, room = [*packs, []], BUDGET
            packs[-1].append(row)
            room -= length
        return packs

    def scaled(self, total, count, rows, tokens):
        return total / tokens

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        tokens = mine["mask"].sum()
        dist.all_reduce(tokens)
        for pack in self.packed(mine["mask"].sum(1).tolist()):
            micro = {k: v[pack] for k, v in mine.items()}
            total, count = self.loss_sum(model, micro)
            self.scaled(total, count, len(pack), tokens).backward()


class Buggy(Clean):
    def scaled(self, total, count, rows, tokens):
        return total / count * rows / (GROUPS * ANSWERS)


EXPECT = dict(
    right=[
        r"micro-?batch|\brows?\b|token|count|mean of|means|normali|divi\w+|weigh",
        r"own (number|count|tokens|valid)|local|instead of|mean of|means|rows|unlike|unequal|its (own )?(tokens|count|valid)|"
        r"number of tokens|per.?micro|weigh\w*|global|count",
    ],
    place=[r"rows? \W?\d", r"(all|every|each) (ranks?|param)", r"loss", r"micro-?batch"],
    wrong=[
        r"forward (pass )?(is|was) (wrong|different)",
        r"(never|not) (been )?(all.?)?reduced",
        r"counted (twice|\d times)|reduced (twice|again)",
        r"rows? .{0,20}(missing|dropped|lost)",
        r"only (the )?(blocks|head|tokens)\S* (is|are) wrong",
    ],
)
WHY = (
    "Each micro-batch takes the mean over its own tokens, weighted by its share of the 12 rows, so a token counts rows / (12 * tokens "
    "of its micro-batch), from 1/96 (row 11) and 1/60 (row 3) to 1/40 (rows 8-10), instead of 1/50. All parameters are wrong, on all "
    "ranks; forward and reduction are right."
)
