"""A click model in hybrid parallelism on four ranks, dp 2 times table 2: the embedding table is cut by rows over the table axis (7 and 6 of 13 items) and replicated over dp, the dense tower is under DDP over dp.
Ranks of one table group see the same rows and sum what they look up. Two micro-batches; then the table's gradient is averaged over dp, and the step clips to a global norm by its own function, for which the
table's squares are summed over the table axis.

The bug: the function multiplies the gradients by max_norm / (norm + eps) without holding the factor at one, so a gradient that is smaller than the limit is enlarged to it. After hand-written clippers for sharded
parameters (embeddings beside DDP, FSDP and pipeline stages) in which the clamp of torch's clip_grad_norm_ was forgotten.
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "table": 2}}}}
ITEMS, WIDTH, FIELDS, DENSE, ROWS = 13, 5, 3, 4, 9


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.bottom = nn.Linear(DENSE, WIDTH)
        self.top = nn.Linear(WIDTH + (FIELDS + 1) * FIELDS // 2, 8)
        self.click = nn.Linear(8, 1)

    def forward(self, dense, vectors):
        low = torch.relu(self.bottom(dense))
        every = torch.cat([low[:, None], vectors], 1)
        i, j = torch.triu_indices(FIELDS + 1, FIELDS + 1, 1)
        pairs = (every @ every.transpose(1, 2))[:, i, j]
        return self.click(torch.tanh(self.top(torch.cat([low, pairs], -1))))[:, 0]


class Clicks(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(ITEMS, WIDTH)
        self.tower = Tower()

    def forward(self, dense, items):
        return self.tower(dense, self.table(items))


class SumLookups(torch.autograd.Function):
    @staticmethod
    def forward(fctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(fctx, grad):
        return grad, None


class Clean:
    after, max_norm = "clip", 6.0

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Clicks()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "dense": torch.randn(ROWS, DENSE, generator=g),
            "items": torch.randint(ITEMS, (ROWS, FIELDS), generator=g),
            "clicked": (torch.rand(ROWS, generator=g) < 0.4).float(),
        }

    def loss_sum(self, model, rows):
        logits = model(rows["dense"], rows["items"])
        return F.binary_cross_entropy_with_logits(logits, rows["clicked"], reduction="sum"), len(
            logits
        )

    @staticmethod
    def bounds(ctx):
        own = torch.arange(ITEMS).tensor_split(2)[ctx.coords["table"]]
        return int(own[0]), int(own[-1]) + 1

    def distribute(self, model, ctx):
        lo, hi = self.bounds(ctx)
        model.table.weight = nn.Parameter(model.table.weight.detach()[lo:hi].clone())
        model.tower = DistributedDataParallel(model.tower, process_group=ctx.group("dp"))
        return model

    def look_up(self, table, items, ctx):
        lo, hi = self.bounds(ctx)
        here = (items >= lo) & (items < hi)
        vectors = F.embedding((items - lo).clamp(0, hi - lo - 1), table.weight) * here[..., None]
        return SumLookups.apply(vectors, ctx.group("table"))

    def global_norm(self, model, ctx):
        sharded = model.table.weight.grad.square().sum()
        dist.all_reduce(sharded, group=ctx.group("table"))
        return (sharded + sum(p.grad.square().sum() for p in model.tower.parameters())).sqrt()

    def factor(self, norm):
        return (self.max_norm / (norm + 1e-6)).clamp(max=1.0)

    def clip(self, model, ctx):
        factor = self.factor(self.global_norm(model, ctx))
        for p in model.parameters():
            p.grad.mul_(factor)

    def step(self, model, batch, ctx):
        for p in model.parameters():
            p.grad = None
        mine = {k: v.tensor_split(2)[ctx.coords["dp"]] for k, v in batch.items()}
        for n in range(2):
            part = {k: v.tensor_split(2)[n] for k, v in mine.items()}
            with model.tower.no_sync() if n == 0 else nullcontext():
                logits = model.tower(part["dense"], self.look_up(model.table, part["items"], ctx))
                loss = F.binary_cross_entropy_with_logits(logits, part["clicked"], reduction="sum")
                (loss * 2 / ROWS).backward()
        dist.all_reduce(model.table.weight.grad, group=ctx.group("dp"))
        model.table.weight.grad.div_(2)
        self.clip(model, ctx)


class Buggy(Clean):
    def factor(self, norm):
        return self.max_norm / (norm + 1e-6)


EXPECT = dict(
    right=[
        r"clip|norm|limit|max_norm|factor",
        r"clamp|stretch|enlarg|scaled up|larger than (one|1)|greater than (one|1)|above (one|1)|below the (limit|max)|smaller than the (limit|max)|not (have )?clip|need no|at most (one|1)|min\(1|up to|although|should (not|leave)|min\(|exceed|capp|multiplied|unclamped",
    ],
    place=[r"\bfactor\b", r"\bclip\b", r"max_norm", r"mul_"],
    wrong=[
        r"not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)|missing (all.?)?reduc|wrong group",
        r"mean of means|micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|only the last micro.?batch|divisor (is )?wrong",
        r"norm (is|was) (computed )?(wrong|over)|norm of (its|the) own shard|norm counts|replicated parameter.{0,20}twice|norm .{0,20}too small",
        r"backward formula|forward .{0,20}is wrong|(wrong|other) rows|(table|tower|bottom|top|click) .{0,20}(computes|is) wrong",
    ],
)
WHY = (
    "Buggy.factor returns max_norm / (norm + eps) without clamping it at one. The global norm is right on all ranks (the table's squares are summed over the table axis, the dense ones counted once) and smaller than "
    "max_norm = 6, so the gradients should be left as they are; instead all of them, table and tower, on all ranks, are multiplied by the same factor 6 / norm > 1. Before the clip the gradients are right, and so are "
    "forward, loss, DDP's mean and the table's mean over dp. Fix: .clamp(max=1.0)."
)
