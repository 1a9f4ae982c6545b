"""A next-item model with a sampled softmax whose item table is cut by rows over three tensor parallel ranks (17 items: 6, 6 and 5). Each row has its own sampled negatives; a rank scores those that it owns. The target's score comes from its owner
by an all-reduce, the log-sum-exp over target and negatives goes over the ranks by a maximum and a sum. Two micro-batches; the encoder is replicated.

The bug: the target's score, which every rank has after its all-reduce, is put in front of the own negatives on every rank before the log-sum-exp, so that the denominator has it three times. After vocabulary parallel sampled softmax in
recommender trainers, made from the single process version by sharding the negatives.
"""

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"tp": 3}}}}
ROWS, ITEMS, WIDTH, HISTORY, NEGATIVES, MICRO = 10, 17, 6, 4, 5, 2


class NextItem(nn.Module):
    def __init__(self):
        super().__init__()
        self.history = nn.Embedding(ITEMS, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.items = nn.Parameter(torch.randn(ITEMS, WIDTH))

    def encode(self, history):
        return torch.tanh(self.mix(self.history(history).mean(1)))

    def forward(self, history, target, negatives):
        scores = self.encode(history) @ self.items.T
        chosen = scores.gather(1, torch.cat((target[:, None], negatives), 1))
        return chosen.logsumexp(1) - chosen[:, 0]


class CopyToTensorParallel(torch.autograd.Function):
    @staticmethod
    def forward(fctx, x, group):
        fctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(fctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=fctx.group)
        return grad, None


class ReduceFromTensorParallel(torch.autograd.Function):
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
        return NextItem()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "history": torch.randint(ITEMS, (ROWS, HISTORY), generator=g),
            "target": torch.randint(ITEMS, (ROWS,), generator=g),
            "negatives": torch.randint(ITEMS, (ROWS, NEGATIVES), generator=g),
        }

    def loss_sum(self, model, rows):
        loss = model(rows["history"], rows["target"], rows["negatives"])
        return loss.sum(), len(loss)

    def range_of(self, ctx):
        own = torch.arange(ITEMS).tensor_split(ctx.axes["tp"])[ctx.coords["tp"]]
        return int(own[0]), int(own[-1]) + 1

    def distribute(self, model, ctx):
        lo, hi = self.range_of(ctx)
        model.items = nn.Parameter(model.items.detach()[lo:hi].clone())
        return model

    def parallel_logsumexp(self, scores, group):
        highest = scores.detach().amax(1)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
        total = ReduceFromTensorParallel.apply((scores - highest[:, None]).exp().sum(1), group)
        return total.log() + highest

    def denominator(self, negatives, target, owned, group):
        """negatives: own ones, -inf elsewhere; target: the score, the same on all ranks."""
        target = target.masked_fill(~owned, float("-inf"))
        return self.parallel_logsumexp(torch.cat((target[:, None], negatives), 1), group)

    def own_scores(self, scores, ids, lo, hi, fill):
        inside = (ids >= lo) & (ids < hi)
        picked = scores.gather(1, (ids - lo).clamp(0, hi - lo - 1))
        return picked.masked_fill(~inside, fill), inside

    def sampled_softmax(self, model, part, lo, hi, group):
        hidden = CopyToTensorParallel.apply(model.encode(part["history"]), group)
        scores = hidden @ model.items.T
        target, owned = self.own_scores(scores, part["target"][:, None], lo, hi, 0.0)
        target = ReduceFromTensorParallel.apply(target[:, 0], group)
        negatives, _ = self.own_scores(scores, part["negatives"], lo, hi, float("-inf"))
        return self.denominator(negatives, target, owned[:, 0], group) - target

    def step(self, model, batch, ctx):
        lo, hi = self.range_of(ctx)
        for n in range(MICRO):
            part = {k: x.tensor_split(MICRO)[n] for k, x in batch.items()}
            loss = self.sampled_softmax(model, part, lo, hi, ctx.group("tp"))
            (loss.sum() / ROWS).backward()


class Buggy(Clean):
    def denominator(self, negatives, target, owned, group):
        return self.parallel_logsumexp(torch.cat((target[:, None], negatives), 1), group)


EXPECT = dict(
    right=[
        r"target|positive|label",
        r"(three|3) times|(each|every|all|three|3) (rank|shard)|times|once|again|repeat|duplicat|more than|several|tp|own(ed|er|s)?|too (large|often)|counted|denominator|forward",
    ],
    place=[r"denominator", r"parallel_logsumexp|log.?sum.?exp", r"target", r"softmax"],
    wrong=[
        r"(missing|no|never).{0,20}all.?reduce|not reduced|reduced twice",
        r"micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|divisor|mean of means",
        r"maximum.{0,30}(own|local|gradient)|own normali[sz]er|own denominator|negatives? .{0,30}(counted twice|each rank|every rank|missing)",
        r"CopyToTensorParallel|wrong group|wrong rows",
    ],
)
WHY = (
    "After its all-reduce the target's score is on all three ranks. Clean puts it into the log-sum-exp on its owner alone; Buggy does so on every rank, so that the sum over the ranks contains exp(target) three times beside the negatives, in "
    "both micro-batches. The denominator is too large, the softmax weights are off, and the gradients of the items, the encoder and the history table are wrong on all ranks; the collectives as such and the target's own score are right. A right "
    "cause says that the target is counted once per rank in the denominator. Fix: -inf on the ranks that do not own it."
)
