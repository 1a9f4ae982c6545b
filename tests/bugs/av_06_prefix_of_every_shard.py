"""Nested (matryoshka) features under tensor parallelism (tp 2) and data parallelism (dp 2, three and four rows, micro-batches of at most two): a feature layer is cut by columns, six of twelve features on each rank; three classifiers look
at the first 2, 6 and 12 features with one weight (cut by its inputs, logits summed over tp) and own biases, and their losses are added with weights 1, 0.5, 0.25.

The bug: each rank takes the first m / tp of its own features, so m = 6 means features 0-2 and 6-8 and not 0-5. In the manner of MRL-E heads, see huggingface/sentence-transformers issue 2526 (one weight, of which a part is used for each
dimension) and the reports of sizes that are divided by tp although they name global places, as pytorch/torchtitan PR 4637 (a global index passed to a local shard).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "tp": 2}}}}
OWN, MICRO, INPUTS, FEATURES, CLASSES = [3, 4], 2, 5, 12, 4
NESTED, WEIGHTS = (2, 6, 12), (1.0, 0.5, 0.25)


class SumLogits(torch.autograd.Function):
    """Forward: sum over tp. Backward: identity, every rank has the loss of the whole logits."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(INPUTS, 8)
        self.features = nn.Linear(8, FEATURES)
        self.weight = nn.Parameter(torch.randn(CLASSES, FEATURES) * 0.4)
        self.biases = nn.Parameter(torch.randn(len(NESTED), CLASSES) * 0.4)
        self.group, self.divided = None, False

    def forward(self, x):
        h = torch.tanh(self.trunk(x))
        first, last = 0, FEATURES
        if self.group is not None:
            size = FEATURES // dist.get_world_size(self.group)
            first = size * dist.get_rank(self.group)
            last = first + size
        part = F.linear(h, self.features.weight[first:last], self.features.bias[first:last])
        part = F.silu(part)
        out = []
        for m, bias in zip(NESTED, self.biases):
            if self.group is None:
                k = m
            elif self.divided:
                k = m // dist.get_world_size(self.group)
            else:
                k = min(max(m - first, 0), last - first)
            logits = F.linear(part[:, :k], self.weight[:, first : first + k])
            if self.group is not None:
                logits = SumLogits.apply(logits, self.group)
            out.append(logits + bias)
        return out


class Clean:
    divided = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = sum(OWN)
        return {
            "x": torch.randn(rows, INPUTS, generator=g),
            "y": torch.randint(CLASSES, (rows,), generator=g),
        }

    def loss_sum(self, model, rows):
        losses = [F.cross_entropy(o, rows["y"], reduction="sum") for o in model(rows["x"])]
        return sum(w * loss for w, loss in zip(WEIGHTS, losses)), len(rows["y"])

    def distribute(self, model, ctx):
        model.group, model.divided = ctx.group("tp"), self.divided
        return model

    def step(self, model, batch, ctx):
        dp, tp = ctx.group("dp"), ctx.group("tp")
        turn = dist.get_rank(dp)
        first = sum(OWN[:turn])
        for part in torch.arange(first, first + OWN[turn]).split(MICRO):
            loss, _ = self.loss_sum(model, {k: v[part] for k, v in batch.items()})
            (loss / sum(OWN)).backward()
        for name, p in model.named_parameters():
            if name != "biases":
                dist.all_reduce(p.grad, group=tp)
            dist.all_reduce(p.grad, group=dp)


class Buggy(Clean):
    divided = True


EXPECT = dict(
    right=[
        r"(?i)forward|logits|output|activation|loss\b.{0,30}(differ|wrong)|value",
        r"(?i)wrong|differ|deviat|other|not (the )?(same|own|right)",
        r"(?i)SumLogits|logits|prefix|nested|features?|head|classif|slice|shard|columns?|weight\b",
    ],
    place=[r"(?i)SumLogits|logits|nested|prefix|features?\b|head|classif|\bweight\b|first : first"],
    wrong=[
        r"(?i)forward is (right|fine|correct|the same)|wrong only in the backward|backward of SumLogits.{0,40}(wrong|should|adjoint)",
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own (rows|count|number)|factor of (1/)?[0-9]",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)",
        r"(?i)trunk(\.\w+)? .{0,20}(forward|output).{0,15}wrong",
        r"(?i)labels? .{0,20}(is|are) (wrong|of)",
    ],
)
WHY = (
    "The forward is wrong at the summed logits of the first two classifiers on all four ranks, all rows and micro-batches: for m = 2 feature 0 (tp rank 0) and feature 6 (tp rank 1) instead of 0 and 1 (tp rank 1 should take none); "
    "for m = 6 features 0-2 and 6-8 instead of 0-5, all on tp rank 0. The third classifier (all 12) is right, trunk and features' own outputs too. So the gradients of features, weight and trunk are wrong, and those of the first "
    "two rows of biases by the wrong logits; the last row of biases is right. Sums over tp and dp, weights, divisor 7 and biases not summed over tp are right. Fix: k = clamp(m - first, 0, own size)."
)
