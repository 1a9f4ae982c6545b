"""A sharded parameter server among the workers: every parameter has an owner (in turn over the three data parallel ranks), who gathers its gradients from all ranks with dist.gather, adds them up and broadcasts the sum. A small
convolutional classifier of signals, two micro-batches per rank, seven rows.

The bug: the owner adds the gathered gradients to its own .grad, but dist.gather's list contains its own gradient, too: the owner's rows count twice. After the frequent mistake with gather-to-root reductions (root's own
tensor is among gather_list; e.g. forum threads on averaging gradients by hand with dist.gather).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, CHANNELS, LENGTH, WIDTH, CLASSES = 7, 2, 9, 4, 5


class SignalNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv1d(CHANNELS, WIDTH, 3, padding=1)
        self.conv2 = nn.Conv1d(WIDTH, WIDTH, 3, stride=2)
        self.head = nn.Linear(WIDTH * 4, CLASSES)

    def forward(self, x):
        x = torch.tanh(self.conv1(x))
        return self.head(torch.tanh(self.conv2(x)).flatten(1))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return SignalNet()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, CHANNELS, LENGTH, generator=g),
            "labels": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        return F.cross_entropy(model(rows["x"]), rows["labels"], reduction="sum"), len(rows["x"])

    def collect(self, param, received):
        """On the owner: the sum of what all workers pushed."""
        param.grad.copy_(torch.stack(received).sum(0))

    def push_and_pull(self, model, ctx):
        for index, param in enumerate(model.parameters()):
            owner = index % ctx.world_size
            received = None
            if ctx.rank == owner:
                received = [torch.empty_like(param.grad) for _ in range(ctx.world_size)]
            dist.gather(param.grad, received, dst=owner)
            if ctx.rank == owner:
                self.collect(param, received)
            dist.broadcast(param.grad, src=owner)

    def step(self, model, batch, ctx):
        for p in model.parameters():
            p.grad = None
        mine = {k: x.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, x in batch.items()}
        for i in range(2):
            loss, _ = self.loss_sum(model, {k: x.tensor_split(2)[i] for k, x in mine.items()})
            (loss / ROWS).backward()
        self.push_and_pull(model, ctx)


class Buggy(Clean):
    def collect(self, param, received):
        for grad in received:
            param.grad += grad


EXPECT = dict(
    right=[
        r"twice|two times|2 times|double|2 ?x|x ?2|again|weight(ed)? 2|factor 2|too (much|often)",
        r"own|owner|root|rank|collect|gather",
    ],
    place=[r"collect", r"gather", r"push_and_pull", r"owner|root", r"param\.grad"],
    wrong=[
        r"micro.?batch(es)? .{0,30}(lost|dropped|overwritten|twice|again)",
        r"(all|every) ranks?.{0,30} (are|is) counted twice|reduced twice|not reduced|never reduced",
        r"divisor|mean of means|token count",
        r"read the same rows|rows of another rank",
    ],
)
WHY = (
    "received holds the gradients of all three ranks, the owner's own included, and the owner adds them to a .grad that already is its own gradient: the sum that it broadcasts contains the owner's rows twice and those of the others once. "
    "Parameter 0 and 3 have too much of rank 0's gradient, 1 and 4 of rank 1's, 2 and 5 of rank 2's; the result is equal (equally wrong) on all ranks. A right cause says that the owner's/one rank's contribution counts twice in the gathered sum; "
    "micro-batches and divisor are right. Fix: copy the sum of the list over .grad, or leave the own entry out."
)
