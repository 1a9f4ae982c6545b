"""Own PowerSGD-like low-rank reduction of the gradients (dp 4, two micro-batches per rank). The rank of the approximation is above the number of rows, so that the gradient of a matrix, a sum of one outer product per row, is represented exactly;
matrices with no more than that rows or columns and biases go through the ordinary sum.

The bug: every rank makes its P = M Q orthogonal before the all-reduce instead of after it, so the sum of four orthonormal bases is used as a basis. The order of steps (all-reduce P, orthogonalise P, Q = M^T P, all-reduce Q) is the point of
epfml/powersgd and of PyTorch's hook (pytorch/pytorch PR 48060, 49417, whose reviews discuss it); mixing them up is the mistake of re-implementations.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 4}}}}
ROWS, INPUT, WIDTH, OUTPUT, MICRO = 7, 19, 17, 3, 1
RANK = ROWS + 4


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(INPUT, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH + 4)
        self.last = nn.Linear(WIDTH + 4, OUTPUT)

    def forward(self, x):
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))


def orthonormal(p):
    return torch.linalg.qr(p)[0]


class LowRank:
    """M = P Q^T, summed over the ranks; P is made orthonormal."""

    def __init__(self, group, sum_first):
        self.group, self.sum_first = group, sum_first

    def all_reduce(self, index, grad):
        g = torch.Generator().manual_seed(100 + index)  # the same start on all ranks
        q = orthonormal(torch.randn(grad.shape[1], RANK, generator=g, dtype=torch.float64)).to(grad)
        p = grad @ q
        if self.sum_first:
            dist.all_reduce(p, group=self.group)
            p = orthonormal(p)
        else:
            p = orthonormal(p)
            dist.all_reduce(p, group=self.group)
            p /= dist.get_world_size(self.group)
        q = grad.t() @ p
        dist.all_reduce(q, group=self.group)
        grad.copy_(p @ q.t())


class Clean:
    sum_first = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, INPUT, generator=g),
            "y": torch.randn(ROWS, OUTPUT, generator=g),
        }

    def loss_sum(self, model, rows):
        return (model(rows["x"]) - rows["y"]).pow(2).sum(), len(rows["y"])

    def step(self, model, batch, ctx):
        group = ctx.group("dp")
        mine = torch.arange(ROWS).tensor_split(ctx.world_size)[ctx.rank]
        for part in mine.split(MICRO):
            ((model(batch["x"][part]) - batch["y"][part]).pow(2).sum() / ROWS).backward()
        compressed = LowRank(group, self.sum_first)
        for i, p in enumerate(model.parameters()):
            if p.dim() == 2 and min(p.shape) > RANK:
                compressed.all_reduce(i, p.grad)
            else:
                dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    sum_first = False


EXPECT = dict(
    right=[
        r"(?i)compress|low.?rank|power.?sgd|orthogonal|orthonormal|\bqr\b|project|subspace|reduc|all.?reduce|after the backward|summed gradient",
        r"(?i)first\.weight|second\.weight|matri(x|ces)|LowRank|weights of",
    ],
    place=[r"(?i)first\.weight|second\.weight|LowRank|compress|orthogonal|orthonormal"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)(first|second|last)\.bias (is|are) wrong|last\.weight (is|are) wrong",
        r"(?i)(never|not) (been )?(all.?)?reduced|(reduced|summed) (twice|again)|counted (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[24]\b",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten)",
        r"(?i)rows? .{0,20}(never read|read twice|dropped)",
        r"(?i)(local|own) backward (is|goes) wrong|goes wrong in the backward (of|through)",
        r"(?i)ranks? (disagree|hold different)",
    ],
)
WHY = (
    "Forward, backward and the local gradients of all ranks are right. In the reduction of first.weight (17 x 19) and second.weight (21 x 17) every rank makes its own P = M_i Q orthonormal, the four bases are averaged, and this mean, which "
    "is neither orthonormal nor a basis of the columns of the summed gradient, is used on both sides: the result is P P^T M instead of M. (Each M_i has rank 1 or 2, P has 11 columns; the other columns of its basis are arbitrary "
    "directions, which come into the mean as well.) The result is the same wrong matrix on all four ranks. last.weight (3 rows) and all biases go through the plain all-reduce and are right. Not a factor, not a lost rank or row, no "
    "micro-batch lost. Fix: all-reduce P first, make the sum orthonormal, then Q = M_i^T P and its all-reduce."
)
