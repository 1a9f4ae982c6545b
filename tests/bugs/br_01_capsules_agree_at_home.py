"""A capsule network (dynamic routing by agreement): ten input capsules are cut over three ranks (4, 3 and 3), every rank sees all seven images and holds the votes of its own input capsules.
In each of three routing rounds the weighted votes are summed over all input capsules, squashed, and compared with the votes. Two micro-batches, gradients summed over the ranks at the end.

The bug: the sum over the ranks is taken in the last round only; in the first two rounds each rank squashes the sum of its own capsules, so that the agreement which moves the couplings is
one with the rank's own part of the output capsule. After capsule parallel codes which "reduce the output capsules once, after routing" to save communication.
"""

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"caps": 3}}}}
ROWS, INPUTS, FEATURES, POSE, OUTPUTS, OUT_POSE, ROUNDS = 7, 10, 5, 4, 3, 5, 3


class CapsuleNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.primary = nn.Linear(FEATURES, POSE)
        self.vote = nn.Parameter(torch.randn(INPUTS, OUTPUTS, POSE, OUT_POSE) * 0.7)

    def votes(self, x, lo, hi):
        u = torch.tanh(self.primary(x[:, lo:hi]))
        return torch.einsum("bip,ijpq->bijq", u, self.vote[lo:hi])


def squash(s):
    n2 = s.square().sum(-1, keepdim=True)
    return s * n2.sqrt() / (1 + n2)


class SumOverRanks(torch.autograd.Function):
    """Sum over the ranks; what they do with it differs, so the gradients are summed as well."""

    @staticmethod
    def forward(fctx, x, group):
        fctx.group = group
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(fctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=fctx.group)
        return grad, None


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return CapsuleNet()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, INPUTS, FEATURES, generator=g),
            "label": torch.randint(OUTPUTS, (ROWS,), generator=g),
        }

    @staticmethod
    def margin(v, label):
        length = v.square().sum(-1).sqrt()
        hot = nn.functional.one_hot(label, OUTPUTS).to(v.dtype)
        return (hot * (0.9 - length).square() + 0.5 * (1 - hot) * (length - 0.1).square()).sum()

    def loss_sum(self, model, rows):
        votes = model.votes(rows["x"], 0, INPUTS)
        b = votes.new_zeros(votes.shape[:3])
        for _ in range(ROUNDS):
            v = squash((b.softmax(2)[..., None] * votes).sum(1))
            b = b + 2 * (votes * v[:, None]).sum(-1)
        return self.margin(v, rows["label"]), len(votes)

    def route(self, votes, group):
        b = votes.new_zeros(votes.shape[:3])
        for _ in range(ROUNDS):
            s = (b.softmax(2)[..., None] * votes).sum(1)
            v = squash(SumOverRanks.apply(s, group))
            b = b + 2 * (votes * v[:, None]).sum(-1)
        return v

    def step(self, model, batch, ctx):
        own = torch.arange(INPUTS).tensor_split(ctx.world_size)[ctx.rank]
        lo, hi = int(own[0]), int(own[-1]) + 1
        group = ctx.group("caps")
        for p in model.parameters():
            p.grad = None
        for n in range(2):
            part = {k: x.tensor_split(2)[n] for k, x in batch.items()}
            v = self.route(model.votes(part["x"], lo, hi), group)
            # every rank has the same loss: a share of it each
            (self.margin(v, part["label"]) / ctx.world_size / ROWS).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    def route(self, votes, group):
        b = votes.new_zeros(votes.shape[:3])
        for r in range(ROUNDS):
            s = (b.softmax(2)[..., None] * votes).sum(1)
            if r == ROUNDS - 1:
                return squash(SumOverRanks.apply(s, group))
            b = b + 2 * (votes * squash(s)[:, None]).sum(-1)


EXPECT = dict(
    right=[
        r"rout|squash|agreement|coupling|SumOverRanks|caps|\bs\b|\bv\b|iteration|round",
        r"(not|never|without|missing|lacks?|lacking|only (once|in the last|the last)|omit|skip|fewer|own|local|partial|rank'?s part).{0,120}"
        r"(sum|reduc|collective|all.?reduce|capsule|votes|part|shard|round|exchang)"
        r"|(sum|reduc|collective|all.?reduce|round|exchang).{0,120}(missing|own|local|partial|not |never|fewer|only|instead of)",
    ],
    place=[r"\broute\b", r"SumOverRanks", r"squash", r"rout(e|ing)"],
    wrong=[
        r"divided twice|counted (twice|three times|3 times)|wrong divisor|mean of means",
        r"parameter gradients?.{0,30}(not|never) reduced|micro.?batch.{0,20}(lost|dropped|overwritten)",
        r"wrong adjoint|backward of SumOverRanks",
    ],
)
WHY = (
    "The output capsule of every routing round is the squashed sum of the weighted votes of all ten input capsules. The buggy route() reduces this sum over the three ranks only in round three; in rounds one "
    "and two each rank squashes the sum of its own 4, 3 or 3 capsules, so its agreements, and with them the couplings of the last round, are other than in one process, on all ranks and in both micro-batches. "
    "Loss and gradient are wrong everywhere, though collectives, their adjoints and the final reduction are right. A right cause says that the weighted votes are not summed over the ranks (own, partial sums) in the "
    "earlier rounds of route(). Fix: SumOverRanks in each round."
)
