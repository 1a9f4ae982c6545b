"""Masked-token prediction with talking-heads attention (Shazeer et al. 2020: the attention logits are mixed between the heads before the softmax and the weights after it), tensor parallel over three ranks with DTensor: q, k, v are
ColwiseParallel, the output RowwiseParallel, two of the six heads on each rank; the two mixing matrices are replicated, plain parameters. Two micro-batches.

The bug: the port mixes the heads that the rank has, with the block of the mixing matrix that belongs to them. What the heads of the other ranks say is left out, before and after the softmax. After issues on tensor parallel ports of attention
with interaction of heads (talking heads, DCMHA, CaiT), where splitting the heads is no longer free of communication.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"tp": 3}}}}
ROWS, LENGTH, WORDS, WIDTH, HEADS, MICRO, IGNORE = 7, 6, 19, 12, 6, 2, -100


class AllHeads(torch.autograd.Function):
    """b, own heads, i, j -> b, heads, i, j; every rank makes something else of it."""

    @staticmethod
    def forward(ctx, x, own, group):
        ctx.own, ctx.group = own, group
        whole = x.new_zeros(x.shape[0], HEADS, *x.shape[2:])
        whole[:, own] = x
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous()
        dist.all_reduce(g, group=ctx.group)
        return g[:, ctx.own], None, None


class Mix(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(HEADS) + 0.4 * torch.randn(HEADS, HEADS))
        self.own, self.group, self.all_heads = slice(0, HEADS), None, True

    def forward(self, x):
        weight = self.weight[self.own]
        if self.group is None:
            pass
        elif self.all_heads:
            x = AllHeads.apply(x, self.own, self.group)
        else:
            weight = weight[:, self.own]
        return torch.einsum("gh,bhij->bgij", weight, x)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.before, self.after = Mix(), Mix()

    def forward(self, x):
        q, k, v = (
            f(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for f in (self.q, self.k, self.v)
        )
        scores = self.before(q @ k.transpose(-1, -2) * (WIDTH // HEADS) ** -0.5)
        weights = self.after(scores.softmax(-1))
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 15), nn.Linear(15, WIDTH)

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens):
        x = self.embed(tokens) + self.place.weight
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Clean:
    all_heads = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        tokens = torch.randint(1, WORDS, (ROWS, LENGTH), generator=g)
        hidden = torch.rand(ROWS, LENGTH, generator=g) < 0.4
        hidden[:, 2] = True
        return {
            "tokens": tokens.masked_fill(hidden, 0),
            "labels": tokens.masked_fill(~hidden, IGNORE),
        }

    def loss_sum(self, model, rows):
        logits = model(rows["tokens"]).flatten(0, 1)
        loss = F.cross_entropy(logits, rows["labels"].flatten(), reduction="sum")
        return loss, int((rows["labels"] != IGNORE).sum())

    def distribute(self, model, ctx):
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        plan |= {f"attention.{n}": ColwiseParallel() for n in "qkv"}
        plan |= {"attention.out": RowwiseParallel()}
        own = HEADS // ctx.world_size
        for layer in model.layers:
            parallelize_module(layer, ctx.mesh, plan)
            for mix in (layer.attention.before, layer.attention.after):
                mix.own = slice(own * ctx.rank, own * ctx.rank + own)
                mix.group, mix.all_heads = ctx.group("tp"), self.all_heads
        return model

    def step(self, model, batch, ctx):
        count = int((batch["labels"] != IGNORE).sum())
        for m in range(MICRO):
            rows = {k: v.tensor_split(MICRO)[m] for k, v in batch.items()}
            (self.loss_sum(model, rows)[0] / count).backward()
        # a rank has only the rows of its own heads
        for layer in model.layers:
            for mix in (layer.attention.before, layer.attention.after):
                dist.all_reduce(mix.weight.grad, group=ctx.group("tp"))


class Buggy(Clean):
    all_heads = False


EXPECT = dict(
    right=[
        r"(?i)forward|output|activation|off.?diagonal|block",
        r"(?i)heads|mix|before|other ranks|own|local|gather|exchange|tp\b|tensor.?parallel",
    ],
    place=[r"(?i)before|mix|attention|heads"],
    wrong=[
        r"(?i)(whole|entire) forward (is|was) (right|correct)|forward and (the )?loss (are|is|agree)|\bloss (is|are) (right|correct)",
        r"(?i)(never|not) (been )?(all.?)?reduced|missing all.?reduc|(reduced|summed) (twice|again)|counted (twice|again)",
        r"(?i)wrong divisor|divi(ded|des) by (its|their) own|factor of (1/)?3\b",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten)",
        r"(?i)\b(q|k|v|qkv)\b .{0,30}(cut|sliced|laid out) .{0,20}wrong|goes wrong first in .{0,25}(\.q|\.k|\.v|up|down)\b",
    ],
)
WHY = (
    "Each rank mixes only its own two heads with a 2 x 2 block of the 6 x 6 matrix, instead of all six heads with its two rows. The forward goes wrong first at layers.0.attention.before (the logits before the softmax), on all three ranks, "
    "then after, out and all that follows; embed, place, norm, q, k, v of layers.0 are right. The gradients of before.weight and after.weight are zero outside of the diagonal 2 x 2 blocks, and wrong within; all other parameters get wrong "
    "gradients because the forward is another (but for k.bias, whose gradient is zero in both). What is replicated is the same on all ranks. The all-reduce of the mixing matrices' gradients, the DTensor plan, the count and the micro-batches "
    "are right. Fix: gather the heads (its backward sums over the ranks) and multiply with the own rows of the matrix."
)
