"""Residual MLP blocks under hand-written tensor parallelism (tp 3): the up projection is cut by columns, the down projection by rows, two micro-batches. The column-parallel linear is one autograd Function with its own backward (input gradient,
its sum over the tensor ranks, weight and bias gradient), as in Apex/Megatron's LinearWithGradAccumulationAndAsyncCommunication or dolomite-engine's Functions.

The bug: the process group was added as the first argument of the Function; the backward still asks needs_input_grad[0], [1], [2] for input, weight, bias. [0] is now the group, which never needs a gradient, so the input gradient is not
computed; [1] and [2] happen to be true. The pattern of PyTorch's "Extending PyTorch" linear (discussed in pytorch/pytorch issue 128544 for lists, where the indices of needs_input_grad are off as well), seen in ports of fused linears.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"tp": 3}}}}
ROWS, INPUT, WIDTH, HIDDEN, CLASSES, MICRO = 10, 5, 8, 12, 6, 5


class ColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, group, x, weight, bias):
        ctx.group = group
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward_from(ctx, grad, first):
        x, weight = ctx.saved_tensors
        dx = dw = db = None
        if ctx.needs_input_grad[first]:
            dx = grad @ weight
            dist.all_reduce(dx, group=ctx.group)
        if ctx.needs_input_grad[first + 1]:
            dw = grad.t() @ x
        if ctx.needs_input_grad[first + 2]:
            db = grad.sum(0)
        return None, dx, dw, db

    @staticmethod
    def backward(ctx, grad):
        return ColumnLinear.backward_from(ctx, grad, 1)


class ColumnLinearOldIndices(ColumnLinear):
    @staticmethod
    def backward(ctx, grad):
        return ColumnLinear.backward_from(ctx, grad, 0)


class SumOverRanks(torch.autograd.Function):
    """Partial sums of the row-parallel projection; every rank goes on with the sum, so the gradient passes as it is."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        nn.init.normal_(self.norm.weight, 1.0, 0.3)
        nn.init.normal_(self.norm.bias, 0.0, 0.3)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.group, self.column = None, None

    def forward(self, x):
        if self.group is None:
            return self.norm(x + self.down(F.gelu(self.up(x))))
        h = F.gelu(self.column.apply(self.group, x, self.up.weight, self.up.bias))
        return self.norm(
            x + SumOverRanks.apply(F.linear(h, self.down.weight), self.group) + self.down.bias
        )


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(INPUT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Clean:
    column = ColumnLinear

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, INPUT, generator=g),
            "y": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        return F.cross_entropy(model(rows["x"]), rows["y"], reduction="sum"), len(rows["y"])

    def distribute(self, model, ctx):
        n, r = ctx.world_size, ctx.rank
        for block in model.blocks:
            block.up.weight = nn.Parameter(block.up.weight.detach().chunk(n, 0)[r].clone())
            block.up.bias = nn.Parameter(block.up.bias.detach().chunk(n, 0)[r].clone())
            block.down.weight = nn.Parameter(block.down.weight.detach().chunk(n, 1)[r].clone())
            block.group, block.column = ctx.group("tp"), self.column
        return model

    def step(self, model, batch, ctx):
        for part in torch.arange(ROWS).split(MICRO):
            loss = (
                F.cross_entropy(model(batch["x"][part]), batch["y"][part], reduction="sum") / ROWS
            )
            loss.backward()


class Buggy(Clean):
    column = ColumnLinearOldIndices


EXPECT = dict(
    right=[
        r"(?i)backward|input gradient|gradient (of|to|for|with respect to) (its|the) input|needs_input_grad|adjoint|does not (flow|pass|go)|hands? (back|on)",
        r"(?i)\bup\b|column|ColumnLinear|block",
        r"(?i)miss|lost|lose|drop|zero|none|no gradient|never|not|nothing|without|only|omit|stops|cut off|absent",
    ],
    place=[r"(?i)blocks\.[01](\.up)?|\bup\b|column"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)(head|blocks\.1\.(up|down|norm))\.(weight|bias) (is|are) wrong",
        r"(?i)(reduced|summed) (twice|again)|counted (twice|again)",
        r"(?i)(divisor|divi(ded|des) by (its|their) own|mean of means)|factor of (1/)?3\b",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten)",
        r"(?i)rows? .{0,20}(never read|read twice|dropped)",
        r"(?i)only (on )?rank \d|rank \d alone",
    ],
)
WHY = (
    "The column-parallel Function (blocks.*.up) gives no gradient for its input x: needs_input_grad[0], the flag of the group argument, is False, so neither grad @ weight nor its sum over the three tensor ranks is done, in both blocks, on "
    "all ranks, for both micro-batches. What comes to x is the residual path's part alone. The Function's own weight and bias gradients are right in their formula. So blocks.1 (up, down, norm) and head are right; everything before the "
    "input of blocks.1.up is wrong in direction: blocks.0.norm, blocks.0.up, blocks.0.down (they get the gradient past blocks.1's residual only) and enter.* (misses the MLP path of both blocks). The forward, the sum of the row-parallel "
    "partial products with its identity backward, the divisor 10 and the accumulation are right. Not a missing sum over ranks alone: each rank misses its own part as well. Fix: needs_input_grad[1], [2], [3]."
)
