"""A bagged ensemble of two small classifiers with batch normalisation over the full batch; each of
six ranks trains one member (axis ens, 2) on its rows (axis dp, 3: 4, 4 and 3 of 11), with the row
weights of the member's own bootstrap. Batch statistics are summed over the ranks by a hand-written
synchronised norm. Gradients are summed over dp, then the members' are handed to the other ranks.

Bug: the synchronised norm is made without a group, as convert_sync_batchnorm does by default, and
sums over all ranks: it normalises with the mean and variance of both members' hidden values
together. After ensembles and sub-groups trained with process_group=None.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"ens": 2, "dp": 3}}}}
ROWS, FEATURES, HIDDEN, CLASSES, MEMBERS = 11, 5, 6, 3, 2


class Total(torch.autograd.Function):
    """Sum over ranks; each rank's loss uses the sum, so that gradients are summed as well."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        dist.all_reduce(g, group=ctx.group)
        return g, None


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(HIDDEN) + 0.5)
        self.bias = nn.Parameter(torch.randn(HIDDEN) * 0.3)

    def moments(self, x):
        return x.sum(0), x.new_tensor(x.shape[0])

    def second(self, x):
        return x.square().sum(0)

    def forward(self, x):
        total, count = self.moments(x)
        x = x - total / count
        variance = self.second(x) / count
        return x * (variance + 1e-3).rsqrt() * self.weight + self.bias


class SyncNorm(Norm):
    def __init__(self, norm, group=None):
        super().__init__()
        self.weight, self.bias, self.group = norm.weight, norm.bias, group

    def moments(self, x):
        count = x.new_tensor(x.shape[0])
        dist.all_reduce(count, group=self.group)
        return Total.apply(x.sum(0), self.group), count

    def second(self, x):
        return Total.apply(x.square().sum(0), self.group)


class Member(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(FEATURES, HIDDEN, bias=False)
        self.norm = Norm()
        self.leave = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x):
        return self.leave(F.silu(self.norm(self.enter(x))))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 10)
        return nn.ModuleList([Member() for _ in range(MEMBERS)])

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1000)
        drawn = torch.randint(0, ROWS, (MEMBERS, ROWS), generator=g)
        weight = torch.stack([d.bincount(minlength=ROWS) for d in drawn], 1)
        return {
            "x": torch.randn(ROWS, FEATURES, generator=g) * 1.5,
            "y": torch.randint(0, CLASSES, (ROWS,), generator=g),
            "weight": weight.float(),
        }

    def member_loss(self, member, i, rows):
        loss = F.cross_entropy(member(rows["x"]), rows["y"], reduction="none")
        return (loss * rows["weight"][:, i]).sum()

    def loss_sum(self, model, rows):
        losses = [self.member_loss(member, i, rows) for i, member in enumerate(model)]
        return sum(losses), rows["y"].shape[0]

    def synchronise(self, norm, ctx):
        return SyncNorm(norm, ctx.group("dp"))

    def distribute(self, model, ctx):
        for member in model:
            member.norm = self.synchronise(member.norm, ctx)
        return model

    def step(self, model, batch, ctx):
        i = ctx.coords["ens"]
        rows = torch.arange(ROWS).tensor_split(ctx.axes["dp"])[ctx.coords["dp"]]
        part = {k: v[rows] for k, v in batch.items()}
        (self.member_loss(model[i], i, part) / ROWS).backward()
        for p in model[i].parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))
        for j, member in enumerate(model):
            for p in member.parameters():
                if j != i:
                    p.grad = torch.zeros_like(p)
                dist.all_reduce(p.grad, group=ctx.group("ens"))


class Buggy(Clean):
    def synchronise(self, norm, ctx):
        return SyncNorm(norm)


EXPECT = dict(
    right=[
        r"norm|statistic|mean|variance|moment|SyncNorm|Total",
        r"group|world|all (six |6 )?ranks|\bens\b|other member|both members|across members|over "
        r"members|ensemble|process_group",
    ],
    place=[r"SyncNorm", r"synchronise", r"\bgroup\b", r"\bnorm\b", r"\bTotal\b", r"moments"],
    wrong=[
        r"not synchroni[sz]ed|\blocal\b statistic|own rows' statistic|statistics of (the )?own",
        r"(missing|never|twice).{0,20}(all.?reduc|reduc)",
        r"unbiased|eps\b.{0,20}wrong",
        r"(bootstrap|row) weights?.{0,30}(wrong|other member)",
        r"uneven.{0,40}rows",
        r"running (mean|statistic)",
    ],
)
WHY = """SyncNorm without a group reduces sums, squares and counts over the default group: all six
ranks, that is both members of the ensemble. Each member's hidden values are then normalised with
mean and variance of the two members together (the rows are counted twice, consistently), and the
backward mixes the members' gradients. All parameters are wrong;
the sums over dp and the exchange over ens are right. A right cause says that the batch statistics
are taken over the wrong group (world / ens too). Fix: SyncNorm(norm, ctx.group("dp"))."""
