"""Experts cut over ep by gathering all tokens: every rank runs its experts on everybody's tokens.
After FAULTS C05-07 (Automodel PR 1260): the gather's backward is taken for that of a replicated gradient."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"ep": 3}}}}
ROWS, PATCHES, INPUT, WIDTH, EXPERTS, CLASSES = 9, 3, 5, 7, 6, 4


def gathered(x, group):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts)


def own(x, group):
    return x.chunk(dist.get_world_size(group))[dist.get_rank(group)].clone()


class ScatterSum(torch.autograd.Function):
    """The experts' outputs summed over the ranks, cut back to this rank's tokens."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return own(x, group)

    @staticmethod
    def backward(ctx, grad):
        return gathered(grad, ctx.group), None


class Gather(torch.autograd.Function):
    """All ranks' tokens; what each rank's experts give back is a part of the gradient."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return gathered(x, group)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return own(grad, ctx.group), None


class GatherReplicated(Gather):
    @staticmethod
    def backward(ctx, grad):
        return own(grad, ctx.group), None


class GroupedExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(EXPERTS, WIDTH, 9) / 3)
        self.b1 = nn.Parameter(torch.randn(EXPERTS, 1, 9) / 9)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, 9, WIDTH) / 3)

    def forward(self, x, weights):
        y = torch.relu(x @ self.w1 + self.b1) @ self.w2  # experts, tokens, width
        return torch.einsum("te,etd->td", weights, y)


class MoeBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(PATCHES, PATCHES)
        self.gate, self.experts = nn.Linear(WIDTH, EXPERTS, bias=False), GroupedExperts()

    def forward(self, x, parallel):
        x = x + self.mix(x.transpose(1, 2)).transpose(1, 2)
        y = self.norm(x).flatten(0, 1)
        weights = (3 * self.gate(y)).sigmoid()
        weights = weights * (weights >= weights.topk(2, dim=-1).values[:, 1:])
        run = parallel or (lambda experts, *inputs: experts(*inputs))
        return x + run(self.experts, y, weights).view_as(x)


class Vision(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Linear(INPUT, WIDTH)
        self.blocks = nn.ModuleList(MoeBlock() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x, parallel=None):
        x = self.patch(x)
        for block in self.blocks:
            x = block(x, parallel)
        return self.head(x.mean(1))


class Clean:
    gather = Gather

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Vision()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "patches": torch.randn(ROWS, PATCHES, INPUT, generator=g),
            "labels": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows, parallel=None):
        logits = model(rows["patches"], parallel)
        return F.cross_entropy(logits, rows["labels"], reduction="sum"), len(logits)

    def held(self, ctx):
        each = EXPERTS // ctx.axes["ep"]
        return slice(each * ctx.coords["ep"], each * (ctx.coords["ep"] + 1))

    def shard_of(self, name, ctx):
        if ".experts." in name:
            return (self.held(ctx), slice(None), slice(None))

    def distribute(self, model, ctx):
        for block in model.blocks:
            for name, param in list(block.experts.named_parameters()):
                setattr(block.experts, name, nn.Parameter(param.detach()[self.held(ctx)].clone()))
        return model

    def step(self, model, batch, ctx):
        group = ctx.group("ep")

        def parallel(experts, x, weights):
            x, weights = self.gather.apply(x, group), self.gather.apply(weights, group)
            return ScatterSum.apply(experts(x, weights[:, self.held(ctx)]), group)

        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        loss, _ = self.loss_sum(model, mine, parallel)
        (loss / ROWS).backward()
        for name, param in model.named_parameters():
            if ".experts." not in name:
                dist.all_reduce(param.grad)


class Buggy(Clean):
    gather = GatherReplicated


EXPECT = dict(
    right=[
        r"blocks\.\d|experts|gate|gather|moe|backward",
        (
            r"backward|adjoint|gradient (of|that|at|into|flow)|other (ranks|experts)|own (experts|part|slice|share|tokens)"
            r"|missing|partial|lacks?|lost|gather"
        ),
    ],
    place=[r"blocks\.\d", r"gate", r"gather", r"experts"],
    wrong=[
        r"(reduced|counted|divided) (twice|again)",
        r"mean of (the )?means",
        r"forward (is|was) wrong|wrong forward|output (is|was) wrong",
        r"\b(head|blocks\.1\.experts)\S* (is|are) wrong",
        r"gradients? of \S*(weight|bias)\S* (is|are|was) (not|never) (all-)?reduced",
        r"rows? (is|are|was|were) (lost|missing|dropped)",
    ],
)
WHY = (
    "The backward of the token gather keeps the rank's own slice without summing over ep, so tokens get the "
    "gradient of the experts on their own rank only: gate, norm, mix of each block and all before it are wrong."
)
