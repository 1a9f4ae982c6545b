"""Expert parallelism inside data parallelism: every rank has rows of its own. After FAULTS class C16
(rank layout of samplers; C09 on expert ranks as data ranks): the sampler has all ranks as replicas
but the dp coordinate as its rank.
"""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collective
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DistributedSampler

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "ep": 2}}}}

ROWS, LENGTH, WIDTH, EXPERTS, VOCABULARY = 12, 3, 8, 4, 13


class Gather(torch.autograd.Function):
    """Of rows; what follows differs from rank to rank, so the adjoint sums and cuts."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)], None


class Moe(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.w1 = nn.Parameter(torch.randn(EXPERTS, WIDTH, 7) / 3)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, 7, WIDTH) / 3)

    def forward(self, x, ep=None):
        gate, chosen = (3 * self.router(x)).softmax(-1).max(-1)
        gates = F.one_hot(chosen, EXPERTS).to(x.dtype) * gate[:, None]
        if ep is None:
            return self.experts(x, gates)
        group, rank, size = ep
        x, gates = Gather.apply(x, group), Gather.apply(gates, group)
        own = EXPERTS // size
        out = self.experts(x, gates[:, own * rank : own * (rank + 1)])
        return collective.all_reduce(out, group=group).chunk(size)[rank]

    def experts(self, x, gates):
        hidden = F.silu(torch.einsum("td,edh->eth", x, self.w1))
        return torch.einsum("eth,ehd,te->td", hidden, self.w2, gates)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.moe = nn.LayerNorm(WIDTH), Moe()

    def forward(self, x, ep):
        return x + self.moe(self.norm(x), ep)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.mix = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids, ep=None):
        x = self.embed(ids)
        x = (x + self.mix(x.transpose(1, 2)).transpose(1, 2)).flatten(0, 1)
        for layer in self.layers:
            x = layer(x, ep)
        return self.head(self.norm(x))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(VOCABULARY, (ROWS, LENGTH), generator=g),
            "labels": torch.randint(VOCABULARY, (ROWS, LENGTH), generator=g),
        }

    def loss_sum(self, model, rows, ep=None):
        logits, labels = model(rows["ids"], ep), rows["labels"].flatten()
        return F.cross_entropy(logits, labels, reduction="sum"), labels.numel()

    def shard_of(self, name, ctx):
        if not name.endswith(("w1", "w2")):
            return None
        own = EXPERTS // ctx.axes["ep"]
        return (slice(own * ctx.coords["ep"], own * (ctx.coords["ep"] + 1)),)

    def distribute(self, model, ctx):
        for name, param in model.named_parameters():
            if self.shard_of(name, ctx):
                param.data = param.data[self.shard_of(name, ctx)].clone()
        return model

    def data_rank(self, ctx):
        return ctx.coords["dp"] * ctx.axes["ep"] + ctx.coords["ep"]

    def step(self, model, batch, ctx):
        replicas = ctx.axes["dp"] * ctx.axes["ep"]
        sampler = DistributedSampler(
            range(ROWS), num_replicas=replicas, rank=self.data_rank(ctx), shuffle=False
        )
        mine = {k: v[list(sampler)] for k, v in batch.items()}
        ep = ctx.group("ep"), ctx.coords["ep"], ctx.axes["ep"]
        loss, _ = self.loss_sum(model, mine, ep)
        (loss / (ROWS * LENGTH)).backward()
        for name, param in model.named_parameters():
            sharded = self.shard_of(name, ctx) is not None
            dist.all_reduce(param.grad, group=ctx.group("dp") if sharded else None)


class Buggy(Clean):
    def data_rank(self, ctx):
        return ctx.coords["dp"]


EXPECT = dict(
    right=[
        r"rows?|samples?|data|batch",
        r"missing|lost|dropped|never|not (seen|read|used|counted)|twice|two times|2 times|absent|repeated"
        r"|same rows|duplicat|left out|none of|\b0\b|half",
    ],
    place=[r"rows?\b", r"\bep\b|ranks?", r"sampler"],
    wrong=[
        r"never (been )?(all.?)?reduced|is not reduced|missing (all.?)?reduc",
        r"reduced (twice|again)|repeated (all.?)?reduc",
        r"averag|mean of (the )?means",
        r"\bforward (is )?wrong|first wrong forward",
        r"rows? (0|1|4|5|8|9)\b (is|are) (lost|missing|dropped|never)",
    ],
)

WHY = (
    "Both expert ranks of a dp coordinate read the same rows: rows 0, 1, 4, 5, 8, 9 count twice "
    "and rows 2, 3, 6, 7, 10, 11 are never read; reductions are right."
)
