"""Multi-query attention under tensor parallelism: queries are sharded by head, keys and values
shared. After FAULTS C05-10 (bigcode Megatron-LM issue 35).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"tp": 2}}}}

ROWS, LENGTH, VOCABULARY, WIDTH, HEADS, SIZE = 5, 5, 13, 10, 4, 3


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


class MultiQueryAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(WIDTH, HEADS * SIZE)
        self.key_value = nn.Linear(WIDTH, 2 * SIZE)
        self.dense = nn.Linear(HEADS * SIZE, WIDTH, bias=False)
        self.group, self.reduce_output_grad = None, True

    def forward(self, x):
        q = self.query(copy_in(x, self.group)).unflatten(-1, (-1, SIZE)).transpose(1, 2)
        kv = self.key_value(x)
        if self.reduce_output_grad:
            kv = copy_in(kv, self.group)
        k, v = (t.expand(-1, q.shape[1], -1, -1) for t in kv.unsqueeze(1).chunk(2, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return sum_out(self.dense(y.transpose(1, 2).flatten(-2)), self.group)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), MultiQueryAttention()

    def forward(self, x):
        return x + self.attention(self.norm(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH) / 5)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        x = self.embed(ids) + self.position
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Clean:
    reduce_output_grad = True

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
            attention = layer.attention
            attention.group = ctx.group("tp")
            attention.reduce_output_grad = self.reduce_output_grad
            attention.query.weight = cut(attention.query.weight, 0, ctx)
            attention.query.bias = cut(attention.query.bias, 0, ctx)
            attention.dense.weight = cut(attention.dense.weight, 1, ctx)
        return model

    def step(self, model, batch, ctx):
        loss, count = self.loss_sum(model, batch)
        (loss / count).backward()


class Buggy(Clean):
    reduce_output_grad = False

    def step(self, model, batch, ctx):
        super().step(model, batch, ctx)
        for layer in model.layers:
            for param in layer.attention.key_value.parameters():
                dist.all_reduce(param.grad, group=ctx.group("tp"))


EXPECT = dict(
    right=[
        r"norm|layers\.[01]|attention|key_value",
        (
            r"not reduced|never reduced|not summed|never summed|missing.{0,40}(reduc|sum)"
            r"|unreduced|without (a |the |any )?(reduc|all.?reduce|sum)|own (part|share|rows"
            r"|contribution)|partial|no (reduc|all.?reduce|collective)|lacks? .{0,60}(rank"
            r"|part|sum|reduc)|only (its|their|the) own|(reduction|all.?reduce"
            r"|sum).{0,40}(missing|left out|skipped|absent)|stays? local|local to (each|its)"
            r"|out of the reduc|backward|input gradient|differ|upstream|before"
        ),
    ],
    place=[r"layers\.1|layers\.1\.norm|key_value|attention"],
    wrong=[
        r"forward .{0,20}(is )?wrong",
        r"mean of (the )?means",
        (
            r"counted (twice|two times|2 times)|reduced (twice|again)|repeated (reduc"
            r"|all.?reduce)"
        ),
    ],
)

WHY = (
    "The shared key and value's output gradient is not summed over tp (only its weight's is), "
    "so the norm and everything before it is partial."
)
