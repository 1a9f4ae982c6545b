"""Tensor parallelism (tp 3) with parallel residual blocks (GPT-J, GPT-NeoX: attention and MLP read the same normalised input and are added together). Three heads, one per rank, and six hidden units, two per rank. Where a branch enters the
tensor parallel part it registers a hook on its input that all-reduces the gradient; both branches end in one sum over the ranks. Two micro-batches.

The bug: both branches register the hook on the same tensor. A tensor's hooks see its whole gradient, one after the other, so the gradient of both branches together is all-reduced twice. The place is that of hand-made tensor parallel
versions of blocks with parallel_attention_mlp (asked for in NVIDIA/TransformerEngine issue 439); the bug itself is of our own making after torch's documented rule for several hooks on one tensor.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"tp": 3}}}}
ROWS, TOKENS, VOCABULARY, WIDTH, HEADS, HIDDEN = 5, 4, 9, 6, 3, 6
PARTS = [(0, 3), (3, 5)]


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def enter(x, group):
    def reduce(grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=group)
        return grad

    if x.requires_grad:
        x.register_hook(reduce)
    return x


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.merge = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.group, self.same = None, False

    def attention(self, h, mine):
        q, k, v = (
            F.linear(h, f.weight[mine]).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for f in (self.query, self.key, self.value)
        )
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.linear(o.transpose(1, 2).flatten(2), self.merge.weight[:, mine])

    def mlp(self, h, mine):
        hidden = F.gelu(F.linear(h, self.up.weight[mine], self.up.bias[mine]))
        return F.linear(hidden, self.down.weight[:, mine])

    def forward(self, x):
        h = self.norm(x)
        if self.group is None:
            everything = slice(None)
            return x + self.attention(h, everything) + self.mlp(h, everything)
        rank, size = dist.get_rank(self.group), dist.get_world_size(self.group)
        heads, units = WIDTH // size, HIDDEN // size
        to_attention, to_mlp = (h, h) if self.same else (h.view_as(h), h.view_as(h))
        a = self.attention(enter(to_attention, self.group), slice(rank * heads, (rank + 1) * heads))
        m = self.mlp(enter(to_mlp, self.group), slice(rank * units, (rank + 1) * units))
        return x + Sum.apply(a + m, self.group)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Clean:
    same = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(VOCABULARY, (ROWS, TOKENS), generator=g),
            "labels": torch.randint(VOCABULARY, (ROWS, TOKENS), generator=g),
        }

    def loss_sum(self, model, rows):
        logits = model(rows["ids"])
        return F.cross_entropy(
            logits.flatten(0, 1), rows["labels"].flatten(), reduction="sum"
        ), rows["labels"].numel()

    def distribute(self, model, ctx):
        for block in model.blocks:
            block.group, block.same = ctx.group("tp"), self.same
        return model

    def step(self, model, batch, ctx):
        for low, high in PARTS:
            loss, _ = self.loss_sum(model, {k: v[low:high] for k, v in batch.items()})
            (loss / (ROWS * TOKENS)).backward()
        for block in model.blocks:
            cut = (block.query, block.key, block.value, block.merge, block.up, block.down)
            for module in cut:
                for p in module.parameters():
                    dist.all_reduce(p.grad, group=ctx.group("tp"))


class Buggy(Clean):
    same = True


EXPECT = dict(
    right=[
        r"(?i)backward|gradient|adjoint|hook",
        r"(?i)twice|again|two (hooks|times)|double|factor|times|\b3\b|three|tp|too (large"
        r"|big)|scal",
        r"(?i)blocks?\b|norm|branch|hook|input|enter|attention|mlp",
    ],
    place=[r"(?i)blocks?[.\[ ]?\d?|norm|enter|hook|branch"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)never (been )?(all.?)?reduced|not (been )?(all.?)?reduced|missing (all.?)?reduc",
        r"(?i)(head|(?<!\.)norm|blocks\.1\.(query|key|value|merge|up|down))\.(weight"
        r"|bias) (is|are) wrong",
        r"(?i)mean of means|divi(ded|des) by (its|their) own|micro.?batch(es)? .{0,20}(lost"
        r"|dropped|overwritten|twice)",
        r"(?i)only (on )?rank \d|rank \d alone|(other|wrong) (rows|labels)",
        r"(?i)only the last micro.?batch|tied|detach",
    ],
)
WHY = (
    "The forward is right on all ranks. In the backward the gradient of h (output of blocks.i.norm) of both branches is summed over tp by the first hook, which is right, and then again by the second: three times the right "
    "gradient, on all ranks, in all rows and micro-batches. It goes on through norm; the residual way past the branches is right. So blocks.1.norm (weight and bias) has exactly 3 times its gradient; what leaves block 1 downwards "
    "is residual + 3 times branches, wrong in direction, hence all weights of blocks.0 are wrong (blocks.0.norm with 3 times again), and embed. blocks.1's query, key, value, merge, up, down, the last norm and head are right. All "
    "ranks agree. The final sum of the cut weights and divisor 20 are right. Fix: one hook for both branches, or a tensor of its own (view_as) for every branch."
)
