"""A convolutional model of DNA profiles (counts per base, Poisson loss) that averages the predictions of both strands. Two data-parallel groups, and in each two ranks: strand rank 0 reads the sequence, strand rank 1 the opposite strand,
turns its profile round again, and the two are summed (backward: identity). Two micro-batches per group; gradients are summed over all four ranks.

The bug: the opposite strand is the reverse complement (positions and the four channels A, C, G, T turned round); strand rank 1 turns the positions only. After gc-os-ai/pyaptamer issue 335 (augment_reverse() computes reverse but
docstrings mentions complement).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "strand": 2}}}}
BASES, CHANNELS, ROWS = 11, 6, 7
PARTS = [[(0, 2), (2, 4)], [(4, 5), (5, 7)]]


class Sum(torch.autograd.Function):
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
        self.motifs = nn.Conv1d(4, CHANNELS, 5, padding=2)
        self.wide = nn.Conv1d(CHANNELS, CHANNELS, 3, padding=2, dilation=2)
        self.profile = nn.Conv1d(CHANNELS, 1, 1)

    def forward(self, x):
        x = F.silu(self.motifs(x))
        x = x + F.silu(self.wide(x))
        return self.profile(x).squeeze(1)


def one_hot(model, ids):
    return F.one_hot(ids, 4).transpose(1, 2).to(next(model.parameters()).dtype)


def poisson(log_rate, counts):
    return (log_rate.exp() - counts * log_rate).sum()


class Clean:
    opposite = (1, 2)

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(4, (ROWS, BASES), generator=g),
            "counts": torch.randint(5, (ROWS, BASES), generator=g),
        }

    def loss_sum(self, model, rows):
        x = one_hot(model, rows["ids"])
        both = model(x) + model(x.flip(1, 2)).flip(1)
        return poisson(both / 2, rows["counts"]), rows["ids"].numel()

    def step(self, model, batch, ctx):
        strand = ctx.coords["strand"]
        for low, high in PARTS[ctx.coords["dp"]]:
            x = one_hot(model, batch["ids"][low:high])
            if strand:
                x = x.flip(self.opposite)
            log_rate = model(x)
            if strand:
                log_rate = log_rate.flip(1)
            both = Sum.apply(log_rate, ctx.group("strand"))
            loss = poisson(both / 2, batch["counts"][low:high])
            (loss / batch["ids"].numel()).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp", "strand"))


class Buggy(Clean):
    opposite = (2,)


EXPECT = dict(
    right=[
        r"(?i)flip|channel|complement|strand|input|first layer|motifs|order|dim|data|features",
        r"(?i)ranks? \[?(1|3)|strand|other half|rank 1 and (rank )?3|odd|half of the ranks",
        r"(?i)forward|input|value|flip|channel|complement|permut|order|other|dim|axis",
    ],
    place=[r"(?i)motifs|input|flip|opposite|\bids\b|one_hot|strand|\bstep\b|Net\b|batch"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed) twice|counted twice",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[23]\b",
        r"(?i)backward of Sum (is|goes) wrong|adjoint of Sum|Sum\b.{0,30}backward.{0,20}wrong",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|only the (first|last) micro.?batch|stale|left over",
        r"(?i)only (on )?ranks? 0\b|ranks? 0 and 2 (go|are) wrong|only (on )?rank 1\b(?!.{0,20}3)",
        r"(?i)labels? .{0,20}(is|are) wrong|counts (is|are) wrong",
    ],
)
WHY = (
    "Ranks with strand coordinate 1 (global ranks 1 and 3), all rows of their data group, both micro-batches: the input x (rows, 4 channels A C G T, positions) must be turned along channels and positions (x.flip(1, 2), reverse complement); "
    "`opposite` = (2,) turns the positions only, so A is not exchanged with T and C not with G. The forward goes wrong at the input of `motifs` on these ranks; their profile, the sum of both strands and the loss of all ranks are then wrong, "
    "so all parameters' gradients are. Turning the profile back, Sum and its backward, the all-reduce over dp and strand and the divisor are right. Fix: opposite = (1, 2)."
)
