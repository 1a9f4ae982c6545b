"""Context parallelism beside data parallelism, ranks laid out as (dp, cp), cp fastest. After
FAULTS class C16 (rank layout of data loaders).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "cp": 2}}}}

ROWS, LENGTH, VOCABULARY, WIDTH, HEADS = 6, 8, 13, 8, 2


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


class Clean:
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
        for block in model.blocks:
            block.attn.group = ctx.group("cp")
        return model

    def place(self, ctx):
        """(data parallel rank, context parallel rank)"""
        return ctx.rank // ctx.axes["cp"], ctx.rank % ctx.axes["cp"]

    def step(self, model, batch, ctx):
        dp_rank, cp_rank = self.place(ctx)
        rows = {k: v.chunk(ctx.axes["dp"])[dp_rank] for k, v in batch.items()}
        mine = {k: v.chunk(ctx.axes["cp"], dim=1)[cp_rank].contiguous() for k, v in rows.items()}
        logits = model(mine["ids"], cp_rank * LENGTH // ctx.axes["cp"])
        loss = F.cross_entropy(logits.flatten(0, 1), mine["labels"].flatten(), reduction="sum")
        count = (mine["labels"] != -100).sum()
        dist.all_reduce(count)
        (loss / count).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)


class Buggy(Clean):
    def place(self, ctx):
        return ctx.rank % ctx.axes["dp"], ctx.rank // ctx.axes["dp"]


EXPECT = dict(
    right=[
        (
            r"(different|other|unlike|not the same|wrong|own) (rows|inputs?|samples|data|batch"
            r"|positions)|(rows|inputs?|data|batch|positions|stretch).{0,80}(differ|unlike"
            r"|other|mixed|not the same|lost|missing|twice|swap)|do(es)? not (see|read|hold"
            r"|get) the same|transposed|swapped"
        )
    ],
    place=[r"\bcp\b|\bdp\b|rank|rows|attn|inputs?"],
    wrong=[
        r"not reduced|never reduced|missing all.?reduce",
        r"mean of (the )?means",
        r"micro-?batch.{0,30}(lost|dropped)",
    ],
)

WHY = (
    "Ranks compute their place as if dp were the fastest axis: the ranks of a cp group hold "
    "the same stretch of different rows."
)
