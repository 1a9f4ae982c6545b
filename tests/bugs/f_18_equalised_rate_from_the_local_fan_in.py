"""StyleGAN-like equalised learning rate (weights are multiplied by 1/sqrt(fan_in) at run time) under tensor parallelism
with DTensor shards, beside data parallelism. After FAULTS C19/M59 (shard-local size in a formula) and muP-with-TP reports:
row-parallel layers take the fan-in from the local shard.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "tp": 2}}}}
ROWS, PIXELS, WIDTH, HIDDEN = 9, 5, 6, 7


class Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def local(x):
    return x.to_local() if isinstance(x, DTensor) else x


class EqualLinear(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs))
        self.global_size = True

    def forward(self, x):
        weight = local(self.weight)
        fan_in = self.weight.shape[1] if self.global_size else weight.shape[1]
        return F.linear(x, weight * fan_in**-0.5)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = EqualLinear(WIDTH, HIDDEN), EqualLinear(HIDDEN, WIDTH)
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.enter, self.leave = (lambda x: x), (lambda x: x)

    def forward(self, x):
        y = self.leave(self.down(F.leaky_relu(self.up(self.enter(x)), 0.2)))
        return (x + y + self.bias) * 0.5**0.5


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = EqualLinear(PIXELS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.out = EqualLinear(WIDTH, 1)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)[:, 0]


class Clean:
    global_size = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Discriminator()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "image": torch.randn(ROWS, PIXELS, generator=g),
            "sign": torch.randint(2, (ROWS,), generator=g) * 2 - 1,
        }

    def loss_sum(self, model, rows):
        return F.softplus(-model(rows["image"]) * rows["sign"]).sum(), len(rows["sign"])

    def distribute(self, model, ctx):
        mesh, group = ctx.mesh["tp"], ctx.group("tp")
        for block in model.blocks:
            for layer, dim in ((block.up, 0), (block.down, 1)):
                cut = distribute_tensor(layer.weight.detach(), mesh, [Shard(dim)])
                layer.weight, layer.global_size = nn.Parameter(cut), self.global_size
            block.enter = lambda x: Copied.apply(x, group)
            block.leave = lambda x: Summed.apply(x, group)
        return model

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        (self.loss_sum(model, mine)[0] / ROWS).backward()
        for param in model.parameters():
            dist.all_reduce(local(param.grad), group=ctx.group("dp"))


class Buggy(Clean):
    global_size = False


EXPECT = dict(
    right=[
        r"down|blocks\.[01]|row.?parallel",
        r"forward|output|activation|fan.?in|scale|sqrt|factor|local (size|shape|shard)|too large|values?",
    ],
    place=[r"blocks\.0", r"down", r"\btp\b", r"(all|every|each) ranks?|ranks? \W?[0-3]"],
    wrong=[
        r"never (been )?(all.?)?reduced|is not reduced|missing (all.?)?reduc",
        r"counted (twice|\d times)|reduced (twice|again)",
        r"mean of (the )?(rank |ranks' )?means",
        r"forward (pass )?(is|was) (right|exact|correct)$",
        r"(output|forward) of (the )?(stem|blocks\.0\.up)\S* (is|was) wrong|first wrong .{0,20}(stem|blocks\.0\.up)",
        r"detach|no_grad",
    ],
)
WHY = (
    "The row-parallel weights `down` are cut along their inputs (4 and 3 of 7); multiplied by 1/sqrt(4) and 1/sqrt(3) instead of 1/sqrt(7), the partial results are sqrt(7/4) = 1.32 and sqrt(7/3) = 1.53 times too large. "
    "The forward is wrong from blocks.0.down on, on all ranks; `up` is cut along its outputs and has the right scale."
)
