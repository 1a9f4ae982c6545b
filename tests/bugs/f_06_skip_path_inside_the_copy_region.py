"""A residual conv net whose blocks are cut by channels over tp (column- then row-parallel), DDP over dp. After FAULTS
C06 (a complete gradient is summed again) and C07-01/C06-10: the `copy` region begins at the top of the block, so
that the skip connection, which is replicated, passes through its summing backward as well.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "tp": 2}}}}
ROWS, CHANNELS, HIDDEN, CLASSES = 7, 4, 7, 3


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


def same(x):
    return x


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.widen = nn.Conv2d(CHANNELS, HIDDEN, 3, padding=1)
        self.narrow = nn.Conv2d(HIDDEN, CHANNELS, 3, padding=1, bias=False)
        self.bias = nn.Parameter(0.1 * torch.randn(CHANNELS))
        self.norm = nn.GroupNorm(2, CHANNELS)
        self.enter_all, self.enter, self.leave = same, same, same

    def forward(self, x):
        x = self.enter_all(x)
        y = self.leave(self.narrow(F.relu(self.widen(self.enter(x)))))
        return self.norm(x + y + self.bias[:, None, None])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, CHANNELS, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(CHANNELS * 2, CLASSES)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(torch.cat([x.mean((2, 3)), x.amax((2, 3))], dim=-1))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "image": torch.randn(ROWS, 3, 6, 5, generator=g),
            "label": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        loss = F.cross_entropy(model(rows["image"]), rows["label"], reduction="sum")
        return loss, len(rows["label"])

    def enter(self, block, copy):
        block.enter = copy

    def distribute(self, model, ctx):
        group, place, size = ctx.group("tp"), ctx.coords["tp"], ctx.axes["tp"]

        def cut(param, dim):
            return nn.Parameter(param.detach().tensor_split(size, dim=dim)[place].clone())

        for block in model.blocks:
            block.widen.weight, block.widen.bias = (
                cut(block.widen.weight, 0),
                cut(block.widen.bias, 0),
            )
            block.narrow.weight = cut(block.narrow.weight, 1)
            block.leave = lambda x: Summed.apply(x, group)
            self.enter(block, lambda x: Copied.apply(x, group))
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        loss, _ = self.loss_sum(model, mine)
        (loss * ctx.axes["dp"] / ROWS).backward()


class Buggy(Clean):
    def enter(self, block, copy):
        block.enter_all = copy


EXPECT = dict(
    right=[
        r"stem|blocks\.0|before (the )?(last|second) block|upstream|blocks\.1.{0,40}input|input .{0,40}blocks",
        r"twice|two times|2 times|double|[x\u00d7]\s?2|2\s?[x\u00d7]|factor|too (large|big|much|often)|again|once too|more than once|"
        r"\btp\b|over-?count|skip|residual|backward of|adjoint|replicat|already (complete|summed|reduced)",
    ],
    place=[r"stem", r"blocks\.[01]", r"\btp\b", r"skip|residual"],
    wrong=[
        r"forward (pass )?(is|was) (wrong|different)|forward differs",
        r"never (been )?(all.?)?reduced|is not reduced|missing (all.?)?reduc",
        r"head\S* (is|are|was|were) wrong",
        r"blocks\.1\.(norm|narrow|widen|bias)\S* (is|are) (wrong|counted|twice)",
        r"mean of (the )?(rank |ranks' )?means",
        r"\bdp\b.{0,20}(twice|again)|lacks? .{0,30}rows",
    ],
)
WHY = (
    "The gradient of the skip path is complete on every rank of tp, and `copy`'s backward sums it over tp: it counts 2 times beside the "
    "branch's, which counts once. The gradient that leaves blocks.1 towards blocks.0 and the stem is wrong (skip part x 2), and at blocks.0 "
    "once more for the stem; blocks.1's own parameters and the head are exact, and so is the forward."
)
