"""Grouped-query attention, tensor parallel by hand over more ranks than there are key/value heads: each key/value head is copied to
neighbouring ranks, and its gradients are summed over those that hold the same head. After reports on KV replication (TP degree above the
number of KV heads): the groups of replicas are enumerated with the wrong stride.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"tp": 4}}}}
ROWS, LENGTH, VOCAB, WIDTH, HEADS, KV, DIM, HIDDEN = 5, 7, 23, 10, 4, 2, 6, 20


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(WIDTH, HEADS * DIM)
        self.k = nn.Linear(WIDTH, KV * DIM, bias=False)
        self.v = nn.Linear(WIDTH, KV * DIM)
        self.o = nn.Linear(HEADS * DIM, WIDTH, bias=False)

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (-1, DIM)).transpose(1, 2) for f in (self.q, self.k, self.v))
        groups = q.shape[1] // k.shape[1]
        k, v = (t.repeat_interleave(groups, 1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.group = None
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(WIDTH) for _ in range(3))
        self.attention, self.mlp = Attention(), MLP()
        self.head = nn.Linear(WIDTH, VOCAB)

    def branch(self, f, x):
        if self.group is None:
            return f(x)
        return Sum.apply(f(Copy.apply(x, self.group)), self.group)

    def forward(self, ids):
        x = self.embed(ids)
        x = x + self.branch(self.attention, self.norm1(x))
        x = x + self.branch(self.mlp, self.norm2(x))
        return self.head(self.norm3(x))


def lm_loss(model, rows):
    logits = model(rows["ids"][:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), rows["ids"][:, 1:].flatten(), reduction="sum")


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return LM()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {"ids": torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=g)}

    def loss_sum(self, model, rows):
        return lm_loss(model, rows), len(rows["ids"]) * LENGTH

    def replicas(self, tp):
        """The ranks that hold the same key/value head, for every head."""
        copies = tp // KV
        return [list(range(h * copies, (h + 1) * copies)) for h in range(KV)]

    def distribute(self, model, ctx):
        tp, me = ctx.axes["tp"], ctx.coords["tp"]
        model.group = ctx.group("tp")
        for ranks in self.replicas(tp):
            group = dist.new_group(ranks)
            if me in ranks:
                self.same_head = group

        def cut(linear, parts, part, dim=0):
            linear.weight = nn.Parameter(linear.weight.detach().chunk(parts, dim)[part].clone())
            if linear.bias is not None:
                linear.bias = nn.Parameter(linear.bias.detach().chunk(parts)[part].clone())

        a = model.attention
        cut(a.q, tp, me)
        cut(a.k, KV, me * KV // tp)
        cut(a.v, KV, me * KV // tp)
        cut(a.o, tp, me, 1)
        cut(model.mlp.up, tp, me)
        cut(model.mlp.down, tp, me, 1)
        return model

    def step(self, model, batch, ctx):
        count = len(batch["ids"]) * LENGTH
        for ids in batch["ids"].tensor_split(2):
            (lm_loss(model, {"ids": ids}) / count).backward()
        for f in (model.attention.k, model.attention.v):
            for p in f.parameters():
                dist.all_reduce(p.grad, group=self.same_head)


class Buggy(Clean):
    def replicas(self, tp):
        return [list(range(h, tp, KV)) for h in range(KV)]


EXPECT = dict(
    right=[
        r"attention\.(k|v)|key|kv",
        r"sum|reduc|group|ranks?|another|other (element|gradient|rank|part|shard|head)|belong|peer",
    ],
    place=[r"attention\.(k|v)|key|kv"],
    wrong=[
        r"(never|not) (been )?(all.?)?reduced",
        r"attention\.q\S* (is|are|gets|has) .{0,20}wrong",
        r"forward .{0,40}(goes|is) wrong in",
        r"(loss|count|divisor) .{0,30}own",
        r"wrong (rows|micro.?batch)|late backward",
    ],
)
WHY = (
    "Ranks 0 and 1 hold key/value head 0, ranks 2 and 3 hold head 1. The gradients of attention.k.weight, attention.v.weight and attention.v.bias are summed over "
    "ranks {0, 2} and {1, 3} instead of {0, 1} and {2, 3}: each rank adds to its own part a part of the other head, and its real replica's part is "
    "missing. Forward, losses, and all other gradients are right; replicas of one head end up with unlike gradients."
)
