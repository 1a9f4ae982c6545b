"""A tabular network under FSDP2 with a group-lasso penalty, the Frobenius norm of each weight matrix.
After FAULTS C17-08 (SpecForge PR 663): the norm of a parameter is that of the rank's shard.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"shard": 3}}}}
ROWS, FEATURES, WIDTH, PENALTY = 14, 6, 11, 0.3


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 7),
            nn.Linear(7, WIDTH),
        )

    def forward(self, x):
        return x + self.down(F.silu(self.up(self.norm(x))))


class Tabular(nn.Module):
    def __init__(self):
        super().__init__()
        self.category, self.numbers = nn.Embedding(10, WIDTH), nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(Residual() for _ in range(2))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x, c):
        x = self.numbers(x) + self.category(c)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed
        self.terms = {"fit": self.fit_sum, "lasso": self.lasso}

    def build(self):
        torch.manual_seed(self.seed)
        return Tabular()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, FEATURES, generator=g),
            "c": torch.randint(10, (ROWS,), generator=g),
            "y": torch.randn(ROWS, 4, generator=g),
            "weight": torch.randint(1, 4, (ROWS,), generator=g),
        }

    def fit_sum(self, model, rows):
        loss = F.smooth_l1_loss(model(rows["x"], rows["c"]), rows["y"], reduction="none").sum(-1)
        return (loss * rows["weight"]).sum(), rows["weight"].sum()

    def lasso(self, model, rows):
        return PENALTY * sum(p.norm() for p in model.parameters() if p.ndim > 1), 1

    def loss_sum(self, model, rows):
        fit, count = self.fit_sum(model, rows)
        return fit + count * self.lasso(model, rows)[0], count

    def distribute(self, model, ctx):
        for part in (*model.blocks, model):
            fully_shard(part, mesh=ctx.mesh)
            part.set_force_sum_reduction_for_comms(True)
            part.set_gradient_divide_factor(1.0)
        return model

    def frobenius(self, shard):
        square = shard.square().sum()
        dist.all_reduce(square)
        return square.sqrt()

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        loss, count = self.fit_sum(model, mine)
        dist.all_reduce(count)
        (loss / count).backward()
        with torch.no_grad():  # the penalty's gradient needs no graph: W / |W|
            for param in model.parameters():
                if param.ndim > 1:
                    shard = param.to_local()
                    norm = self.frobenius(shard).clamp(min=1e-12)
                    param.grad.to_local().add_(shard / norm, alpha=PENALTY)


class Buggy(Clean):
    def frobenius(self, shard):
        return shard.norm()


EXPECT = dict(
    right=[
        r"lasso|penalty|regulari[sz]|weight.?decay|norm|term",
        r"shard|local|own (part|rows|slice|norm)|per.?rank|each rank|rank.?(s own|wise)|partial|different (factor|scale|coefficient)\w* (on|per)"
        r"|factors? differ",
    ],
    place=[r"lasso|penalty|norm", r"shard", r"weight", r"ranks?"],
    wrong=[
        r"fit\S* (term )?(is|has|gets) (wrong|divided|scaled)",
        r"gradients? (is|are|was|were) (not|never) (all.?)?(reduced|summed)",
        r"(reduced|counted|divided) (twice|again)",
        r"bias\S* (is|are) wrong",
        r"clip",
    ],
)
WHY = (
    "Each rank divides its shard of W by the norm of that shard instead of |W|: the lasso term is too large by |W| / |shard| "
    "(about sqrt(3)), another factor on each rank and each weight matrix. The fit term and the one-dimensional parameters "
    "are right."
)
