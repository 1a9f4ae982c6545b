"""Continual learning: a data loss plus an elastic (EWC) penalty on the weights, micro-batches by a budget of rows, gradients summed over dp by hand.
After the reports that a regulariser is scaled by the number of accumulation steps (weight penalty, KL of the weights).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
ROWS, INPUTS, CLASSES = 13, 7, 5
STRENGTH = 0.05
PLAN = [(4, 2), (3, 2, 2)]  # rows of each micro-batch of each rank


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(INPUTS, 16), nn.LayerNorm(16)
        self.second, self.head = nn.Linear(16, 11), nn.Linear(11, CLASSES)
        for name in ("first", "second"):
            weight = getattr(self, name).weight
            self.register_buffer(f"{name}_before", weight.detach() + 0.3 * torch.randn_like(weight))
            self.register_buffer(f"{name}_fisher", torch.rand_like(weight) + 0.2)

    def forward(self, x):
        return self.head(F.silu(self.second(torch.tanh(self.norm(self.first(x))))))

    def elastic(self):
        """Of the two trunk layers; the head is new and free."""
        total = 0
        for name in ("first", "second"):
            moved = getattr(self, name).weight - getattr(self, f"{name}_before")
            total = total + (getattr(self, f"{name}_fisher") * moved.square()).sum()
        return STRENGTH / 2 * total


class Clean:
    def __init__(self, seed=0):
        self.seed = seed
        self.terms = {"data": self.loss_sum, "elastic": lambda model, rows: (model.elastic(), 1)}

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, INPUTS, generator=g),
            "y": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        return F.cross_entropy(model(rows["x"]), rows["y"], reduction="sum"), len(rows["y"])

    def penalty_share(self, micro_batches, world):
        return 1 / (micro_batches * world)

    def step(self, model, batch, ctx):
        sizes = PLAN[ctx.rank]
        start = sum(sum(s) for s in PLAN[: ctx.rank])
        for size in sizes:
            x, y = batch["x"][start : start + size], batch["y"][start : start + size]
            start += size
            loss = F.cross_entropy(model(x), y, reduction="sum") / len(batch["y"])
            loss = loss + model.elastic() * self.penalty_share(len(sizes), ctx.world_size)
            loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    def penalty_share(self, micro_batches, world):
        return 1 / world


EXPECT = dict(
    right=[
        r"elastic|penalt|regulari|term|the parameter itself|without rows|weights? (themselves|alone)",
        r"micro.?batch|2\.5|5/2|accumulat|every (call|backward)|each (call|backward)|\btimes\b|too (large|much|often)|factor",
    ],
    place=[r"elastic|penalt|regulari|first|second|term|weight"],
    wrong=[
        r"forward (is|goes|was) wrong|goes wrong in the forward",
        r"(is|are|was|were) (never|not) (been )?(all.?)?reduced|missing all.?reduc",
        r"do(es)? not read every row once|rows? .{0,20}(never|twice) read",
        r"data (term|loss)? ?(enters|is counted|has a factor)",
        r"(head|norm)\S* (is|are) wrong",
        r"backward of \S*(first|norm|second|head)\S* is wrong",
        r"(reduced|all.?reduced) (twice|again)",
    ],
)
WHY = (
    "The elastic penalty has no rows and belongs into the step once. Its share is taken as 1/world but added to the loss of every micro-batch: rank 0 has two, "
    "rank 1 three, so it counts (2 + 3)/2 = 2.5 times. Only first.weight and second.weight are wrong, alike on both ranks after the all-reduce; the data loss, "
    "all rows, forwards and the reduction are right. Right: divided by the rank's number of micro-batches, too."
)
