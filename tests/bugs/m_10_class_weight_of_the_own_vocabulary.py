"""A tagger whose many classes are cut over tensor ranks, with class weights (and their sum as divisor). After requests for `weight=` in
Megatron's vocab_parallel_cross_entropy and pytorch's loss_parallel, and FAULTS C19 (a global index in a shard): the class weights are cut
like the head, and a token's weight is looked up in the own piece.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "tp": 3}}}}
ROWS, LENGTH, INPUTS, WIDTH, CLASSES = 9, 4, 5, 8, 14
WEIGHTS = torch.linspace(0.4, 2.3, CLASSES)[
    torch.randperm(CLASSES, generator=torch.Generator().manual_seed(7))
]


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class ParallelCrossEntropy(torch.autograd.Function):
    """The loss of each token, from the logits of the own classes [start, start + own)."""

    @staticmethod
    def forward(ctx, logits, target, start, group):
        top = logits.amax(-1)
        dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
        exp = (logits - top[:, None]).exp()
        total = exp.sum(-1)
        dist.all_reduce(total, group=group)
        here = (target >= start) & (target < start + logits.shape[1])
        place = torch.where(here, target - start, 0)
        picked = logits.gather(1, place[:, None])[:, 0] * here
        dist.all_reduce(picked, group=group)
        ctx.save_for_backward(exp / total[:, None], place, here)
        return total.log() + top - picked

    @staticmethod
    def backward(ctx, grad):
        softmax, place, here = ctx.saved_tensors
        hit = F.one_hot(place, softmax.shape[1]) * here[:, None]
        return (softmax - hit) * grad[:, None], None, None, None


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.norm = nn.Linear(INPUTS, WIDTH), nn.LayerNorm(WIDTH)
        self.around = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.head = nn.Linear(WIDTH, CLASSES)

    def trunk(self, x):
        x = torch.tanh(self.enter(x))
        return self.norm(x + F.gelu(self.around(x.mT).mT)).flatten(0, 1)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Tagger()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, LENGTH, INPUTS, generator=g),
            "y": torch.randint(CLASSES, (ROWS, LENGTH), generator=g),
        }

    def loss_sum(self, model, rows):
        logits, y = model.head(model.trunk(rows["x"])), rows["y"].flatten()
        weight = WEIGHTS.to(logits.dtype)
        return F.cross_entropy(logits, y, weight=weight, reduction="sum"), weight[y].sum()

    def distribute(self, model, ctx):
        self.classes = torch.arange(CLASSES).tensor_split(ctx.axes["tp"])[ctx.coords["tp"]]
        for name in ("weight", "bias"):
            setattr(
                model.head,
                name,
                nn.Parameter(getattr(model.head, name).detach()[self.classes].clone()),
            )
        return model

    def token_weight(self, y):
        return WEIGHTS[y]

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        group, y = ctx.group("tp"), mine["y"].flatten()
        logits = model.head(Copy.apply(model.trunk(mine["x"]), group))
        each = ParallelCrossEntropy.apply(logits, y, int(self.classes[0]), group)
        total = WEIGHTS.to(ctx.dtype)[batch["y"]].sum()
        ((each * self.token_weight(y).to(ctx.dtype)).sum() / total).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad, group=ctx.group("dp"))


class Buggy(Clean):
    def token_weight(self, y):
        own, place = WEIGHTS[self.classes], y - self.classes[0]
        here = (place >= 0) & (place < len(own))
        return torch.where(here, own[place.clamp(0, len(own) - 1)], 0.0)


EXPECT = dict(
    right=[
        r"head|logit|loss|tp\b|tensor",
        r"rows?|token|loss|weight|target|backward|gradient (of|at|into|entering)|incoming|label|vocab|class|cross.?entropy|differ",
    ],
    place=[r"head", r"\btp\b|tensor", r"loss", r"(all|every|each) ranks?|ranks? \W?[0-5]"],
    wrong=[
        r"never (been )?(all.?)?reduced|is not reduced|missing (all.?)?reduc",
        r"counted (twice|\d times)|reduced (twice|again)",
        r"mean of (the )?(rank |ranks' )?means",
        r"(output|activation)s? of (the )?(enter|around|norm|head)\S* .{0,20}(is|was|are) wrong|first wrong .{0,20}(enter|around|norm)",
        r"(wrong|other|bad|own) (divisor|denominator|normali[sz]er)",
        r"\bdp\b .{0,20}(never|not) (summed|reduced)",
    ],
)
WHY = (
    "A rank finds a weight only for tokens whose target lies among its own classes and weighs all other tokens with zero, so the "
    "softmax part of those tokens' gradient is lost on the head slices that do not hold the target. head.* lacks these rows on every "
    "tensor rank, and what enters the trunk, summed over tp, lacks them too: all gradients are wrong; the logits and the divisor are "
    "right."
)
