"""Multi-task recommendation: a bottom cut by DTensor tensor parallelism over two ranks, above it task towers that are dealt out to the same
ranks, and data parallelism of two. After reports on DTensor.to_local: the replicated output of the bottom is used otherwise on each rank,
so that its gradients are parts, and nobody adds them up.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "tp": 2}}}}
ROWS, USERS, INPUTS, WIDTH, HIDDEN = 7, 19, 5, 8, 14
TASKS = {"click": 0, "stay": 1, "buy": 0}  # and the rank of each


class Deal(torch.autograd.Function):
    """The same on all ranks, used otherwise on each: what comes back is summed."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Bottom(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return self.down(F.silu(self.up(x)))


class Tasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.users, self.items = nn.Embedding(USERS, WIDTH), nn.Linear(INPUTS, WIDTH)
        self.bottom = Bottom()
        self.towers = nn.ModuleDict(
            {t: nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, 1)) for t in TASKS}
        )

    def forward(self, rows, local=lambda h: h):
        h = local(self.bottom(self.users(rows["user"]) + self.items(rows["item"])))
        total = 0
        for i, task in enumerate(TASKS):
            if task in self.towers:
                each = F.mse_loss(self.towers[task](h)[:, 0], rows["truth"][:, i], reduction="sum")
                total = total + each
        return total


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Tasks()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "user": torch.randint(USERS, (ROWS,), generator=g),
            "item": torch.randn(ROWS, INPUTS, generator=g),
            "truth": torch.randn(ROWS, len(TASKS), generator=g) * 2 + 1,
        }

    def loss_sum(self, model, rows):
        return model(rows), len(rows["user"])

    def distribute(self, model, ctx):
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel(use_local_output=False)}
        parallelize_module(model.bottom, ctx.mesh["tp"], plan)
        for task, rank in TASKS.items():
            if rank != ctx.coords["tp"]:
                del model.towers[task]
        return model

    def local(self, h, group):
        return Deal.apply(h.to_local(), group)

    def step(self, model, batch, ctx):
        rows = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        (model(rows, lambda h: self.local(h, ctx.group("tp"))) / ROWS).backward()
        for p in model.parameters():
            grad = p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
            dist.all_reduce(grad, group=ctx.group("dp"))


class Buggy(Clean):
    def local(self, h, group):
        return h.to_local()


EXPECT = dict(
    right=[
        r"backward|gradient that reaches|gradient .{0,40}(goes into|of what|output)|sum over tp|part",
        r"bottom|down|towers|to_local|tp",
    ],
    place=[r"bottom|down|towers|tp"],
    wrong=[
        r"forward .{0,30}goes wrong in",
        r"(counted|reduced|summed|added) (twice|again|\d times)",
        r"(never|not) (been )?reduced over dp",
        r"own (count|denominator|divisor)",
        r"towers\S* (is|are) wrong|gradients? of (the )?towers\S* (is|are) wrong",
        r"rows? .{0,20}(read|seen) (twice|never)",
    ],
)
WHY = (
    "to_local alone takes the gradient of the bottom's output for the same on both tp ranks, but each has only its own towers' "
    "part (click and buy on tp rank 0, stay on tp rank 1), and the sum over tp is never made. So `bottom.up` and `bottom.down` get the "
    "gradient of the own rank's tasks alone, `users` and `items` a mixture; the towers, the forward and the reduction over dp are right."
)
