"""Context parallel training of a decoder with learned positions. After FAULTS class C19 and
C04 (position ids built on the shard).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"cp": 2}}}}

ROWS, LENGTH, VOCABULARY, WIDTH, HEADS = 5, 8, 12, 8, 2


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
        self.wte = nn.Embedding(VOCABULARY, WIDTH)
        self.wpe = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids, start=0, positions=None):
        if positions is None:
            positions = start + torch.arange(ids.shape[1])
        x = self.wte(ids) + self.wpe(positions)
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

    def step(self, model, batch, ctx):
        cp, size = ctx.coords["cp"], ctx.axes["cp"]
        mine = {k: v.chunk(size, dim=1)[cp].contiguous() for k, v in batch.items()}
        start = cp * LENGTH // size
        logits = model(mine["ids"], start, self.position_ids(mine["ids"], start))
        loss = F.cross_entropy(logits.flatten(0, 1), mine["labels"].flatten(), reduction="sum")
        (loss / (batch["labels"] != -100).sum()).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad, group=ctx.group("cp"))

    def position_ids(self, ids, start):
        return torch.arange(start, start + ids.shape[1])


class Buggy(Clean):
    def position_ids(self, ids, start):
        return torch.arange(ids.shape[1], device=ids.device)


EXPECT = dict(
    right=[r"forward|output|rows?|zero|no gradient|positions?|lost|missing", r"wpe|position"],
    place=[r"wpe|rank 1|position"],
    wrong=[
        r"not reduced|never reduced|missing all.?reduce",
        r"mean of (the )?means",
        (
            r"counted (twice|two times|2 times)|reduced (twice|again)|repeated (reduc"
            r"|all.?reduce)"
        ),
        r"micro-?batch.{0,30}(lost|dropped)",
    ],
)

WHY = (
    "Position ids start at zero on every context parallel rank, so rank 1's stretch gets the "
    "embeddings of positions 0 to 3."
)
