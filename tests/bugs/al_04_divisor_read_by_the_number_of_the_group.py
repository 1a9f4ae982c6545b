"""A ranker with an embedding bag (sum of five features per row) whose gradient is scaled by the inverse frequency of every feature, under FSDP2 on three ranks with two micro-batches of unequal size each. The frequencies are those of the
whole batch (a column of the data); the bag is a Function of its own whose backward sorts the feature numbers, sums the gradients of every run of equal numbers and divides the sum by the frequency.

The bug: the backward looks the frequency up by the position of the run in the list of runs (the sorted list's element i, with i the number of the run) instead of by the feature number of the run. After pytorch/pytorch issue 190063 and
PR 190264 (embedding_bag on the CPU scales gradients by the wrong frequency with scale_grad_by_freq).
"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, BAG, FEATURES, WIDTH = 12, 5, 9, 6
PARTS = [[(0, 3), (3, 4)], [(4, 6), (6, 8)], [(8, 9), (9, 12)]]


class Bag(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, ids, often, by_group):
        ctx.save_for_backward(ids, often)
        ctx.shape, ctx.by_group = weight.shape, by_group
        return weight[ids].sum(1)

    @staticmethod
    def backward(ctx, grad):
        ids, often = ctx.saved_tensors
        flat = ids.flatten()
        order = torch.argsort(flat, stable=True)
        ordered = flat[order]
        counts = grad.new_ones(ctx.shape[0])
        counts[flat] = often.flatten().to(grad.dtype)
        grads = grad.repeat_interleave(ids.shape[1], 0)[order]
        result, start = grad.new_zeros(ctx.shape), 0
        features, lengths = torch.unique_consecutive(ordered, return_counts=True)
        for i, (feature, length) in enumerate(zip(features.tolist(), lengths.tolist())):
            divisor = counts[ordered[i]] if ctx.by_group else counts[feature]
            result[feature] = grads[start : start + length].sum(0) / divisor
            start += length
        return result, None, None, None


class Features(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(FEATURES, WIDTH))
        self.by_group = False

    def forward(self, ids, often):
        return Bag.apply(self.weight, ids, often, self.by_group)


class Ranker(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = Features()
        self.hidden, self.score = nn.Linear(WIDTH, 5), nn.Linear(5, 1)

    def forward(self, ids, often):
        return self.score(F.silu(self.hidden(self.features(ids, often)))).squeeze(-1)


class Clean:
    by_group = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Ranker()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        spread = torch.rand(ROWS, BAG, generator=g) ** 1.7
        ids = (spread * FEATURES).long()
        often = torch.bincount(ids.flatten(), minlength=FEATURES)[ids]
        clicked = torch.randint(2, (ROWS,), generator=g).float()
        return {"ids": ids, "often": often, "clicked": clicked}

    def loss_sum(self, model, rows):
        scores = model(rows["ids"], rows["often"])
        loss = F.binary_cross_entropy_with_logits(
            scores, rows["clicked"].to(scores.dtype), reduction="sum"
        )
        return loss, len(scores)

    def distribute(self, model, ctx):
        model.features.by_group = self.by_group
        fully_shard(model.features, mesh=ctx.mesh)
        return fully_shard(model, mesh=ctx.mesh)

    def step(self, model, batch, ctx):
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            model.set_requires_gradient_sync(turn == len(parts) - 1)
            loss, _ = self.loss_sum(model, {k: v[low:high] for k, v in batch.items()})
            (loss * ctx.world_size / ROWS).backward()


class Buggy(Clean):
    by_group = True


EXPECT = dict(
    right=[
        r"(?i)features|Bag\b|embedding|table",
        r"(?i)backward|adjoint|gradient (of|that|for|is|comes|handed)|hands? (back|on)",
    ],
    place=[r"(?i)features(\.weight)?|\bBag\b|embedding"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)(hidden|score)\.(weight|bias) (is|are) wrong",
        r"(?i)(never|not) (been )?(all.?)?reduced|(reduced|summed) (twice|again)"
        r"|counted (twice|again)",
        r"(?i)mean of means|divi(ded|des) by (its|their) own (rows|count|number)|world size",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten)"
        r"|only (the )?(first|last) micro",
        r"(?i)only (on )?rank \d|rank \d alone|(other|wrong) (rows|labels|clicks)",
        r"(?i)no gradient|detach|all (features|rows of the table) by the same factor",
    ],
)
WHY = (
    "The forward, the loss and the gradients of hidden and score are right on all ranks. In Bag's own backward the sum of the run number i is divided by the frequency of ordered[i] (element i of the sorted list of all numbers of "
    "the micro-batch), which belongs to an earlier run as soon as some feature stands more than once in the micro-batch; right is the frequency of the run's own feature. So features.weight.grad has rows that are wrong by the ratio "
    "of two frequencies, other rows (at least the first feature of every micro-batch) are right; this differs by micro-batch, on all three ranks and in all micro-batches with repeated features. Only features.weight is wrong. The "
    "reduction of FSDP2, the gradient sync only in the last micro-batch, the divisor 12 and the rows are right. Fix: counts[feature]."
)
