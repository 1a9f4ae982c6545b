"""A 1-D convolutional classifier (ECG, audio) whose signal is cut over ranks, with halos. The second convolution has stride 2.
After LBANN DistConv / NVIDIA makani spatial-parallel convolutions and FAULTS C19 (a global index used as if it were local):
parts of odd length begin at odd positions, but every rank starts its stride at its own first sample.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"space": 3}}}}
ROWS, LENGTH, CHANNELS, CLASSES, MICRO_BATCHES = 7, 19, 5, 4, 2
OUTPUTS = (LENGTH + 1) // 2


class Everyone(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.stack(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad[dist.get_rank()]


class Summed(torch.autograd.Function):
    """What follows is the same on every rank."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv1d(2, CHANNELS, 3, padding=1)
        self.second = nn.Conv1d(CHANNELS, CHANNELS + 1, 3, padding=1, stride=2)
        self.head = nn.Linear(CHANNELS + 1, CLASSES)

    def forward(self, x):
        x = F.gelu(self.second(F.gelu(self.first(x))))
        return self.head(x.mean(-1))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, 2, LENGTH, generator=g),
            "y": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        return F.cross_entropy(model(rows["x"]), rows["y"], reduction="sum"), len(rows["y"])

    def first_output(self, start):
        """Outputs sit at even positions of the whole signal."""
        return start % 2

    def step(self, model, batch, ctx):
        rank, last = ctx.rank, ctx.world_size - 1
        positions = torch.arange(LENGTH).tensor_split(ctx.world_size)[rank]
        start = int(positions[0])

        def with_halo(x):
            edges = Everyone.apply(torch.stack([x[..., 0], x[..., -1]], dim=-1))
            zero = torch.zeros_like(x[..., :1])
            left = edges[rank - 1][..., 1:] if rank > 0 else zero
            right = edges[rank + 1][..., :1] if rank < last else zero
            return torch.cat([left, x, right], dim=-1)

        def forward(x):
            x = F.gelu(F.conv1d(with_halo(x), model.first.weight, model.first.bias))
            x = with_halo(x)[..., self.first_output(start) :]
            x = F.gelu(F.conv1d(x, model.second.weight, model.second.bias, stride=2))
            return model.head(Summed.apply(x.sum(-1)) / OUTPUTS)

        for i in range(MICRO_BATCHES):
            micro = {k: v.tensor_split(MICRO_BATCHES)[i] for k, v in batch.items()}
            logits = forward(micro["x"][..., positions])
            (F.cross_entropy(logits, micro["y"], reduction="sum") / ROWS).backward()
        for param in (*model.first.parameters(), *model.second.parameters()):
            dist.all_reduce(param.grad)


class Buggy(Clean):
    def first_output(self, start):
        return 0


EXPECT = dict(
    right=[
        r"forward|output|activation|loss|positions?|offset|stride|phase|values?|input of (the )?head|logits",
        r"second|head|convolution|conv|stride",
    ],
    place=[r"second", r"head", r"ranks? \W?[12]\b", r"conv"],
    wrong=[
        r"never (been )?(all.?)?reduced|is not reduced|missing (all.?)?reduc",
        r"counted (twice|\d times)|reduced (twice|again)",
        r"mean of (the )?(rank |ranks' )?means",
        r"halo .{0,20}(detached|without gradient|missing)",
        r"micro-?batch(es)? (is|are|was|were) (lost|missing|dropped)",
        r"averag\w+ (instead|where)",
    ],
)
WHY = (
    "Ranks 1 and 2 hold the positions from 7 and from 13 on, both odd; they compute the stride-2 outputs centred at 7, 9, 11 and 13, 15, 17 "
    "instead of 8, 10, 12 and 14, 16, 18. The forward is wrong from the second convolution on (ranks 1 and 2, and through the "
    "sum over ranks the head everywhere)."
)
