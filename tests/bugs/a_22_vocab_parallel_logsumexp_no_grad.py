"""A policy loss on log-probabilities from a vocabulary-parallel head. After FAULTS C07-11 (ms-
swift PR 9947).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"tp": 2}}}}

ROWS, LENGTH, VOCABULARY, WIDTH, HEADS = 6, 4, 14, 8, 2


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
        return self.norm(x)


class CopyIn(torch.autograd.Function):
    """Identity forward, SUM over the tensor parallel ranks backward."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class SumOut(torch.autograd.Function):
    """SUM over the tensor parallel ranks forward, identity backward."""

    @staticmethod
    def forward(ctx, x, group):
        out = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def copy_in(x, group):
    return x if group is None else CopyIn.apply(x, group)


def sum_out(x, group):
    return x if group is None else SumOut.apply(x, group)


def cut(param, dim, ctx):
    """This rank's part of a weight."""
    return nn.Parameter(param.detach().chunk(ctx.axes["tp"], dim)[ctx.coords["tp"]].clone())


def log_probs(logits, labels):
    return logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=g)
        return {
            "ids": ids[:, :-1],
            "labels": ids[:, 1:],
            "advantage": torch.randn(ROWS, 1, generator=g),
            "mask": torch.rand(ROWS, LENGTH, generator=g) > 0.3,
        }

    def loss_sum(self, model, rows):
        chosen = log_probs(model.head(model(rows["ids"])), rows["labels"])
        return -(chosen * rows["advantage"] * rows["mask"]).sum(), rows["mask"].sum()

    def distribute(self, model, ctx):
        model.head.weight = cut(model.head.weight, 0, ctx)
        return model

    def step(self, model, batch, ctx):
        group = ctx.group("tp")
        logits = model.head(copy_in(model(batch["ids"]), group))
        chosen = self.vocab_parallel(logits, batch["labels"], group)
        loss = -(chosen * batch["advantage"] * batch["mask"]).sum()
        (loss / batch["mask"].sum()).backward()

    def vocab_parallel(self, logits, labels, group):
        size = logits.shape[-1]
        labels = labels - dist.get_rank(group) * size
        here = (labels >= 0) & (labels < size)
        largest = logits.detach().amax(-1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        logits = logits - largest[..., None]
        target = logits.gather(-1, labels.clamp(0, size - 1)[..., None])[..., 0] * here
        return sum_out(target, group) - self.log_sum_exp(logits, group)

    def log_sum_exp(self, logits, group):
        return sum_out(logits.exp().sum(-1), group).log()


class Buggy(Clean):
    def log_sum_exp(self, logits, group):
        with torch.no_grad():
            total = logits.exp().sum(-1)
            dist.all_reduce(total, group=group)
        return total.log()


EXPECT = dict(
    right=[
        r"head|logit",
        (
            r"backward|input gradient|forward (is |was )?right|lost|missing|output gradient"
            r"|gradient of (its|the) output"
        ),
    ],
    place=[r"head"],
    wrong=[
        r"forward .{0,20}(is )?wrong",
        r"mean of (the )?means",
        (
            r"counted (twice|two times|2 times)|reduced (twice|again)|repeated (reduc"
            r"|all.?reduce)"
        ),
        r"head.{0,30}not reduced",
    ],
)

WHY = (
    "The log-sum-exp of the vocabulary-parallel logits carries no gradient, so the softmax "
    "part is missing from the head's gradient on."
)
