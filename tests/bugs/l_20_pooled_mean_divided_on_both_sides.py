"""A recommender with embedding tables dealt out to the ranks and mean pooling of lists of different length; the pooled vectors travel to
the ranks of the rows, and their gradients back. Modelled on the reports on mean pooling in model-parallel tables (torchrec, HugeCTR,
DLRM: who divides, the owner of the table or the owner of the row): in the backward both do.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"ads": {"axes": {"mp": 3}}}}
ROWS, LIST, DENSE, WIDTH, SIZES = 12, 5, 4, 5, (11, 7, 9, 6)


class Lookup(torch.autograd.Function):
    """Pooled vectors of the own rows from the tables of all ranks."""

    @staticmethod
    def forward(ctx, anchor, program, ids, lengths, tables, *weights):
        world, rank = dist.get_world_size(), dist.get_rank()
        valid = (torch.arange(LIST) < lengths[..., None]).to(anchor.dtype)
        pooled = torch.empty(len(ids), len(SIZES), WIDTH, dtype=anchor.dtype)
        for t in range(len(SIZES)):
            part = torch.empty(len(ids), WIDTH, dtype=anchor.dtype)
            if t in tables:
                rows = weights[tables.index(t)][ids[:, t]] * valid[:, t, :, None]
                part = rows.sum(1) / lengths[:, t, None]
            dist.broadcast(part, t % world)
            pooled[:, t] = part
        ctx.kept, ctx.sizes = (program, ids, lengths, valid, tables), [len(w) for w in weights]
        return pooled.chunk(world)[rank].clone()

    @staticmethod
    def backward(ctx, grad):
        program, ids, lengths, valid, tables = ctx.kept
        world, rank = dist.get_world_size(), dist.get_rank()
        grad = program.before_sending(grad, lengths.chunk(world)[rank]).contiguous()
        parts = [torch.empty_like(grad) for _ in range(world)]
        dist.all_gather(parts, grad)
        full = torch.cat(parts) / lengths[..., None]
        gradients = []
        for t, size in zip(tables, ctx.sizes):
            each = full[:, t, None] * valid[:, t, :, None]
            table = torch.zeros(size, WIDTH, dtype=grad.dtype)
            gradients.append(table.index_add_(0, ids[:, t].flatten(), each.flatten(0, 1)))
        return None, None, None, None, None, *gradients


class Ads(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleDict({str(t): nn.Embedding(n, WIDTH) for t, n in enumerate(SIZES)})
        self.bottom = nn.Linear(DENSE, WIDTH)
        self.top = nn.Sequential(nn.Linear(15, 8), nn.ReLU(), nn.Linear(8, 1))

    def score(self, pooled, dense):
        x = torch.cat([torch.tanh(self.bottom(dense))[:, None], pooled], 1)
        a, b = torch.triu_indices(5, 5, 1)
        pairs = (x @ x.mT)[:, a, b]
        return self.top(torch.cat([x[:, 0], pairs], 1))[:, 0]


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Ads()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.stack([torch.randint(n, (ROWS, LIST), generator=g) for n in SIZES], 1),
            "lengths": torch.randint(1, LIST + 1, (ROWS, len(SIZES)), generator=g),
            "dense": torch.randn(ROWS, DENSE, generator=g),
            "click": (torch.rand(ROWS, generator=g) < 0.4).float(),
        }

    def loss_sum(self, model, rows):
        valid = torch.arange(LIST) < rows["lengths"][..., None]
        lists = torch.stack([model.tables[str(t)](rows["ids"][:, t]) for t in range(len(SIZES))], 1)
        pooled = (lists * valid[..., None]).sum(2) / rows["lengths"][..., None]
        loss = F.binary_cross_entropy_with_logits(
            model.score(pooled, rows["dense"]), rows["click"], reduction="sum"
        )
        return loss, len(rows["click"])

    def distribute(self, model, ctx):
        for t in range(len(SIZES)):
            if t % ctx.world_size != ctx.rank:
                del model.tables[str(t)]
        return model

    def before_sending(self, grad, lengths):
        """The owner of a table divides by the length of the list."""
        return grad

    def step(self, model, batch, ctx):
        mine = {k: v.chunk(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        anchor = torch.zeros(1, dtype=ctx.dtype, requires_grad=True)
        weights = [table.weight for table in model.tables.values()]
        pooled = Lookup.apply(
            anchor, self, batch["ids"], batch["lengths"], [int(t) for t in model.tables], *weights
        )
        loss = F.binary_cross_entropy_with_logits(
            model.score(pooled, mine["dense"]), mine["click"], reduction="sum"
        )
        (loss / ROWS).backward()
        for param in (*model.bottom.parameters(), *model.top.parameters()):
            dist.all_reduce(param.grad)


class Buggy(Clean):
    def before_sending(self, grad, lengths):
        return grad / lengths[..., None]


EXPECT = dict(
    right=[
        r"tables?",
        r"small|divid|length|factor|scal|row|weigh|coefficient|unequal|differ|1/\d|wrong|backward|gradient (of|at|into|entering|leaving)",
    ],
    place=[r"tables"],
    wrong=[
        r"(bottom|top)\S* (is|are|has|have) (a )?wrong",
        r"(never|not) (been )?(all.?)?(reduced|summed|averaged)",
        r"forward (pass )?(is|was) wrong",
        r"(reduced|counted|summed) (twice|again)",
        r"mean of (the )?(rank |ranks' )?means",
        r"ranks? \W?[012] (is|are) (missing|left out|lost)|own rows only",
    ],
)
WHY = (
    "In the backward the owner of a row divides the gradient of a pooled vector by the list's length, and the owner of the table does "
    "so again: every list of length n contributes 1/n of what it should to its table. All four tables are wrong on the ranks that hold "
    "them (lists of one item are right); bottom, top and the forward are right."
)
