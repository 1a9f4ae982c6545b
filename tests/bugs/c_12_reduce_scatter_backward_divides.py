"""Tensor parallelism with sequence parallelism by hand: gather, column layer, row layer, reduce-scatter.
After FAULTS C07-09 (DTensor PR 115967): the backward of partial-to-shard divides by the group's size."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"tp": 3}}}}
ROWS, LENGTH, VOCAB, WIDTH, HEADS, INNER = 5, 6, 15, 9, 3, 12


def gathered(x, group):
    """Shards of the sequence (dim 1) put together."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim=1)


def scattered(x, group):
    x = x.contiguous().clone()
    dist.all_reduce(x, group=group)
    return x.chunk(dist.get_world_size(group), dim=1)[dist.get_rank(group)].clone()


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return gathered(x, group)

    @staticmethod
    def backward(ctx, grad):
        return scattered(grad, ctx.group), None


class ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return scattered(x, group)

    @staticmethod
    def backward(ctx, grad):
        return gathered(grad, ctx.group), None


class ReduceScatterMean(ReduceScatter):
    @staticmethod
    def backward(ctx, grad):
        return gathered(grad, ctx.group) / dist.get_world_size(ctx.group), None


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        q, k, v = (
            f(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for f in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(-2))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mlp = Attention(), Mlp()

    def forward(self, x, enter, leave):
        x = x + leave(self.attention(enter(self.norm1(x))))
        return x + leave(self.mlp(enter(self.norm2(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, ids, enter=lambda x: x, leave=lambda x: x):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, enter, leave)
        return self.head(self.norm(x))


CUT = {"q.weight": 0, "k.weight": 0, "v.weight": 0, "o.weight": 1}
CUT |= {"up.weight": 0, "up.bias": 0, "down.weight": 1}


def cut_of(name):
    return CUT.get(".".join(name.split(".")[-2:]))


class Clean:
    leave = ReduceScatter

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=g)
        return {"ids": ids[:, :-1], "labels": ids[:, 1:]}

    def loss_sum(self, model, rows, *parallel):
        logits, labels = model(rows["ids"], *parallel).flatten(0, 1), rows["labels"].flatten()
        return F.cross_entropy(logits, labels, reduction="sum"), labels.numel()

    def shard_of(self, name, ctx):
        dim = cut_of(name)
        if dim is None:
            return None
        full = dict(self.build().named_parameters())[name]
        each = full.shape[dim] // ctx.axes["tp"]
        at = slice(each * ctx.coords["tp"], each * (ctx.coords["tp"] + 1))
        return tuple(at if i == dim else slice(0, n) for i, n in enumerate(full.shape))

    def distribute(self, model, ctx):
        for prefix, module in model.named_modules():
            for name, param in list(module.named_parameters(recurse=False)):
                dim = cut_of(f"{prefix}.{name}")
                if dim is not None:
                    part = param.detach().chunk(ctx.axes["tp"], dim=dim)[ctx.coords["tp"]]
                    setattr(module, name, nn.Parameter(part.clone()))
        return model

    def step(self, model, batch, ctx):
        group = ctx.group("tp")
        mine = {k: v.chunk(ctx.axes["tp"], dim=1)[ctx.coords["tp"]] for k, v in batch.items()}
        loss, _ = self.loss_sum(
            model, mine, lambda x: Gather.apply(x, group), lambda x: self.leave.apply(x, group)
        )
        (loss / batch["labels"].numel()).backward()
        for name, param in model.named_parameters():
            if cut_of(name) is None:  # replicated, each rank has seen its stretch
                dist.all_reduce(param.grad, group=group)


class Buggy(Clean):
    leave = ReduceScatterMean


EXPECT = dict(
    right=[
        r"blocks\.\d|attention|mlp|\bo\b|down|reduce.?scatter|row.?parallel",
        r"backward|adjoint|gradient|factor|scale|1/3|0\.33|third|divi|too small|averag",
    ],
    place=[r"blocks\.1", r"blocks\.\d", r"mlp|attention", r"reduce.?scatter"],
    wrong=[
        r"(not|never) (all-)?reduced|missing (all.?)?reduc",
        r"(reduced|counted) (twice|again)",
        r"mean of (the )?means",
        r"forward (is|was) wrong|wrong forward|output (is|was) wrong",
        r"\bhead\S* (is|are) wrong",
        r"every (parameter|gradient) is (wrong|too)",
        r"rows? (is|are|was|were) (lost|missing|dropped)",
    ],
)
WHY = (
    "The backward of each reduce-scatter gathers the gradient and divides it by tp=3, so what enters "
    "attention and MLP branches is a third of the right gradient; the residual path, final norm and head are right."
)
