"""A survival model (Cox's partial likelihood) under DDP on four ranks; the risk sets contain the rows of all ranks, scores are gathered with a gradient. After the implementations that sort the
batch by time in the collate function and take a running logsumexp (pycox and others), made distributed.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 4}}}}
ROWS, CHANNELS, LENGTH = 18, 3, 10


class GatherRows(torch.autograd.Function):
    """Rows of all ranks, of unlike number; each rank's loss uses all of them in its own way."""

    @staticmethod
    def forward(ctx, x, sizes):
        ctx.sizes = sizes
        padded = x.new_zeros(max(sizes), *x.shape[1:])
        padded[: len(x)] = x
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded)
        return torch.cat([part[:n] for part, n in zip(parts, sizes, strict=True)])

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone().contiguous()
        dist.all_reduce(grad)
        return grad.split(ctx.sizes)[dist.get_rank()], None


class Survival(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(CHANNELS, 8, 3), nn.Conv1d(8, 9, 3, stride=2)
        self.norm = nn.GroupNorm(3, 9)
        self.hidden, self.risk = nn.Linear(9, 7), nn.Linear(7, 1, bias=False)

    def forward(self, signal):
        h = torch.relu(self.norm(self.conv2(torch.tanh(self.conv1(signal))))).mean(-1)
        return self.risk(torch.tanh(self.hidden(h))).squeeze(-1)


def partial_likelihood(scores, order, event, own):
    """Minus the log-likelihood of the events among `own`, all in the given order (late first)."""
    at_risk = scores[order].logcumsumexp(0)
    return ((at_risk - scores[order]) * (event & own)[order]).sum()


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Survival()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        event = torch.rand(ROWS, generator=g) < 0.6
        event[0] = True
        return {
            "signal": torch.randn(ROWS, CHANNELS, LENGTH, generator=g),
            "time": torch.rand(ROWS, generator=g) * 10,
            "event": event,
        }

    def loss_sum(self, model, rows):
        scores, event = model(rows["signal"]), rows["event"]
        order = rows["time"].argsort(descending=True)
        return partial_likelihood(scores, order, event, torch.ones_like(event)), event.sum()

    def distribute(self, model, ctx):
        return DistributedDataParallel(model)

    def collate(self, mine):
        return mine

    def order(self, time):
        return time.argsort(descending=True)

    def step(self, model, batch, ctx):
        sizes = [len(part) for part in torch.arange(ROWS).tensor_split(ctx.world_size)]
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        mine = self.collate(mine)
        scores = GatherRows.apply(model(mine["signal"]), sizes)
        time = GatherRows.apply(mine["time"], sizes)
        event = GatherRows.apply(mine["event"].long(), sizes).bool()
        own = torch.arange(ctx.world_size).repeat_interleave(torch.tensor(sizes)) == ctx.rank
        loss = partial_likelihood(scores, self.order(time), event, own)
        (loss * ctx.world_size / event.sum()).backward()


class Buggy(Clean):
    def collate(self, mine):
        order = mine["time"].argsort(descending=True)
        return {k: v[order] for k, v in mine.items()}

    def order(self, time):
        return torch.arange(len(time))  # sorted by the collate function


EXPECT = dict(
    right=[
        r"loss|logcumsumexp|partial_likelihood|likelihood|risk sets?|scores|v_07\S*:\d+",
        r"order|sort|index|getitem|other (rows|elements|targets|places)|another|permut|argument|position|logcumsumexp|running|cumulative|risk sets?|does not belong|"
        r"gradient (that|which) (reaches|goes)|the loss itself",
    ],
    place=[r"loss|logcumsumexp|partial_likelihood|risk|score|order|v_07\S*:\d+"],
    wrong=[
        r"(is|are|was|were) (never|not) (been )?(all.?)?reduced|missing all.?reduc",
        r"(counted|reduced|summed|added) (twice|again|\d times)",
        r"(own|local) (count|denominator|divisor)|own number of",
        r"goes wrong in (conv|norm|hidden|risk)|forward of (conv|norm|hidden|risk)\S* is wrong",
        r"backward of \S*(conv|norm|hidden|risk|GatherRows)\S* is wrong",
        r"do(es)? not read every row once|rows? .{0,20}(never|twice) read",
        r"averages? (where|instead of)|own rows (only|alone)",
    ],
)
WHY = (
    "Each rank sorts its own rows by time, and the gathered list, one rank after the other, is taken for sorted: the running logsumexp over it is no risk set. A row of rank 0 sees only rank 0's later rows, a row of rank 3 all rows of ranks 0 to 2, "
    "whatever their times. Scores are right for their rows; the loss (at_risk) and the gradient that goes into the scores are wrong, so all parameters on all ranks (which agree). "
    "The gather and its backward, the factor of world size against DDP's average, and the number of events are right. Right: sort after the gather."
)
