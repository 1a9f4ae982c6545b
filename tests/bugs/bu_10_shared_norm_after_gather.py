"""A universal transformer without attention (one block used three times; its LayerNorm is also the norm before the head, a shared module) under Megatron's tensor and sequence parallelism on three ranks: between the blocks, the 6 positions
are cut over the ranks; for the two projections the positions are gathered, and their sums scattered again; for the head all are gathered, and the loss is computed alike on every rank. The gradients of all that works on parts are
summed over the tensor group; the head's are whole on each rank. Two micro-batches.

The bug: the last use of the norm is placed after the gather, as in code without sequence parallelism; there, each rank has the whole gradient of this use already, and the sum over the group, which the norm's other uses
need, makes it three times too large. After reports on norms that are flagged sequence_parallel though they work on the gathered sequence.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"tp": 3}}}}
ROWS, LENGTH, VOCABULARY, WIDTH, HIDDEN, LOOPS = 5, 6, 17, 8, 12, 3


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(LENGTH * WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, LENGTH * WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        h = self.embed(ids)
        for _ in range(LOOPS):
            y = F.gelu(self.up(self.norm(h).flatten(1)))
            h = h + self.down(y).unflatten(1, (LENGTH, WIDTH))
        return self.head(self.norm(h))


def gathered(x, group):
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, 1)


def scattered_sum(x, group):
    x = x.contiguous().clone()
    dist.all_reduce(x, group=group)
    return x.chunk(group.size(), 1)[group.rank()].contiguous()


class GatherForTensorParallel(torch.autograd.Function):
    @staticmethod
    def forward(fctx, x, group):
        fctx.group = group
        return gathered(x, group)

    @staticmethod
    def backward(fctx, grad):
        return scattered_sum(grad, fctx.group), None


class ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(fctx, x, group):
        fctx.group = group
        return scattered_sum(x, group)

    @staticmethod
    def backward(fctx, grad):
        return gathered(grad, fctx.group), None


class GatherForReplicated(torch.autograd.Function):
    @staticmethod
    def forward(fctx, x, group):
        fctx.group = group
        return gathered(x, group)

    @staticmethod
    def backward(fctx, grad):
        group = fctx.group
        return grad.chunk(group.size(), 1)[group.rank()].contiguous(), None


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        model = Model()
        nn.init.normal_(model.norm.weight, 1.0, 0.3)
        nn.init.normal_(model.norm.bias, 0.0, 0.3)
        return model

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(VOCABULARY, (ROWS, LENGTH), generator=g),
            "labels": torch.randint(VOCABULARY, (ROWS, LENGTH), generator=g),
        }

    def loss_sum(self, model, rows):
        labels = rows["labels"].flatten()
        logits = model(rows["ids"]).flatten(0, 1)
        return F.cross_entropy(logits, labels, reduction="sum"), labels.numel()

    def block(self, model, h, lo, hi, group):
        x = GatherForTensorParallel.apply(model.norm(h), group).flatten(1)
        y = F.gelu(F.linear(x, model.up.weight[lo:hi], model.up.bias[lo:hi]))
        partial = F.linear(y, model.down.weight[:, lo:hi]).unflatten(1, (LENGTH, WIDTH))
        return h + ReduceScatter.apply(partial, group)

    def output(self, model, h, group):
        return model.head(GatherForReplicated.apply(model.norm(h), group))

    def step(self, model, batch, ctx):
        group = ctx.group("tp")
        size = HIDDEN // ctx.world_size
        lo, hi = ctx.rank * size, (ctx.rank + 1) * size
        model.zero_grad()
        for n in range(2):
            ids, labels = (batch[k].tensor_split(2)[n] for k in ("ids", "labels"))
            h = model.embed(ids.chunk(ctx.world_size, 1)[ctx.rank])
            for _ in range(LOOPS):
                h = self.block(model, h, lo, hi, group)
            logits = self.output(model, h, group).flatten(0, 1)
            loss = F.cross_entropy(logits, labels.flatten(), reduction="sum")
            (loss / batch["labels"].numel()).backward()
        for name, p in model.named_parameters():
            if not name.startswith("head"):
                dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    def output(self, model, h, group):
        h = GatherForReplicated.apply(h, group)
        return model.head(model.norm(h))


EXPECT = dict(
    right=[
        r"norm\b|norm\.(weight|bias)",
        r"(3|three|several|group.?size|world.?size|number of ranks|as many|\btp) times|times .{0,20}(ranks|world|group)|once (per|for each) rank|twice|again|replicat|already (whole|complete|full|sum|reduced)|too large|more than once|over.?count",
        r"gather|output|last use|final|head|replicat|whole|full sequence|already|identical|same (gradient|contribution)|reduc|sum",
    ],
    place=[
        r"\boutput\b",
        r"GatherForReplicated",
        r"norm\b|norm\.(weight|bias)",
        r"model\.head\(model\.norm",
    ],
    wrong=[
        r"missing (all.?)?reduc|not reduced|never reduced|wrong group",
        r"micro.?batch.{0,30}(lost|dropped|overwritten)|divisor|mean of means|token count",
        r"(head|embed|up|down)\.(weight|bias).{0,30}wrong|gather.{0,30}backward.{0,30}(missing|wrong)",
    ],
)
WHY = (
    "The norm is used three times on the own positions, where each rank has a part of its gradient, and once before the head: in Buggy this use comes after GatherForReplicated, on all 6 positions and with the same gradient on all three ranks. "
    "The all-reduce over the tensor group, right for the first three uses, counts the last one's contribution three times; norm.weight and norm.bias are wrong on all ranks alike (too large by twice that contribution), all other gradients are right, "
    "as the gather's backward hands each rank its slice. A right cause says that a replicated contribution of the norm (after the gather, at the head) is summed over the ranks, i.e. counted three times. Fix: norm before the gather."
)
