"""Context parallel training with gathered keys and values and a masked loss. After FAULTS
C04-02 (Megatron-LM PR 7513).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"cp": 3}}}}

ROWS, LENGTH, VOCABULARY, WIDTH, HEADS = 5, 9, 14, 8, 2


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

    def step(self, model, batch, ctx):
        cp, size = ctx.coords["cp"], ctx.axes["cp"]
        mine = {k: v.chunk(size, dim=1)[cp].contiguous() for k, v in batch.items()}
        loss = self.token_loss(model(mine["ids"], cp * (LENGTH // size)), mine["labels"])
        num_tokens = self.num_tokens(mine["labels"], ctx)
        (loss * size / num_tokens).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad, group=ctx.group("cp"))
            param.grad /= size

    @staticmethod
    def token_loss(logits, labels):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    def num_tokens(self, labels, ctx):
        count = (labels != -100).sum()
        dist.all_reduce(count, group=ctx.group("cp"))
        return count


class Buggy(Clean):
    def step(self, model, batch, ctx):
        cp, size = ctx.coords["cp"], ctx.axes["cp"]
        mine = {k: v.chunk(size, dim=1)[cp].contiguous() for k, v in batch.items()}
        loss = self.token_loss(model(mine["ids"], cp * (LENGTH // size)), mine["labels"])
        num_tokens = (mine["labels"] != -100).sum().clamp(min=1)
        (loss / num_tokens).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad, group=ctx.group("cp"))
            param.grad /= size


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
    place=[r"\bcp\b", r"rank", r"count|stretch|shard"],
    wrong=[
        r"gradient.{0,30}(not|never) reduced",
        (
            r"counted (twice|two times|2 times)|reduced (twice|again)|repeated (reduc"
            r"|all.?reduce)"
        ),
    ],
)

WHY = (
    "Every context parallel rank divides the loss of its stretch by its own valid tokens, "
    "then the ranks are averaged."
)
