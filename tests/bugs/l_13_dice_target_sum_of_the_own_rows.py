"""Segmentation with cross-entropy and a batch Dice loss under FSDP2. Modelled on nnU-Net's `batch_dice` with DDP (AllGatherGrad of
intersection, sum of predictions and sum of the targets; its reports on the loss under several GPUs): the sum of the targets, which
has no gradient, is left out of the gathering.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

TOPOLOGY = {"pools": {"scan": {"axes": {"dp": 3}}}}
ROWS, SIDE, WIDTH, CLASSES = 8, 6, 6, 3


class Total(torch.autograd.Function):
    """A sum over ranks of which every rank computes the same value."""

    @staticmethod
    def forward(ctx, x):
        x = x.contiguous().clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class Segmenter(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = (
            nn.Conv2d(2, WIDTH, 3, padding=1, bias=False),
            nn.InstanceNorm2d(WIDTH, affine=True),
        )
        self.second, self.out = nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.Conv2d(WIDTH, CLASSES, 1)

    def forward(self, x):
        x = F.leaky_relu(self.norm(self.first(x)))
        return self.out(x + F.leaky_relu(self.second(x)))


def sums(logits, rows):
    """Per class: intersection, predictions, targets."""
    p, y = logits.softmax(1), F.one_hot(rows["y"], CLASSES).movedim(-1, 1).to(logits.dtype)
    return torch.stack([(p * y).sum((0, 2, 3)), p.sum((0, 2, 3)), y.sum((0, 2, 3))])


def dice(s):
    return 1 - ((2 * s[0] + 1) / (s[1] + s[2] + 1)).mean()


class Clean:
    def __init__(self, seed=0):
        self.seed = seed
        self.terms = {
            "ce": lambda m, r: (
                F.cross_entropy(m(r["x"]), r["y"], reduction="sum"),
                r["y"].numel(),
            ),
            "dice": (lambda m, r: sums(m(r["x"]), r), lambda s, count: dice(s)),
        }

    def build(self):
        torch.manual_seed(self.seed)
        return Segmenter()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        edge = torch.randint(1, SIDE, (ROWS, 1, 1), generator=g)
        y = (torch.arange(SIDE)[:, None] + torch.arange(SIDE) * 0 >= edge).long()
        y = y + (torch.rand(ROWS, SIDE, SIDE, generator=g) < 0.2) * y
        return {"x": torch.randn(ROWS, 2, SIDE, SIDE, generator=g) + y[:, None], "y": y}

    def loss_sum(self, model, rows):
        logits, n = model(rows["x"]), len(rows["y"])
        return n * (F.cross_entropy(logits, rows["y"]) + dice(sums(logits, rows))), n

    def distribute(self, model, ctx):
        fully_shard(model, mesh=ctx.mesh)
        model.set_force_sum_reduction_for_comms(True)
        model.set_gradient_divide_factor(1.0)
        return model

    def of_the_batch(self, s):
        return Total.apply(s)

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        logits = model(mine["x"])
        loss = F.cross_entropy(logits, mine["y"], reduction="sum") / batch["y"].numel()
        (loss + dice(self.of_the_batch(sums(logits, mine)))).backward()


class Buggy(Clean):
    def of_the_batch(self, s):
        return torch.cat([Total.apply(s[:2]), s[2:]])


EXPECT = dict(
    right=[
        r"dice",
        r"statistic|sum|own rows|local|global|ranks?|whole batch|value|denominator|normali[sz]|too (large|small)|scale|factor|"
        r"coefficient|wrong",
    ],
    place=[r"dice"],
    wrong=[
        r"\bce\b (term|loss)\S* .{0,25}(is|was|has) (wrong|lost|scaled|missing|counted)",
        r"(never|not) (been )?(all.?)?(reduced|summed|averaged) (over|across|by|between) (the )?(ranks|dp)[^.]{0,20}(parameter|gradient)",
        r"forward (pass )?(is|was) wrong",
        r"(reduced|counted) (twice|again)",
        r"detach|no_grad|lost its graph|no gradient",
    ],
)
WHY = (
    "The Dice denominator has the predictions of all ranks but the targets of the own rows only, so it is too small and differs by "
    "rank; the Dice term's gradient is too large and in a wrong direction. The cross-entropy term, the forward and the reduction of "
    "gradients are right; all parameters get the wrong Dice gradient."
)
