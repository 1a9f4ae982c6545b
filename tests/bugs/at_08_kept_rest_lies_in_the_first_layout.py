"""DistributedDataParallel on three ranks with an own communication hook: per micro-batch it sends the large entries of the bucket and keeps the rest (error feedback), the last of three micro-batches
sends all that is left, so the sum is complete. The
loss is the sum of a classification over uneven micro-batches, the divisor the number of all rows.

The bug: the rest is kept by bucket index. DDP builds its buckets anew before the second forward, in the order in which the gradients became ready, so that the rest of the first micro-batch is added
to a bucket with another order of parameters. As in
pytorch/pytorch PR 48867 (key of error_dict), 51427 and 55271 (PowerSGD must not start before the buckets have been rebuilt). The right code keeps the rest by parameter.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
FEATURES, WIDTH, CLASSES = 5, 6, 4
PARTS = [[(0, 2), (2, 5), (5, 6)], [(6, 9), (9, 11), (11, 13)], [(13, 14), (14, 16), (16, 19)]]


class Feedback:
    def __init__(self, group, by_index):
        self.group, self.by_index = group, by_index
        self.last, self.rest = False, {}

    def keys(self, bucket):
        return [bucket.index()] if self.by_index else list(bucket.parameters())

    def pieces(self, bucket):
        return [bucket.buffer()] if self.by_index else bucket.gradients()


def send_large_entries(state, bucket):
    for key, piece in zip(state.keys(bucket), state.pieces(bucket)):
        if key in state.rest:
            piece.add_(state.rest.pop(key))
        if not state.last:
            small = piece.abs() < piece.abs().mean()
            state.rest[key] = torch.where(small, piece, torch.zeros_like(piece))
            piece.masked_fill_(small, 0)
    world = dist.get_world_size(state.group)
    work = dist.all_reduce(bucket.buffer(), group=state.group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0] / world)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(FEATURES, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.norm(self.inner(x))
        return self.head(x + F.silu(self.middle(x)))


class Clean:
    by_index = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = PARTS[-1][-1][1]
        return {
            "x": torch.randn(rows, FEATURES, generator=g),
            "label": torch.randint(CLASSES, (rows,), generator=g),
        }

    def loss_sum(self, model, rows):
        return F.cross_entropy(model(rows["x"]), rows["label"], reduction="sum"), len(rows["x"])

    def distribute(self, model, ctx):
        ddp = DistributedDataParallel(model, process_group=ctx.group("dp"))
        self.state = Feedback(ctx.group("dp"), self.by_index)
        ddp.register_comm_hook(self.state, send_large_entries)
        return ddp

    def step(self, model, batch, ctx):
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            self.state.last = turn == len(parts) - 1
            loss, _ = self.loss_sum(model, {k: v[low:high] for k, v in batch.items()})
            (loss * ctx.world_size / len(batch["x"])).backward()


class Buggy(Clean):
    by_index = True


EXPECT = dict(
    right=[
        r"(?i)hook|bucket|reduc|communicat|after the backward|transport|all.?reduce"
        r"|between backward and",
        r"(?i)micro.?batch|order|layout|foreign|other param|mixed|wrong (place|param"
        r"|entries)|permut|shuffl|reduc|rest|kept|residual"
        r"|neither|does not (fit|match)|is not the sum|own gradients? .{0,40}right",
    ],
    place=[r"(?i)hook|bucket|reduc|communicat|all.?reduce"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the (forward|backward)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)(never|not) (been )?(all.?)?reduced|reduced twice|summed twice|counted (twice|again)",
        r"(?i)last micro.?batch .{0,20}(is )?(lost|dropped|missing|never)",
        r"(?i)only (on )?rank [012]\b|rank [012] alone",
        r"(?i)(labels?|input|rows) .{0,15}(is|are) (wrong|other)",
    ],
)
WHY = (
    "Forward, backward and every rank's own gradients are right. There is one bucket; in the first backward its entries are in the order of registration (inner, norm, middle, head), from the second "
    "forward on in the order of readiness (about the reverse: head first, inner last). The "
    "rest kept of micro-batch 0 (entries smaller than the mean) lies in the first layout and is added to the bucket of micro-batch 1 in the second: small entries of micro-batch 0 land at other "
    "parameters or places, on all ranks (each rank its own rest), and are missing at "
    "theirs. The rest of micro-batch 1 fits in micro-batch 2. So all parameters are wrong after the reduction, equally on all ranks; the sum over all entries of the gradient is right. Divisor 19, "
    "all-reduce, average, the flush with the last micro-batch are right. "
    "Fix: keep the rest by parameter, or begin after the buckets were rebuilt."
)
