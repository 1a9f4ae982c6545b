"""A click model with three embedding tables, one per rank, and a data-parallel dense part. After the DLRM and TorchRec examples (gradients
of model-parallel tables come from all ranks and need the division that DDP does for the dense part) and FAULTS C09-04: they are not
divided.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"ads": {"axes": {"dp": 3}}}}
ROWS, BAG, DENSE, WIDTH = 14, 4, 5, 6
SIZES = 17, 8, 11


class PooledExchange(torch.autograd.Function):
    """From the pooled vectors of all rows and one table to those of own rows and all tables."""

    @staticmethod
    def forward(ctx, pooled):
        parts = [torch.empty_like(pooled) for _ in SIZES]
        dist.all_gather(parts, pooled.contiguous())
        return torch.stack([p.tensor_split(len(SIZES))[dist.get_rank()] for p in parts], dim=1)

    @staticmethod
    def backward(ctx, grad):
        whole = grad.new_zeros(ROWS, len(SIZES), WIDTH)
        whole.tensor_split(len(SIZES))[dist.get_rank()].copy_(grad)
        dist.all_reduce(whole)
        return whole[:, dist.get_rank()]


class Clicks(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleDict(
            {str(i): nn.EmbeddingBag(n, WIDTH, mode="sum") for i, n in enumerate(SIZES)}
        )
        self.bottom = nn.Sequential(nn.Linear(DENSE, 7), nn.ReLU(), nn.Linear(7, WIDTH))
        self.top = nn.Sequential(nn.Linear(WIDTH + 6, 9), nn.ReLU(), nn.Linear(9, 1))

    def forward(self, dense, pooled):
        x = self.bottom(dense)
        both = torch.cat([x[:, None], pooled], dim=1)
        i, j = torch.triu_indices(4, 4, offset=1)
        crossed = (both @ both.mT)[:, i, j] / WIDTH
        return self.top(torch.cat([x, crossed], dim=1))[:, 0]


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Clicks()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = [torch.randint(n, (ROWS, BAG), generator=g) for n in SIZES]
        return {
            "ids": torch.stack(ids, dim=1),
            "dense": torch.randn(ROWS, DENSE, generator=g),
            "clicked": (torch.rand(ROWS, generator=g) < 0.4).float(),
        }

    @staticmethod
    def click_loss(logits, clicked):
        return F.binary_cross_entropy_with_logits(logits, clicked, reduction="sum")

    def loss_sum(self, model, rows):
        pooled = [table(rows["ids"][:, int(i)]) for i, table in model.tables.items()]
        logits = model(rows["dense"], torch.stack(pooled, dim=1))
        return self.click_loss(logits, rows["clicked"]), len(logits)

    def distribute(self, model, ctx):
        for i in range(len(SIZES)):
            if i != ctx.rank:
                del model.tables[str(i)]
        return model

    def finish(self, model, size):
        for param in (*model.bottom.parameters(), *model.top.parameters()):
            dist.all_reduce(param.grad)
        for param in model.parameters():
            param.grad /= size

    def step(self, model, batch, ctx):
        model.zero_grad()
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        pooled = model.tables[str(ctx.rank)](batch["ids"][:, ctx.rank])
        logits = model(mine["dense"], PooledExchange.apply(pooled))
        (self.click_loss(logits, mine["clicked"]) * ctx.world_size / ROWS).backward()
        self.finish(model, ctx.world_size)


class Buggy(Clean):
    def finish(self, model, size):
        for param in (*model.bottom.parameters(), *model.top.parameters()):
            dist.all_reduce(param.grad)
            param.grad /= size


EXPECT = dict(
    right=[
        r"tables",
        r"\b3\b|three|thrice|world.?size|number of ranks|too (large|big)|not divided|\bdp\b",
    ],
    place=[r"tables"],
    wrong=[
        r"(bottom|top)\.\S+ (is|are|has|have) (a )?wrong",
        r"(not|never) (all.?)?(reduced|summed)",
        r"mean of (the )?means",
        r"forward (pass )?(is|was) wrong",
        r"(all|every) parameters? (is|are) wrong",
        r"counted (twice|2 times)",
    ],
)
WHY = (
    "The loss is scaled by the world size for the average of the dense part; the tables get the gradients of all rows through the "
    "exchange and are not divided, so tables.* are 3 times too large, each on the rank that owns it. The dense part is right."
)
