"""IA3 on a frozen tensor-parallel feed-forward network. Modelled on the adapter-under-TP reports (FAULTS C05-11, C05-12: sum the
gradients of replicated adapter factors over the tensor group; Megatron-Bridge, NeMo's IA3): each tensor rank uses its slice of a
replicated vector, so the gradients are to be summed, and the loop that keeps replicated parameters alike averages them.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"tune": {"axes": {"dp": 2, "tp": 2}}}}
ROWS, WIDTH, HIDDEN, CLASSES = 11, 6, 10, 4


class CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class SumOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.requires_grad_(False)
        self.ia3 = nn.Parameter(1 + 0.2 * torch.randn(HIDDEN))

    def forward(self, x):
        return x + self.down(self.ia3 * F.gelu(self.up(self.norm(x))))

    def cut(self, x, ctx):
        group, tp = ctx.group("tp"), ctx.coords["tp"]
        mine = torch.arange(HIDDEN).chunk(ctx.axes["tp"])[tp]
        h = F.gelu(
            F.linear(CopyIn.apply(self.norm(x), group), self.up.weight[mine], self.up.bias[mine])
        )
        out = SumOut.apply(F.linear(self.ia3[mine] * h, self.down.weight[:, mine]), group)
        return x + out + self.down.bias


class Tuned(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Tuned()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, WIDTH, generator=g),
            "y": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        x = rows["x"]
        for block in model.blocks:
            x = block(x)
        return F.cross_entropy(model.head(x), rows["y"], reduction="sum"), len(rows["y"])

    def keep_alike(self, name, grad, ctx):
        dist.all_reduce(grad, group=ctx.group("tp"))
        if "ia3" not in name:
            grad /= ctx.axes["tp"]

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        x = mine["x"]
        for block in model.blocks:
            x = block.cut(x, ctx)
        (F.cross_entropy(model.head(x), mine["y"], reduction="sum") / ROWS).backward()
        for name, param in model.named_parameters():
            if param.requires_grad:
                self.keep_alike(name, param.grad, ctx)
                dist.all_reduce(param.grad, group=ctx.group("dp"))


class Buggy(Clean):
    def keep_alike(self, name, grad, ctx):
        dist.all_reduce(grad, group=ctx.group("tp"))
        grad /= ctx.axes["tp"]


EXPECT = dict(
    right=[
        r"ia3",
        r"half|1/2|0\.5|\btp\b|tensor",
        r"averag|divid|mean|half|1/2|0\.5|factor|too small|scaled",
    ],
    place=[r"ia3"],
    wrong=[
        r"head\S* (is|are|has|have) (a )?wrong",
        r"(never|not) (been )?(all.?)?(reduced|summed)",
        r"forward (pass )?(is|was) wrong",
        r"(reduced|counted|summed) (twice|again)",
        r"own rows|mean of (the )?(rank |ranks' )?means",
        r"over (the )?(axis )?\W?dp\W? instead|averaged over (the )?(axis )?\W?dp",
    ],
)
WHY = (
    "Each tensor rank has the gradient of its own half of the ia3 vectors and zeros elsewhere; the average over tp instead of the sum "
    "halves it. blocks.*.ia3 is half of what it should be on all four ranks; the head, of which all tensor ranks hold the same "
    "gradient, is right, and so is the forward."
)
