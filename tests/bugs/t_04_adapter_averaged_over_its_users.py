"""A shared trunk with a bottleneck adapter per task, batches sorted by task so that a rank sees only some of them; gradients averaged by hand, None as zeros.
After the reports on parameters that are unused on some ranks and hand-written averages that skip them.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 4}}}}
TASKS = [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 2, 2]  # ranks hold 4, 4, 3, 3 of them
ROWS, INPUTS, WIDTH, OUTPUTS = len(TASKS), 6, 12, 3


class Adapter(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH)

    def forward(self, x):
        return x + self.up(F.relu(self.down(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Linear(INPUTS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        )
        self.adapters = nn.ModuleList(Adapter() for _ in range(3))
        self.head = nn.Linear(WIDTH, OUTPUTS)

    def forward(self, x, task):
        h = self.trunk(x)
        out = torch.zeros_like(h)
        for t in task.unique().tolist():
            rows = (task == t).nonzero().flatten()
            out = out.index_copy(0, rows, self.adapters[t](h[rows]))
        return self.head(out)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, INPUTS, generator=g),
            "task": torch.tensor(TASKS),
            "y": torch.randn(ROWS, OUTPUTS, generator=g),
        }

    def loss_sum(self, model, rows):
        return (model(rows["x"], rows["task"]) - rows["y"]).square().sum(), len(rows["x"])

    def divisor(self, users, world):
        return world

    def average(self, model, group):
        params = list(model.parameters())
        used = torch.tensor([p.grad is not None for p in params], dtype=torch.int64)
        dist.all_reduce(used, group=group)
        for p, users in zip(params, used.tolist(), strict=True):
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad, group=group)
            p.grad /= self.divisor(users, dist.get_world_size(group))

    def step(self, model, batch, ctx):
        model.zero_grad(set_to_none=True)
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        loss, _ = self.loss_sum(model, mine)
        (loss * ctx.world_size / ROWS).backward()
        self.average(model, ctx.group("dp"))


class Buggy(Clean):
    def divisor(self, users, world):
        return max(users, 1)


EXPECT = dict(
    right=[r"adapters?", r"divid|divisor|averag|factor|times|4/3|1\.33|scale"],
    place=[r"adapters?"],
    wrong=[
        r"forward (is|goes|was) wrong|goes wrong in the forward",
        r"(is|are|was|were) (never|not) (been )?(all.?)?reduced|missing all.?reduc",
        r"do(es)? not read every row once|rows? .{0,20}(never|twice) read",
        r"(trunk|head)\S* (is|are) wrong",
        r"backward of \S*(trunk|adapters?|head|up|down)\S* is wrong",
        r"(reduced|summed) (twice|again)",
        r"divid\w+ by (its|their) own (count|number of rows)",
    ],
)
WHY = (
    "After the all-reduce each gradient is divided by the number of ranks that had one, and not by the world, while the loss is scaled for an average over all four. "
    "Trunk and head are used everywhere and right. adapters.0 is used on ranks 0 and 1 (4/2 = 2 times), adapters.1 on ranks 1, 2 and 3 (4/3 times), adapters.2 "
    "on rank 3 (4 times), alike on all ranks. Forward, loss, backward and the sum are right. Right: the world size for every parameter."
)
