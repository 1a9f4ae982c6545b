"""Hybrid sharding by hand: weights cut over shard, copies over replicate, three micro-batches.
After FAULTS C12-12 (FSDP2 PRs 125484/126166): deferred replica sum of accumulated micro-batches."""

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"replicate": 2, "shard": 2}}}}
ROWS, FIELDS, CATEGORIES, WIDTH, MICRO_BATCHES = 14, 3, 7, 6, 3


class Recommender(nn.Module):
    """Embeddings of categories, a factorisation-machine term and an MLP."""

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(CATEGORIES, WIDTH) for _ in range(FIELDS))
        self.linear = nn.Linear(4, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(4 * WIDTH, 11), nn.ReLU(), nn.Linear(11, 2))

    def forward(self, ids, dense):
        parts = [table(ids[:, i]) for i, table in enumerate(self.tables)]
        x = torch.stack([*parts, self.linear(dense)], dim=1)
        pairs = (x.sum(1) ** 2 - (x**2).sum(1)).sum(-1, keepdim=True) / 2
        return self.mlp(x.flatten(1)) + pairs * 0.1


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Recommender()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(CATEGORIES, (ROWS, FIELDS), generator=g),
            "dense": torch.randn(ROWS, 4, generator=g),
            "clicks": torch.randn(ROWS, 2, generator=g).gt(0).to(torch.get_default_dtype()),
        }

    def loss_sum(self, model, rows):
        logits = model(rows["ids"], rows["dense"])
        loss = F.binary_cross_entropy_with_logits(
            logits, rows["clicks"].to(logits.dtype), reduction="sum"
        )
        return loss, len(rows["ids"])

    def cut(self, length, ctx):
        n, at = ctx.axes["shard"], ctx.coords["shard"]
        each = -(-length // n)
        return slice(min(each * at, length), min(each * (at + 1), length))

    def shard_of(self, name, ctx):
        full = dict(self.build().named_parameters())[name]
        return (self.cut(len(full), ctx), *(slice(0, n) for n in full.shape[1:]))

    def distribute(self, model, ctx):
        for module in model.modules():
            for name, param in list(module.named_parameters(recurse=False)):
                part = param.detach()[self.cut(len(param), ctx)].clone()
                part = nn.Parameter(part)
                part.rows = len(param)
                setattr(module, name, part)
        return model

    def gather(self, param, ctx):
        n = ctx.axes["shard"]
        each = -(-param.rows // n)
        mine = param.new_zeros(each, *param.shape[1:])
        mine[: len(param)] = param.detach()
        parts = [torch.empty_like(mine) for _ in range(n)]
        dist.all_gather(parts, mine, group=ctx.group("shard"))
        return torch.cat(parts)[: param.rows].requires_grad_()

    def scatter(self, grad, ctx):
        """Summed over the shard group; this rank's rows of it."""
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group("shard"))
        return grad[self.cut(len(grad), ctx)].clone()

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        params = dict(model.named_parameters())
        sums = {}
        for i in range(MICRO_BATCHES):
            rows = {k: v.tensor_split(MICRO_BATCHES)[i] for k, v in mine.items()}
            full = {name: self.gather(param, ctx) for name, param in params.items()}
            loss, _ = self.loss_sum(lambda *a, w=full: functional_call(model, w, a), rows)
            grads = torch.autograd.grad(loss / ROWS, list(full.values()))
            for name, grad in zip(full, grads, strict=True):
                part = self.scatter(grad, ctx)
                sums[name] = self.accumulate(sums.get(name), part, i == MICRO_BATCHES - 1, ctx)
        for name, param in params.items():
            param.grad = sums[name]

    def accumulate(self, total, part, last, ctx):
        total = part if total is None else total + part
        if last:
            dist.all_reduce(total, group=ctx.group("replicate"))
        return total


class Buggy(Clean):
    def accumulate(self, total, part, last, ctx):
        if last:
            dist.all_reduce(part, group=ctx.group("replicate"))
        return part if total is None else total + part


EXPECT = dict(
    right=[
        r"micro.?batch|last|first|rows|early|earlier",
        (
            r"replica|(not|never|un) ?-?((all-?)?reduced|summed|exchanged|shared|synchroni[sz]ed)|missing|partial"
            r"|own (part|rows|share|micro)|lacks?|other (rank|replica)|lost|differ\w* (between|on|across)"
        ),
    ],
    place=[r"replicate", r"micro.?batch", r"ranks? \W?\d", r"ranks"],
    wrong=[
        r"(reduced|counted|divided) (twice|again)",
        r"mean of (the )?means",
        r"over (the )?(axis )?.?shard.? (is|was) (missing|lost)|(not|never) (reduced|summed) over (the )?(axis )?.?shard",
        r"last micro-?batch (is|was) (not|never|lost|dropped|missing)",
        r"forward (is|was) wrong",
    ],
)
WHY = (
    "Only the last micro-batch's part is summed over replicate; the earlier micro-batches are summed "
    "over shard only, so each replica misses the other replica's rows of micro-batches 0 and 1."
)
