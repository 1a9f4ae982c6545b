"""Distillation with a KL loss that is computed in chunks along the sequence to save memory.
After FAULTS C01-10 (torchtune issue 1865).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}

ROWS, LENGTH, VOCABULARY, WIDTH, HEADS = 7, 8, 13, 8, 2
CHUNKS = 4


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


def forward_kl(student, teacher, mask):
    """SUM over the valid tokens of -p_teacher log p_student."""
    cross = -(teacher.softmax(-1) * student.log_softmax(-1)).sum(-1)
    return (cross * mask).sum()


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        lengths = torch.randint(1, LENGTH + 1, (ROWS, 1), generator=g)
        return {
            "ids": torch.randint(VOCABULARY, (ROWS, LENGTH), generator=g),
            "teacher": 2 * torch.randn(ROWS, LENGTH, VOCABULARY, generator=g),
            "mask": torch.arange(LENGTH) < lengths,
        }

    def loss_sum(self, model, rows):
        return forward_kl(model(rows["ids"]), rows["teacher"], rows["mask"]), rows["mask"].sum()

    def mine(self, batch, ctx):
        return {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}

    def step(self, model, batch, ctx):
        mine = self.mine(batch, ctx)
        count = mine["mask"].sum()
        dist.all_reduce(count)
        logits = model(mine["ids"]).chunk(CHUNKS, dim=1)
        teacher = mine["teacher"].chunk(CHUNKS, dim=1)
        masks = mine["mask"].chunk(CHUNKS, dim=1)
        parts = zip(logits, teacher, masks, strict=True)
        self.chunked_loss(parts, count, ctx).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)

    def chunked_loss(self, parts, count, ctx):
        total = 0.0
        for student, teacher, mask in parts:
            total = total + forward_kl(student, teacher, mask)
        return total / count


class Buggy(Clean):
    def chunked_loss(self, parts, count, ctx):
        total = 0.0
        for student, teacher, mask in parts:
            total = total + forward_kl(student, teacher, mask) / mask.sum().clamp(min=1)
        return total / CHUNKS / ctx.world_size


EXPECT = dict(
    right=[
        (
            r"mean of (the )?means|(own|local) (count|denominator|number|divisor|mean|weight)"
            r"|micro.?batch.{0,60}count|(count|number).{0,20} of (its|each|their"
            r"|the) (own )?(micro|rank|chunk|part|shard|stretch)|averag.{0,60}(micro|rank"
            r"|chunk|part|shard|means)|means.{0,60}averag|(its|their) own (valid "
            r"|loss.?mask )?(tokens|rows|sum|number|weights|positions)|weight.{0,40}(token"
            r"|position|column)|(token|position|column)s?.{0,60}(weigh|unlike|differ|factor)"
        )
    ],
    place=[r"chunk|micro|part|stretch|column|position|token|rank"],
    wrong=[
        r"gradient.{0,30}(not|never) reduced",
        (
            r"counted (twice|two times|2 times)|reduced (twice|again)|repeated (reduc"
            r"|all.?reduce)"
        ),
    ],
)

WHY = (
    "Every chunk of the sequence is averaged over its own valid tokens and the chunks, some "
    "of nothing but padding, have equal weight."
)
