"""Data parallelism on three ranks with 4, 2 and 5 rows, two micro-batches each: cross-entropy plus a penalty on the hidden activations (0.3 times their mean square, summed over rows and divided by all rows). The number of rows for the
cross-entropy is counted from the labels of the batch; the penalty reads it from the size of a DTensor of the own rows, sharded over the ranks. Gradients are summed by hand.

The bug: the DTensor is made with DTensor.from_local without shape and stride, which takes every rank's rows to be as many as the own: the global size is three times the own number of rows. As in pytorch/pytorch issue 110762
(from_local() creates DTensor with wrong .shape/.size() for uneven sharding) and its fix 110781, which adds the two arguments.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
PARTS = [[(0, 2), (2, 4)], [(4, 5), (5, 6)], [(6, 8), (8, 11)]]
ROWS, FEATURES, WIDTH, CLASSES, PENALTY = 11, 5, 7, 4, 0.3


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        hidden = self.second(torch.tanh(self.first(x)))
        return self.out(F.silu(hidden)), hidden


def entropy_sum(model, rows):
    logits, _ = model(rows["x"])
    return F.cross_entropy(logits, rows["y"], reduction="sum"), len(logits)


def penalty_sum(model, rows):
    _, hidden = model(rows["x"])
    return PENALTY * hidden.square().mean(1).sum(), len(hidden)


class Clean:
    guessed = False
    terms = {"entropy": entropy_sum, "penalty": penalty_sum}

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, FEATURES, generator=g),
            "y": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        entropy, count = entropy_sum(model, rows)
        return entropy + penalty_sum(model, rows)[0], count

    def sharded(self, x, whole, group):
        mesh = DeviceMesh.from_group(group, "cpu")
        if self.guessed:
            return DTensor.from_local(x, mesh, [Shard(0)], run_check=False)
        size = torch.Size([whole, *x.shape[1:]])
        stride = torch.empty(size).stride()
        return DTensor.from_local(x, mesh, [Shard(0)], run_check=False, shape=size, stride=stride)

    def step(self, model, batch, ctx):
        group = ctx.group("dp")
        parts = PARTS[ctx.rank]
        own = batch["x"][parts[0][0] : parts[-1][1]]
        number = self.sharded(own, len(batch["y"]), group).shape[0]
        for low, high in parts:
            logits, hidden = model(batch["x"][low:high])
            entropy = F.cross_entropy(logits, batch["y"][low:high], reduction="sum")
            penalty = PENALTY * hidden.square().mean(1).sum()
            (entropy / len(batch["y"]) + penalty / number).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    guessed = True


EXPECT = dict(
    right=[
        r"(?i)penalty|second term|one (of the )?(two )?terms?|term",
        r"(?i)divi|normali[sz]|weight|scal|coefficient|factor|counted|average|mean",
        r"(?i)own (number|count|rows|size)|local|each rank|every rank|per rank|rank.{0,6}s own|differ\w* (by|between|from rank|per|on) ?(the )?rank|ranks? 0.{0,60}ranks? 1|mean of means"
        r"|uneven|11/12|11/6|11/15|1/12|1/6|1/15",
    ],
    place=[r"(?i)penalty|number|from_local|sharded|divisor|normali[sz]"],
    wrong=[
        r"(?i)entropy.{0,30}(is wrong|wrongly|own count|twice)|both terms|all terms",
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)|per micro.?batch|micro.?batch.{0,6}s own",
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)penalty .{0,30}(missing|left out|dropped|detached|never reach)",
        r"(?i)backward .{0,20}(wrong|adjoint)",
    ],
)
WHY = (
    "The penalty is divided by 12 on rank 0 (rows 0-3), 6 on rank 1 (rows 4, 5) and 15 on rank 2 (rows 6-10), three times the own number of rows, instead of 11: the mean of the three ranks' means; coefficients 11/12, 11/6, 11/15 "
    "of the right ones. The cross-entropy with divisor 11 is right on all ranks, so out (which the penalty does not reach) is right, and first and second are wrong on all ranks alike by the penalty's share. Forward, micro-batches "
    "and the all-reduce are right. Fix: pass shape and stride to from_local, or count from the batch."
)
