"""Context parallel causal language modelling: labels are the tokens shifted by one. After
FAULTS C04-08 and class C19 (labels shifted after the sequence is split).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"cp": 3}}}}

ROWS, LENGTH, VOCABULARY, WIDTH, HEADS = 4, 9, 12, 8, 2


class GatherSequence(torch.autograd.Function):
    """All-gather along the sequence forward, reduce-scatter backward."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        size, rank = dist.get_world_size(ctx.group), dist.get_rank(ctx.group)
        return grad.chunk(size, dim=1)[rank].contiguous(), None


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.group = None

    def forward(self, x, start):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        if self.group is not None:
            k, v = GatherSequence.apply(k, self.group), GatherSequence.apply(v, self.group)
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k, v))
        at = start + torch.arange(q.shape[2]).view(-1, 1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=torch.arange(k.shape[2]) <= at)
        return self.out(y.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(WIDTH), Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x, start):
        x = x + self.attn(self.norm1(x), start)
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids, start=0, positions=None):
        if positions is None:
            positions = start + torch.arange(ids.shape[1])
        x = self.embed(ids) + self.position(positions)
        for block in self.blocks:
            x = block(x, start)
        return self.head(self.norm(x))


def shift(ids):
    """Each position's label is the next token; the last has none."""
    return F.pad(ids[:, 1:], (0, 1), value=-100)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {"ids": torch.randint(VOCABULARY, (ROWS, LENGTH), generator=g)}

    def loss_sum(self, model, rows):
        labels = shift(rows["ids"])
        return self.token_loss(model(rows["ids"]), labels), (labels != -100).sum()

    @staticmethod
    def token_loss(logits, labels):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    def distribute(self, model, ctx):
        for block in model.blocks:
            block.attn.group = ctx.group("cp")
        return model

    def step(self, model, batch, ctx):
        cp, size = ctx.coords["cp"], ctx.axes["cp"]
        ids = batch["ids"].chunk(size, dim=1)[cp].contiguous()
        labels = self.labels(batch["ids"], ids, ctx)
        count = (labels != -100).sum()
        dist.all_reduce(count, group=ctx.group("cp"))
        loss = self.token_loss(model(ids, cp * LENGTH // size), labels)
        (loss / count).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad, group=ctx.group("cp"))

    def labels(self, all_ids, ids, ctx):
        return shift(all_ids).chunk(ctx.axes["cp"], dim=1)[ctx.coords["cp"]]


class Buggy(Clean):
    def labels(self, all_ids, ids, ctx):
        return shift(ids)


EXPECT = dict(
    right=[
        r"lost|missing|dropped|left out|not (counted|read|used|in)|fewer|absent|zero|without",
        r"position|token|label|target|column|stretch|loss|count|element|logits|head",
    ],
    place=[r"position|token|label|rank|head|logits|column|count"],
    wrong=[
        r"not reduced|never reduced|missing all.?reduce",
        r"mean of (the )?means",
        (
            r"counted (twice|two times|2 times)|reduced (twice|again)|repeated (reduc"
            r"|all.?reduce)"
        ),
        r"micro-?batch.{0,30}(lost|dropped)",
        r"rows? \d.{0,30}(lost|missing|dropped)",
    ],
)

WHY = (
    "Every rank shifts inside its own stretch, so the last position of ranks 0 and 1 has no "
    "label and is lost from the loss and the count."
)
