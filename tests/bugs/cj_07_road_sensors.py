"""Traffic forecasting on a fixed graph of eleven sensors: two rounds of messages, the mean over
the roads that lead into a sensor, and a linear update.

Parallelism: the sensors are cut over gp (3); each rank gathers the states of all sensors (with
the adjoint in the backward), aggregates for the sensors that it owns, and the gradients of the
replicated weights are summed.

Bug: the owner's aggregation is written with scatter_reduce(reduce="mean") on a buffer of zeros.
Its default include_self=True counts the zero of the buffer as one more message: a sensor with k
roads divides by k + 1. After ports of torch_scatter's scatter_mean to torch's scatter_reduce.
"""

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"gp": 3}}}}
N, F_IN, D = 11, 3, 6
ROADS = [
    (0, 1),
    (1, 2),
    (2, 3),
    (3, 0),
    (4, 1),
    (5, 1),
    (6, 5),
    (7, 6),
    (8, 7),
    (9, 8),
    (10, 9),
    (2, 10),
    (0, 6),
    (3, 8),
    (9, 4),
]


class CollectSensors(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, lo, group):
        ctx.lo, ctx.own, ctx.group = lo, x.shape[1], group
        full = x.new_zeros(x.shape[0], N, x.shape[2])
        full[:, lo : lo + x.shape[1]] = x
        dist.all_reduce(full, group=group)
        return full

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        dist.all_reduce(g, group=ctx.group)
        return g[:, ctx.lo : ctx.lo + ctx.own], None, None


def mean_of_messages(messages, target, size):
    total = messages.new_zeros(messages.shape[0], size, messages.shape[2]).index_add(
        1, target, messages
    )
    degree = torch.bincount(target, minlength=size).clamp(min=1)
    return total / degree[:, None].to(total.dtype)


class Round(nn.Module):
    def __init__(self):
        super().__init__()
        self.message = nn.Linear(D, D)
        self.update = nn.Linear(2 * D, D)


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(F_IN, D)
        self.rounds = nn.ModuleList([Round(), Round()])
        self.out = nn.Linear(D, 1)
        self.register_buffer("roads", torch.tensor(ROADS).t().contiguous(), persistent=False)

    def forward(self, x):
        source, target = self.roads
        h = torch.tanh(self.enter(x))
        for r in self.rounds:
            m = mean_of_messages(r.message(h)[:, source], target, N)
            h = h + torch.tanh(r.update(torch.cat([h, m], -1)))
        return self.out(h).squeeze(-1)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Forecaster()

    def batch(self):
        g = torch.Generator().manual_seed(700 + self.seed)
        return {
            "speed": torch.randn(5, N, F_IN, generator=g),
            "next": torch.randn(5, N, generator=g),
        }

    def loss_sum(self, model, rows):
        return (model(rows["speed"]) - rows["next"]).square().sum(), rows["next"].numel()

    def aggregate(self, messages, target, size):
        return mean_of_messages(messages, target, size)

    def forward_own(self, model, x, lo, hi, group):
        source, target = model.roads
        mine = (target >= lo) & (target < hi)
        source, target = source[mine], target[mine] - lo
        h = torch.tanh(model.enter(x[:, lo:hi]))
        for r in model.rounds:
            sent = CollectSensors.apply(r.message(h), lo, group)
            m = self.aggregate(sent[:, source], target, hi - lo)
            h = h + torch.tanh(r.update(torch.cat([h, m], -1)))
        return model.out(h).squeeze(-1)

    def step(self, model, batch, ctx):
        gp, r = ctx.axes["gp"], ctx.coords["gp"]
        cuts = [round(i * N / gp) for i in range(gp + 1)]
        lo, hi = cuts[r], cuts[r + 1]
        out = self.forward_own(model, batch["speed"], lo, hi, ctx.group("gp"))
        ((out - batch["next"][:, lo:hi]).square().sum() / batch["next"].numel()).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("gp"))


class Buggy(Clean):
    def aggregate(self, messages, target, size):
        out = messages.new_zeros(messages.shape[0], size, messages.shape[2])
        index = target.view(1, -1, 1).expand_as(messages)
        return out.scatter_reduce(1, index, messages, reduce="mean")


EXPECT = dict(
    right=[
        r"include_self|scatter_reduce|count\w* .*(one|zero|buffer|itself|initial)|k ?\+ ?1|"
        r"degree ?\+ ?1|one (more|too many|extra)|(additional|extra) (zero|message|element)|"
        r"divid\w+ .*\+ ?1",
        r"mean|averag|divid|degree|aggregat",
    ],
    place=[r"aggregate", r"scatter_reduce", r"include_self", r"mean_of_messages", r"forward_own"],
    wrong=[
        r"degree .*(of own|local) (edges|roads)",
        r"CollectSensors.*(backward|adjoint).*(wrong|miss)",
        r"(edges|roads) .*(cut|lost|dropped) (at|between)",
        r"not (all.?)?reduced",
    ],
)
WHY = """Buggy.aggregate calls scatter_reduce(..., reduce="mean") on zeros without
include_self=False. The zero of the output counts as a message, so the mean of a sensor with k
incoming roads is divided by k + 1. The messages are too small in the forward, so all gradients
are wrong, first of all those of message and update; the exchange and the reduction are right. A
right cause says that the mean counts the initial zero (include_self). The fix is
include_self=False."""
