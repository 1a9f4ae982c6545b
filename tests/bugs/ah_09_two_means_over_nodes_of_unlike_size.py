"""DDP over five ranks on two machines of three and two GPUs, with a hierarchical communication hook: the bucket is averaged within the machine, then averaged between the machines (first rank of each), then broadcast within the machine.
Two micro-batches per rank (no_sync for the first). The loss is a sum over rows times world size over all rows, since DDP's reduction is to be an average over the ranks.

The bug: both stages divide by the size of their own group. 1/3 and 1/2 within the machines, 1/2 between them: the ranks of the larger machine count with 1/6, those of the smaller with 1/4, where 1/5 is right. Two averages in a row are
the average of all only if the machines are alike: horovod runs hierarchical all-reduce on homogeneous clusters only (compare horovod PR #411); pytorch RFC #71325 (hierarchical averaging), and the question in ROCm/rocm-systems PR #7851
(average within, then between).
"""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 5}}}}
MACHINES = [[0, 1, 2], [3, 4]]
FEATURES, WIDTH, CLASSES, ROWS = 5, 8, 4, 17
PARTS = [
    [(0, 2), (2, 4)],
    [(4, 5), (5, 7)],
    [(7, 8), (8, 10)],
    [(10, 13), (13, 14)],
    [(14, 15), (15, 17)],
]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(FEATURES, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        h = F.silu(self.norm(self.enter(x)))
        return self.head(h + torch.tanh(self.hidden(h)))


class Machines:
    """The groups of the hook, as its state."""

    def __init__(self, rank, each_its_own):
        groups = [dist.new_group(ranks) for ranks in MACHINES]
        heads = dist.new_group([ranks[0] for ranks in MACHINES])
        here = next(i for i, ranks in enumerate(MACHINES) if rank in ranks)
        self.inside, self.first = groups[here], MACHINES[here][0]
        self.between = heads if rank == self.first else None
        self.each_its_own = each_its_own
        self.size, self.world = len(MACHINES[here]), sum(map(len, MACHINES))


def by_machine(state, bucket):
    grad = bucket.buffer()
    if state.each_its_own:
        grad.div_(state.size)
    dist.all_reduce(grad, group=state.inside)
    if state.between is not None:
        if state.each_its_own:
            grad.div_(len(MACHINES))
        dist.all_reduce(grad, group=state.between)
    dist.broadcast(grad, state.first, group=state.inside)
    if not state.each_its_own:
        grad.div_(state.world)
    done = torch.futures.Future()
    done.set_result(grad)
    return done


class Clean:
    each_its_own = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, FEATURES, generator=g),
            "label": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        return F.cross_entropy(model(rows["x"]), rows["label"], reduction="sum"), len(rows["x"])

    def distribute(self, model, ctx):
        model = DistributedDataParallel(model, process_group=ctx.group("dp"))
        model.register_comm_hook(Machines(ctx.rank, self.each_its_own), by_machine)
        return model

    def step(self, model, batch, ctx):
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                logits = model(batch["x"][low:high])
                loss = F.cross_entropy(logits, batch["label"][low:high], reduction="sum")
                (loss * ctx.world_size / ROWS).backward()


class Buggy(Clean):
    each_its_own = True


EXPECT = dict(
    right=[
        r"(?i)weight|count|factor|scal|divi|average|mean|coefficient",
        r"(?i)5/6|5/4|1/6|1/4|0\.83|1\.25|ranks? .{0,15}(0|3|4)|unequal|uneven|differ|own (size|"
        r"group)|node|machine",
        r"(?i)rank|machine|node|group|reduc",
    ],
    place=[r"(?i)reduc|hook|average|ranks? .{0,20}[0-4]|machine|node|group"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)(never|not) (been )?(all.?)?reduced|reduced (twice|again)|lost|dropped",
        r"(?i)all ranks .{0,25}(same|one) factor|pure scale|all (gradients|"
        r"parameters) .{0,20}(too (large|small) by|times) (one|the same) factor",
        r"(?i)micro.?batch(es)? .{0,25}(lost|dropped|overwritten|weigh|too (much|little))",
        r"(?i)only (on )?rank [0-4]\b|rank [0-4] alone|ranks (end|hold|"
        r"differ).{0,25}different gradients",
        r"(?i)(number of|own) rows|mean of means over rows|token|label",
    ],
)
WHY = (
    "Forward, loss and the local gradients are right on all ranks. In the reduction ranks 0, 1, 2 (rows 0-9, machine of three) enter with 1/3 x 1/2 = 1/6, ranks 3 and 4 (rows 10-16, machine of two) with 1/2 x 1/2 = 1/4; right is "
    "1/5 for all. So the rows of ranks 0-2 count 5/6 and those of ranks 3 and 4 count 5/4 of what they should, in all parameters and both micro-batches alike; all ranks hold the same wrong gradient. Divisor 17 with the factor 5, "
    "the groups and no_sync are right. Fix: sum in both stages and divide once by the world size."
)
