"""A peft MiSS adapter (shard sharing: the inputs are summed by their number modulo r, then multiplied by one r x out block) on the down projection of a feed-forward model, run by hand with tensor parallelism over three ranks:
the up projection is cut by columns into 5, 5 and 4 of 14 features, the down projection by rows, the block of the adapter is replicated. Partial outputs are summed over the ranks, the block's gradients, too. Base
weights learn as well, two micro-batches.

The bug: the row parallel forward does with its own features what peft's layer does with all of them: pad to a multiple of r and fold, so that every rank begins with group 0. After peft's MissLinear.forward,
carried over to a row parallel layer like LoRA (where the shard's own A is enough).
"""

import torch
import torch.distributed as dist
from peft import MissConfig, get_peft_model
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"tp": 3}}}}
ROWS, INPUTS, FEATURES, CLASSES, R = 7, 6, 14, 4, 4


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(INPUTS, 8)
        self.up = nn.Linear(8, FEATURES)
        self.down = nn.Linear(FEATURES, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x, feed_forward=None):
        h = torch.tanh(self.embed(x))
        y = self.down(F.gelu(self.up(h))) if feed_forward is None else feed_forward(self, h)
        return self.head(h + y)


class ToShards(torch.autograd.Function):
    @staticmethod
    def forward(fctx, x, group):
        fctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(fctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=fctx.group)
        return grad, None


class FromShards(torch.autograd.Function):
    @staticmethod
    def forward(fctx, x, group):
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(fctx, grad):
        return grad, None


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        model = get_peft_model(FeedForward(), MissConfig(target_modules=["down"], r=R))
        g = torch.Generator().manual_seed(self.seed + 7)
        for name, p in model.named_parameters():
            p.requires_grad_(True)
            if "miss_block" in name:
                p.data.copy_(torch.randn(p.shape, generator=g) / 2)
        return model

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, INPUTS, generator=g),
            "y": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        return F.cross_entropy(model(rows["x"]), rows["y"], reduction="sum"), len(rows["y"])

    def distribute(self, model, ctx):
        size, at = ctx.axes["tp"], ctx.coords["tp"]
        inner = model.base_model.model
        down = inner.down.base_layer
        for layer, name, dim in (
            (inner.up, "weight", 0),
            (inner.up, "bias", 0),
            (down, "weight", 1),
        ):
            own = getattr(layer, name).detach().tensor_split(size, dim)[at]
            setattr(layer, name, nn.Parameter(own.clone()))
        return model

    def fold(self, x, r, ctx):
        """Own features summed by their number modulo r."""
        own = torch.arange(FEATURES).tensor_split(ctx.axes["tp"])[ctx.coords["tp"]]
        return x.new_zeros(*x.shape[:-1], r).index_add(-1, own % r, x)

    def feed_forward(self, inner, h, ctx):
        group, down = ctx.group("tp"), inner.down
        x = F.gelu(inner.up(ToShards.apply(h, group)))
        block = down.miss_block["default"]
        part = F.linear(x, down.base_layer.weight) + self.fold(x, block.size(0), ctx) @ block
        return FromShards.apply(part, group) + down.base_layer.bias

    def step(self, model, batch, ctx):
        inner = model.base_model.model
        for p in model.parameters():
            p.grad = None
        for n in range(2):
            x, y = (batch[k].tensor_split(2)[n] for k in ("x", "y"))
            logits = inner(x, lambda module, h: self.feed_forward(module, h, ctx))
            (F.cross_entropy(logits, y, reduction="sum") / ROWS).backward()
        for name, p in model.named_parameters():
            if "miss_block" in name:
                dist.all_reduce(p.grad, group=ctx.group("tp"))


class Buggy(Clean):
    def fold(self, x, r, ctx):
        """Own features summed by their number modulo r."""
        x = F.pad(x, (0, -x.size(-1) % r))
        return x.reshape(*x.shape[:-1], x.size(-1) // r, r).sum(-2)


EXPECT = dict(
    right=[
        r"miss|adapter|block|fold|group",
        r"modulo|phase|offset|index|number|start|begin|first|shift|position|row of the block|rows? .{0,20}(permut|mix|wrong)|pad",
        r"own|local|shard|rank|global|row.?parallel",
    ],
    place=[r"\bfold\b", r"miss_block", r"feed_forward", r"F\.pad|reshape"],
    wrong=[
        r"miss_block.{0,40}(not|never) (all.?)?reduced|reduced twice|counted (three|3)",
        r"ToShards.{0,30}(missing|wrong)|FromShards.{0,30}wrong|bias.{0,30}(three times|twice)",
        r"scaling|alpha|dropout|merged|disabled",
        r"micro.?batch|divisor|labels",
    ],
)
WHY = (
    "Feature i belongs to group i mod 4, with i counted over all 14 features. Ranks 1 and 2 hold features from 5 and from 10 on; fold pads their five or four features and begins with group 0, although feature 5 belongs to "
    "group 1 and feature 10 to group 2. Rank 0 is right by itself. The features of ranks 1 and 2 meet other rows of the block: the summed output, and with it all gradients on all ranks are wrong, the block's rows most. "
    "Fix: group by (first own feature + j) mod r."
)
