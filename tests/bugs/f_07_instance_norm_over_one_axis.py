"""A weather-like regression on a grid that is cut in two directions over 2 x 3 ranks; InstanceNorm needs the mean and
the variance of the whole field. After NVIDIA makani/Modulus distributed instance norm and FAULTS C18 (statistics of a
shard), C03 (another group): the statistics are reduced over the ranks of one direction only.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"h": 2, "w": 3}}}}
ROWS, CHANNELS, HEIGHT, WIDTH, INNER = 4, 3, 5, 7, 5


class Total(torch.autograd.Function):
    """A sum over ranks of which every rank uses the result for its own part."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class InstanceNorm(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.ones(channels)),
            nn.Parameter(torch.zeros(channels)),
        )
        self.total = lambda x: x

    def forward(self, x):
        n = self.total(x.new_full((), x.shape[2] * x.shape[3]))
        mean = self.total(x.sum((2, 3))) / n
        x = x - mean[..., None, None]
        var = self.total(x.square().sum((2, 3))) / n
        x = x * torch.rsqrt(var + 1e-5)[..., None, None]
        return x * self.weight[:, None, None] + self.bias[:, None, None]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = InstanceNorm(INNER)
        self.up, self.down = nn.Conv2d(INNER, 8, 1), nn.Conv2d(8, INNER, 1)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Conv2d(CHANNELS, INNER, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.decode = nn.Conv2d(INNER, CHANNELS, 1)

    def forward(self, x):
        x = self.encode(x)
        for block in self.blocks:
            x = block(x)
        return self.decode(x)


class Clean:
    norm_axes = ("h", "w")

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        shape = ROWS, CHANNELS, HEIGHT, WIDTH
        slope = torch.linspace(-1, 1, WIDTH) + torch.linspace(-0.5, 0.5, HEIGHT)[:, None]
        area = torch.cos(torch.linspace(-1.2, 1.2, HEIGHT))[:, None].expand(HEIGHT, WIDTH)
        return {
            "now": torch.randn(shape, generator=g) + slope,
            "then": torch.randn(shape, generator=g),
            "area": area.repeat(ROWS, 1, 1),
        }

    @staticmethod
    def field_loss(guess, rows):
        return ((guess - rows["then"]).square().mean(1) * rows["area"]).sum()

    def loss_sum(self, model, rows):
        return self.field_loss(model(rows["now"]), rows), len(rows["now"])

    def distribute(self, model, ctx):
        group = ctx.group(*self.norm_axes)
        for block in model.blocks:
            block.norm.total = lambda x: Total.apply(x, group)
        return model

    def step(self, model, batch, ctx):
        def own(x):
            for dim, axis in ((-2, "h"), (-1, "w")):
                x = x.tensor_split(ctx.axes[axis], dim=dim)[ctx.coords[axis]]
            return x.contiguous()

        mine = {k: own(v) for k, v in batch.items()}
        (self.field_loss(model(mine["now"]), mine) / ROWS).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)


class Buggy(Clean):
    norm_axes = ("h",)


EXPECT = dict(
    right=[
        r"norm",
        r"forward|output|activation|statistic|mean|variance|values?|own (part|columns|strip|shard)|only over|over (only )?h\b|"
        r"not (over|along) w|axis|group",
    ],
    place=[r"blocks\.0", r"norm", r"\bw\b", r"(all|every|each) ranks?|ranks? \W?[0-5]"],
    wrong=[
        r"parameter.{0,20}(never|not) (been )?(all.?)?reduced|missing (all.?)?reduc\w* of (the )?grad",
        r"counted (twice|\d times)|reduced (twice|again)",
        r"forward (pass )?(is|was) (right|exact|correct)$",
        r"encode\S* .{0,20}first wrong|(forward|output) of encode (is|was) wrong",
        r"detach|no_grad",
        r"over w (only|alone)|not (over|along) h\b",
    ],
)
WHY = (
    "Mean and variance of the instance norms are summed over h and not over w, so each third of the width is normalised by itself. "
    "The forward is wrong from blocks.0.norm on, on all ranks; gradients of all parameters are wrong by direction."
)
