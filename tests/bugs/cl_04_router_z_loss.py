"""A mixture-of-experts tagger (two layers, five experts, two per token) with the router z-loss in
its objective, rows over dp (4 and 3 of 7, micro-batches of two) and experts over ep (3 and 2):
both ranks of an ep group hold the same rows, each adds its own experts' share.

Bug: the step squares the mean of the routers' logsumexp over the tokens, where the z-loss is the
mean of the squares. After z-loss code in MoE trainers that writes logsumexp(...).mean() ** 2.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "ep": 2}}}}
ROWS, T, VOCAB, D, H, EXPERTS, TAGS, Z = 7, 5, 11, 6, 7, 5, 4, 0.2
SHARES = [range(0, 3), range(3, 5)]


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, g):
        return g, None


class CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        dist.all_reduce(g, group=ctx.group)
        return g, None


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(D, H)
        self.down = nn.Linear(H, D)

    def forward(self, x):
        return self.down(F.silu(self.up(x)))


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.router = nn.Linear(D, EXPERTS, bias=False)
        nn.init.normal_(self.router.weight)
        self.experts = nn.ModuleList([Expert() for _ in range(EXPERTS)])
        self.share = None

    def forward(self, x):
        h = self.norm(x)
        scores = self.router(h)
        top, which = scores.topk(2, -1)
        gates = torch.zeros_like(scores).scatter(-1, which, top.softmax(-1))
        own, group = range(EXPERTS), None
        if self.share is not None:
            own, group = self.share
            h, gates = CopyToRanks.apply(h, group), CopyToRanks.apply(gates, group)
        out = sum(gates[..., e, None] * self.experts[e](h) for e in own)
        if group is not None:
            out = SumOverRanks.apply(out, group)
        return x + out, scores


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCAB, D)
        self.mix = nn.Conv1d(D, D, 3, padding=1)
        self.layers = nn.ModuleList([Mixture(), Mixture()])
        self.head = nn.Linear(D, TAGS)

    def forward(self, ids):
        x = self.mix(self.words(ids).transpose(1, 2)).transpose(1, 2)
        routed = []
        for layer in self.layers:
            x, scores = layer(x)
            routed.append(scores)
        return self.head(x), routed


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 44)
        return Tagger()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 440)
        return {
            "ids": torch.randint(VOCAB, (ROWS, T), generator=g),
            "tags": torch.randint(TAGS, (ROWS, T), generator=g),
        }

    def loss_sum(self, model, rows):
        logits, routed = model(rows["ids"])
        loss = F.cross_entropy(logits.flatten(0, 1), rows["tags"].flatten(), reduction="sum")
        loss = loss + Z * sum(torch.logsumexp(s, -1).square().sum() for s in routed)
        return loss, rows["tags"].numel()

    def distribute(self, model, ctx):
        own = SHARES[ctx.coords["ep"]]
        for layer in model.layers:
            layer.share = (own, ctx.group("ep"))
            for e in range(EXPERTS):
                if e not in own:
                    layer.experts[e] = None
        return model

    def z_loss(self, scores):
        return torch.logsumexp(scores, dim=-1).square().mean()

    def step(self, model, batch, ctx):
        own = torch.arange(ROWS).tensor_split(ctx.axes["dp"])[ctx.coords["dp"]]
        for part in own.split(2):
            tags = batch["tags"][part].flatten()
            logits, routed = model(batch["ids"][part])
            loss = F.cross_entropy(logits.flatten(0, 1), tags)
            loss = loss + Z * sum(self.z_loss(scores) for scores in routed)
            (loss * tags.numel() / (ROWS * T)).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    def z_loss(self, scores):
        return torch.logsumexp(scores, dim=-1).mean() ** 2


EXPECT = dict(
    right=[
        r"z.?loss|logsumexp|router",
        r"square|\*\* ?2|pow|power",
        r"mean|average|order|before|after|non.?linear|per.?token|each token",
    ],
    place=[r"\bz_loss\b", r"logsumexp", r"router", r"\brouted\b"],
    wrong=[
        r"(cross.?entropy|tags).{0,50}(wrong|divided by|mean of means)",
        r"expert.{0,40}(not|never|twice|missing).{0,20}(reduc|summed)",
        r"(gates?|top.?k).{0,40}(wrong|renormali)",
        r"CopyToRanks.{0,40}(missing|wrong)",
        r"z.?loss.{0,40}(counted|added) (twice|on (both|every|each))",
        r"uneven (rows|shares)",
    ],
)
WHY = """The router z-loss is the mean over tokens of logsumexp(scores) ** 2. Buggy.z_loss takes
the mean of the logsumexp first and squares that: every token gets the factor 2 * mean instead of
2 * its own logsumexp (and the term depends on how micro-batches are cut). The cross-entropy, the
experts and all reductions are right. A right cause says that in the z-loss the square is taken
after the mean. Fix: torch.logsumexp(scores, dim=-1).square().mean()."""
