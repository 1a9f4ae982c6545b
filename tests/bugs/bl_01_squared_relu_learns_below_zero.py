"""A small language model whose blocks have a squared-ReLU feed-forward (as Primer and Nemotron have it) is trained under tensor parallelism by hand on three ranks: the nine hidden features are cut to
three a rank, the up projection by columns and the down projection by rows. All ranks read the same seven rows, in micro-batches of four and three; masked tokens do not count, and the loss is divided
by the number of tokens that do. The parallel feed-forward uses its own fused activation, an autograd function that adds the bias and squares in one pass and keeps only the sum.

The bug: the backward of the fused activation is that of x squared, 2 x g, and forgets that the ReLU has cut off what lies below zero, so hidden features that are off still send a gradient back. After
the class of reports about fused activation kernels whose backward belongs to another function (bias_gelu and bias_swiglu fusions in Megatron-LM, squared-ReLU in NeMo's Nemotron recipes).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"tp": 3}}}}
WORDS, WIDTH, HIDDEN, LENGTH, ROWS = 13, 6, 9, 6, 7


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        dist.all_reduce(g, group=ctx.group)
        return g, None


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, g):
        return g, None


class BiasSquaredRelu(torch.autograd.Function):
    """relu(x + bias) squared; keeps the sum."""

    @staticmethod
    def forward(ctx, x, bias):
        z = x + bias
        ctx.save_for_backward(z)
        return z.clamp(min=0) ** 2

    @staticmethod
    def backward(ctx, g):
        (z,) = ctx.saved_tensors
        gz = 2 * z.clamp(min=0) * g
        return gz, gz.flatten(0, -2).sum(0)


class BiasSquare(BiasSquaredRelu):
    @staticmethod
    def backward(ctx, g):
        (z,) = ctx.saved_tensors
        gz = 2 * z * g
        return gz, gz.flatten(0, -2).sum(0)


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return self.down(F.relu(self.up(x)).square())


class ParallelFeedForward(nn.Module):
    def __init__(self, whole, group, activation):
        super().__init__()
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        self.up, self.down = whole.up, whole.down
        self.up.weight = nn.Parameter(whole.up.weight.data.chunk(size)[rank].clone())
        self.up.bias = nn.Parameter(whole.up.bias.data.chunk(size)[rank].clone())
        self.down.weight = nn.Parameter(whole.down.weight.data.chunk(size, 1)[rank].clone())
        self.group, self.activation = group, activation

    def forward(self, x):
        x = Enter.apply(x, self.group)
        hidden = self.activation.apply(F.linear(x, self.up.weight), self.up.bias)
        return Leave.apply(F.linear(hidden, self.down.weight), self.group) + self.down.bias


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(2 * WIDTH, WIDTH)
        self.mlp = FeedForward()

    def forward(self, x):
        before = F.pad(x, (0, 0, 1, 0))[:, :-1]
        x = x + torch.tanh(self.mix(torch.cat([x, before], -1)))
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids):
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Clean:
    activation = BiasSquaredRelu

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(WORDS, (ROWS, LENGTH + 1), generator=g),
            "counts": torch.rand(ROWS, LENGTH, generator=g) < 0.7,
        }

    def loss_sum(self, model, rows):
        logits = model(rows["ids"][:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), rows["ids"][:, 1:].flatten(), reduction="none")
        return loss[rows["counts"].flatten()].sum(), int(rows["counts"].sum())

    def distribute(self, model, ctx):
        for block in model.blocks:
            block.mlp = ParallelFeedForward(block.mlp, ctx.group("tp"), self.activation)
        return model

    def step(self, model, batch, ctx):
        for p in model.parameters():
            p.grad = None
        tokens = int(batch["counts"].sum())
        for n in range(2):
            part = {k: v.tensor_split(2)[n] for k, v in batch.items()}
            loss, _ = self.loss_sum(model, part)
            (loss / tokens).backward()


class Buggy(Clean):
    activation = BiasSquare


EXPECT = dict(
    right=[
        r"backward|derivative|gradient formula|custom|autograd\.?function",
        r"BiasSquare|activation|relu|mlp|ParallelFeedForward|feed.?forward|square",
    ],
    place=[r"BiasSquare", r"activation", r"\bmlp\b", r"ParallelFeedForward", r"blocks\.\d"],
    wrong=[
        r"not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)",
        r"wrong divisor|mean of means|divi(ded|des) by (its|their) own",
        r"micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)|only the last micro.?batch",
        r"(wrong|other) rows|forward (value|output|result)s? .{0,20}(is|are) wrong|wrong in the forward",
    ],
)
WHY = (
    "BiasSquare.backward returns 2 z g for every hidden feature; the right one is 2 relu(z) g, which is zero where the sum of product and bias is negative. The forward is right, so the loss is right on "
    "all three ranks and in both micro-batches. Wrong is the gradient of the fused activation's input wherever z < 0, hence of up.weight and up.bias on every rank, and of everything in front of the "
    "feed-forward (norm, mix, words, the earlier block). The head, and the down projection of the last block, are right. Enter and Leave reduce as they should. Fix: clamp z at zero in the backward."
)
