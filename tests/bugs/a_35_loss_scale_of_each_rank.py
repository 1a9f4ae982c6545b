"""Dynamic loss scaling by hand: the scale backs off where a rank's activations overflow. After
FAULTS class C17 (found_inf not reduced; DeepSpeed and Megatron).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}

ROWS, INPUTS, WIDTH, CLASSES = 9, 6, 9, 4
INITIAL_SCALE, OVERFLOW = 1024.0, 15.0


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(INPUTS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        x = torch.randn(ROWS, INPUTS, generator=g)
        x[4] *= 40  # an outlier
        return {"x": x, "y": torch.randint(CLASSES, (ROWS,), generator=g)}

    def loss_sum(self, model, rows):
        return F.cross_entropy(model(rows["x"]), rows["y"], reduction="sum"), len(rows["x"])

    def mine(self, batch, ctx):
        return {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}

    def step(self, model, batch, ctx):
        mine = self.mine(batch, ctx)
        scale = self.loss_scale(mine)
        loss, _ = self.loss_sum(model, mine)
        (loss * scale / ROWS).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)
            param.grad /= scale

    def loss_scale(self, mine):
        found_inf = (mine["x"].abs().amax() > OVERFLOW).int()
        dist.all_reduce(found_inf, op=dist.ReduceOp.MAX)
        return INITIAL_SCALE / 2 if found_inf else INITIAL_SCALE


class Buggy(Clean):
    def loss_scale(self, mine):
        found_inf = mine["x"].abs().amax() > OVERFLOW
        return INITIAL_SCALE / 2 if found_inf else INITIAL_SCALE


EXPECT = dict(
    right=[r"rank 1|ranks? 0|rows? 3", r"0\.500?\b|half|1/2|twice|\b2(\.0+)?\b|scale|factor|weigh"],
    place=[r"rank 1|rows? 3|ranks 0|rank 0"],
    wrong=[
        r"gradient.{0,30}(not|never) reduced",
        r"mean of (the )?means",
        r"rows? .{0,30}(lost|missing|dropped)",
        r"micro-?batch.{0,30}(lost|dropped)",
    ],
)

WHY = (
    "Rank 1 alone halves its loss scale: its rows count half in the sum on ranks 0 and 2, and "
    "rank 1 divides the sum by its own scale."
)
