"""Multi-head latent attention under tensor parallelism: one rotary key is shared by all heads.
After FAULTS C05-09 (Megatron-LM issue 1699).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"tp": 2}}}}

ROWS, LENGTH, VOCABULARY, WIDTH = 5, 5, 12, 12
HEADS, NOPE, ROPE, LATENT = 4, 4, 2, 6


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


class LatentAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear_q = nn.Linear(WIDTH, HEADS * (NOPE + ROPE), bias=False)
        self.linear_kv_down = nn.Linear(WIDTH, LATENT + ROPE, bias=False)
        self.kv_norm = nn.LayerNorm(LATENT)
        self.linear_kv_up = nn.Linear(LATENT, HEADS * 2 * NOPE, bias=False)
        self.linear_proj = nn.Linear(HEADS * NOPE, WIDTH, bias=False)
        self.group, self.copy_rope_key = None, True

    def forward(self, x):
        q = self.linear_q(copy_in(x, self.group)).unflatten(-1, (-1, NOPE + ROPE))
        latent, k_pos = self.linear_kv_down(x).split([LATENT, ROPE], dim=-1)
        kv = self.linear_kv_up(copy_in(self.kv_norm(latent), self.group))
        k, v = kv.unflatten(-1, (-1, 2 * NOPE)).chunk(2, dim=-1)
        if self.copy_rope_key:
            k_pos = copy_in(k_pos, self.group)
        k = torch.cat([k, k_pos.unsqueeze(2).expand(-1, -1, k.shape[2], -1)], dim=-1)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        scores = q @ k.transpose(2, 3) / (NOPE + ROPE) ** 0.5
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        y = scores.masked_fill(future, float("-inf")).softmax(-1) @ v
        return sum_out(self.linear_proj(y.transpose(1, 2).flatten(-2)), self.group)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.self_attention = nn.LayerNorm(WIDTH), LatentAttention()

    def forward(self, x):
        return x + self.self_attention(self.norm(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Clean:
    copy_rope_key = True

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
        for layer in model.layers:
            attention = layer.self_attention
            attention.group, attention.copy_rope_key = ctx.group("tp"), self.copy_rope_key
            attention.linear_q.weight = cut(attention.linear_q.weight, 0, ctx)
            attention.linear_kv_up.weight = cut(attention.linear_kv_up.weight, 0, ctx)
            attention.linear_proj.weight = cut(attention.linear_proj.weight, 1, ctx)
        return model

    def step(self, model, batch, ctx):
        loss, count = self.loss_sum(model, batch)
        (loss / count).backward()


class Buggy(Clean):
    copy_rope_key = False


EXPECT = dict(
    right=[
        r"kv_down|self_attention|layers\.1",
        (
            r"not reduced|never reduced|not summed|never summed|missing.{0,40}(reduc|sum)"
            r"|unreduced|without (a |the |any )?(reduc|all.?reduce|sum)|own (part|share|rows"
            r"|contribution)|partial|no (reduc|all.?reduce|collective)|lacks? .{0,60}(rank"
            r"|part|sum|reduc)|only (its|their|the) own|(reduction|all.?reduce"
            r"|sum).{0,40}(missing|left out|skipped|absent)|stays? local|local to (each|its)"
            r"|out of the reduc|backward|input gradient|differ"
        ),
    ],
    place=[r"kv_down|self_attention|layers\.1"],
    wrong=[
        r"forward .{0,20}(is )?wrong",
        (
            r"counted (twice|two times|2 times)|reduced (twice|again)|repeated (reduc"
            r"|all.?reduce)"
        ),
        r"mean of (the )?means",
    ],
)

WHY = (
    "The gradient of the shared rotary key, expanded over the local heads, is never summed "
    "over tp: kv_down's last rows and all before are partial."
)
