"""DDP on three ranks with a communication hook, two micro-batches of odd sizes (no_sync for the first): the gradient of the feature extractor counts a quarter (feature_grad_mult of wav2vec 2.0). The plain model multiplies in the graph,
the distributed step in the hook, while the bucket is reduced anyway.

The bug: the hook asks only whether the first parameter of the bucket belongs to the extractor and multiplies the whole bucket buffer or nothing. Buckets do not end where modules end. After pytorch/audio PR 2335 (feature_grad_mult) and
pytorch/pytorch PR 61637 and PR 53009 (parameters and per-parameter gradients of a bucket in a hook, made for such layer-wise operations).
"""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
FEATURES, WIDTH, CLASSES, FACTOR = 4, 6, 3, 0.25
PARTS = [[(0, 2), (2, 3)], [(3, 4), (4, 7)], [(7, 10), (10, 11)]]
ROWS = 11


class Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * FACTOR


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.extractor = nn.Sequential(
            nn.Linear(FEATURES, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU()
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.encoder = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.in_graph = True

    def forward(self, x):
        x = self.extractor(x)
        x = self.norm(Multiply.apply(x) if self.in_graph else x)
        return self.head(x + self.encoder(x))


class State:
    def __init__(self, extractor, group, whole):
        self.extractor = {id(p) for p in extractor.parameters()}
        self.group, self.size, self.whole = group, dist.get_world_size(group), whole


def reduce_and_scale(state, bucket):
    buffer = bucket.buffer()
    if state.whole:
        if id(bucket.parameters()[0]) in state.extractor:
            buffer.mul_(FACTOR)
    else:
        for p, grad in zip(bucket.parameters(), bucket.gradients()):
            if id(p) in state.extractor:
                grad.mul_(FACTOR)
    buffer.div_(state.size)
    work = dist.all_reduce(buffer, group=state.group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


class Clean:
    whole = False

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
        return F.cross_entropy(model(rows["x"]), rows["y"], reduction="sum"), len(rows["y"])

    def distribute(self, model, ctx):
        model.in_graph = False
        group = ctx.group("dp")
        wrapped = DistributedDataParallel(model, process_group=group)
        wrapped.register_comm_hook(State(model.extractor, group, self.whole), reduce_and_scale)
        return wrapped

    def step(self, model, batch, ctx):
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                logits = model(batch["x"][low:high])
                loss = F.cross_entropy(logits, batch["y"][low:high], reduction="sum")
                (loss * ctx.world_size / ROWS).backward()


class Buggy(Clean):
    whole = True


EXPECT = dict(
    right=[
        r"(?i)norm|encoder|head|bucket",
        r"(?i)1/4|0\.25|quarter|\b4\b|factor|scal|multipl",
        r"(?i)factor|scal|1/4|0\.25|quarter|multipl|divi|times",
    ],
    place=[r"(?i)norm|encoder|head|bucket|hook"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)(never|not) (been )?(all.?)?reduced|(reduced|summed) (twice|again)",
        r"(?i)mean of means|divi(ded|des) by (its|their) own|world size .{0,20}(wrong|missing)",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)",
        r"(?i)only (on )?rank \d\b|rank \d alone|ranks (differ|disagree)",
        r"(?i)head\.(weight|bias) (is|are) wrong|wrong direction",
        r"(?i)recomput|detach",
        r"(?i)extractor[a-z0-9.]* (is|are) (wrong|scaled wrongly)|all parameters .{0,20}(1/4"
        r"|0\.25)",
    ],
)
WHY = (
    "The model is small and lies in one bucket, whose first parameter is extractor.0.weight. The hook of Buggy therefore multiplies the whole buffer by 0.25: norm, encoder and head, which should count fully, come out as "
    "exactly 1/4 of the right gradient, on all three ranks alike; the extractor is right (it should be multiplied). Forward, losses, no_sync, divisor 11, the division by the world size in the hook and the all-reduce are "
    "right. Fix: go through bucket.parameters() and bucket.gradients() and multiply only the extractor's gradients, as Clean does."
)
