"""Next-event prediction over click sequences with layers of gated running means (a cumulative sum over time, divided by the position), sequence parallel: 13 events over five ranks, 3, 3, 3, 2 and 2 of them. The running sum over all ranks is an
own autograd.Function: cumulative sum of the own events plus the totals of the ranks before. Weights replicated, gradients summed, two micro-batches.

The bug: in the backward the cumulative sum of the own events runs from the end, as it must, but the totals that are added are again those of the ranks before. The gradient of an event is the sum over all later positions: the totals of the ranks
after must be added. The line was copied from the forward. After reviews of sequence parallel linear attention (LASP-like), where the states go forwards and the gradients of the states backwards.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"sp": 5}}}}
ROWS, EVENTS, ITEMS, WIDTH, MICRO = 7, 13, 17, 10, 2


class RunningSum(torch.autograd.Function):
    @staticmethod
    def others(x, ranks, group):
        """The totals over time of the ranks from `ranks`, added."""
        total = x.sum(1, keepdim=True)
        totals = [torch.empty_like(total) for _ in range(dist.get_world_size(group))]
        dist.all_gather(totals, total, group=group)
        return sum(totals[ranks], torch.zeros_like(total))

    @staticmethod
    def forward(ctx, x, before, back, group):
        ctx.back, ctx.group = back, group
        return x.cumsum(1) + RunningSum.others(x, before, group)

    @staticmethod
    def backward(ctx, g):
        from_the_end = g.flip(1).cumsum(1).flip(1)
        return from_the_end + RunningSum.others(g, ctx.back, ctx.group), None, None, None


class Shard:
    def __init__(self, span=slice(0, EVENTS), before=None, back=None, group=None):
        self.span, self.before, self.back, self.group = span, before, back, group

    def running_mean(self, x):
        if self.group is None:
            total = x.cumsum(1)
        else:
            total = RunningSum.apply(x, self.before, self.back, self.group)
        position = torch.arange(self.span.start, self.span.stop).to(x.dtype) + 1
        return total / position[:, None]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.value, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 14), nn.Linear(14, WIDTH)

    def forward(self, x, shard):
        y = self.norm(x)
        past = shard.running_mean(torch.tanh(self.value(y)))
        x = x + self.out(past * torch.sigmoid(self.gate(y)))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(ITEMS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, ITEMS)
        self.shard = Shard()

    def forward(self, items):
        x = self.embed(items)
        for layer in self.layers:
            x = layer(x, self.shard)
        return self.head(x)


class Clean:
    onwards = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "items": torch.randint(ITEMS, (ROWS, EVENTS), generator=g),
            "clicked": torch.randint(ITEMS, (ROWS, EVENTS), generator=g),
        }

    def loss_sum(self, model, rows):
        logits = model(rows["items"]).flatten(0, 1)
        loss = F.cross_entropy(logits, rows["clicked"].flatten(), reduction="sum")
        return loss, rows["clicked"].numel()

    def distribute(self, model, ctx):
        own = torch.arange(EVENTS).tensor_split(ctx.world_size)[ctx.rank]
        before, after = slice(0, ctx.rank), slice(ctx.rank + 1, None)
        back = after if self.onwards else before
        model.shard = Shard(slice(int(own[0]), int(own[-1]) + 1), before, back, ctx.group("sp"))
        return model

    def step(self, model, batch, ctx):
        mine = {k: v[:, model.shard.span] for k, v in batch.items()}
        for m in range(MICRO):
            rows = {k: v.tensor_split(MICRO)[m] for k, v in mine.items()}
            (self.loss_sum(model, rows)[0] / batch["clicked"].numel()).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("sp"))


class Buggy(Clean):
    onwards = False


EXPECT = dict(
    right=[
        r"(?i)backward|adjoint|transpos|gradient of|vjp|way back",
        r"(?i)running|cumulat|sum|prefix|totals?|sequence|shard|ranks? (before|after)|later|earlier|exchange|value|\bsp\b|other ranks",
    ],
    place=[r"(?i)layers?\.[01]|running|cumulat|\bvalue\b|\bnorm\b|backward of"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)parameters? .{0,30}(never|not) (been )?(all.?)?reduced|(reduced|summed) (twice|again)|counted (twice|again)",
        r"(?i)wrong divisor|divi(ded|des) by (its|their) own|factor of (1/)?5\b",
        r"(?i)(head|layers\.1\.(gate|out|up|down|norm2))(\.(weight|bias))? (is|are) wrong",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten)",
    ],
)
WHY = (
    "The backward of RunningSum must add to the reversed cumulative sum of the own events the totals of the ranks after this one; it adds those of the ranks before. Rank 0 adds nothing instead of the totals of ranks 1 to 4, rank 4 adds "
    "those of ranks 0 to 3 instead of nothing; only the part of the own events is right. Forward and loss are right on all ranks. The gradient that leaves the running sum of layers.1 is wrong on every rank (rank 2, in the middle, adds ranks "
    "0 and 1 instead of 3 and 4), so value and norm of layers.1, layers.0 and embed get wrong gradients, in direction, equal on all ranks after the all-reduce. head, and of layers.1 norm2, up, down, out and gate are right, since their "
    "gradients do not pass through a running sum. Of layers.0 all are wrong. The reduction of the parameters, the count, the positions and the rows are right. Fix: totals of ranks r + 1 and later in the backward."
)
