"""Two-table recommender with table-wise model parallelism: a user table on data-parallel pairs and the item table cut by columns over two tensor ranks (pool axes dp 2 x tp 2). Item vectors are pulled back to length 1 if they are longer
(max_norm), over all their columns; the scores of the column parts are summed over tp. Each dp rank reads its own clicks in two micro-batches; loss is the logistic loss of (user, item, clicked), the sum divided by all clicks.

The bug: the item rows are shortened as nn.Embedding does it for max_norm, with a factor computed under no_grad on a copy of the weight (the clone the documentation asks for). The forward is the same, but the gradient lacks the
derivative of the factor: the part along the row is not taken out. As in pytorch/pytorch issue 26596 and PR 45595 (max_norm changes the weight in place; clone it to differentiate), compare akanimax/pro_gan_pytorch PR 37.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "tp": 2}}}}
USERS, ITEMS, WIDTH, CLICKS = 6, 9, 6, 13
PARTS = [[(0, 4), (4, 6)], [(6, 9), (9, 13)]]


class SumBoth(torch.autograd.Function):
    """Sum over the tensor ranks in the forward and in the backward (all ranks go on with it)."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class SumForward(torch.autograd.Function):
    """Sum over the tensor ranks in the forward; the same loss is computed on all of them."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = nn.Embedding(USERS, WIDTH)
        self.item = nn.Embedding(ITEMS, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH, bias=False)
        self.bias = nn.Parameter(torch.zeros(ITEMS))
        with torch.no_grad():
            self.item.weight.mul_(torch.linspace(0.15, 0.9, ITEMS)[:, None])
            self.bias.normal_()

    def forward(self, rows, columns=slice(None), group=None, constant=False):
        u = self.user(rows["user"]) @ self.mix.weight[columns].t()
        v = self.item.weight[:, columns][rows["item"]]
        with torch.set_grad_enabled(not constant):
            square = v.square().sum(-1)
            if group is not None:
                square = SumBoth.apply(square, group)
            factor = square.rsqrt().clamp(max=1.0)
        score = (u * (v * factor[:, None])).sum(-1)
        if group is not None:
            score = SumForward.apply(score, group)
        score = score + self.bias[rows["item"]]
        clicked = rows["clicked"].to(score.dtype)
        return F.binary_cross_entropy_with_logits(score, clicked, reduction="sum")


class Clean:
    constant = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "user": torch.randint(USERS, (CLICKS,), generator=g),
            "item": torch.randint(ITEMS, (CLICKS,), generator=g),
            "clicked": torch.randint(2, (CLICKS,), generator=g),
        }

    def loss_sum(self, model, rows):
        return model(rows), len(rows["user"])

    def step(self, model, batch, ctx):
        tp, dp = ctx.group("tp"), ctx.group("dp")
        size = WIDTH // dist.get_world_size(tp)
        first = dist.get_rank(tp) * size
        for low, high in PARTS[dist.get_rank(dp)]:
            rows = {k: v[low:high] for k, v in batch.items()}
            loss = model(rows, slice(first, first + size), tp, self.constant)
            (loss / CLICKS).backward()
        for name, p in model.named_parameters():
            if name != "bias":
                dist.all_reduce(p.grad, group=tp)
            dist.all_reduce(p.grad, group=dp)


class Buggy(Clean):
    constant = True


EXPECT = dict(
    right=[
        r"(?i)item",
        r"(?i)backward|gradient|derivative|detach\w*|no_grad|constant|without (a )?grad"
        r"|adjoint|hands? (back|on)|missing|lacks?",
        r"(?i)norm\b|max_norm|factor|length|scal\w*|item(\.weight)?|detach\w*|no_grad"
        r"|renorm\w*|projection|path|part|term",
    ],
    place=[r"(?i)item|norm|factor|renorm"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward|wrong input",
        r"(?i)(never|not) (been )?(all.?)?reduced|reduced (twice|again)|summed (twice|again)"
        r"|counted (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten)",
        r"(?i)only (on )?rank [0123]\b|rank [0123] alone",
        r"(?i)(user|mix|bias)(\.weight)? .{0,12}(is|are) wrong",
        r"(?i)wrong rows|rows? .{0,20}overwritten",
    ],
)
WHY = (
    "The forward and the loss are right on all four ranks. Only item.weight's gradient is wrong, in both micro-batches of both dp ranks and in the columns of both tp ranks: for an item row longer than 1 the score uses f * v "
    "with f = 1 / |v|, whose derivative is f * (I - v v^T / |v|^2); the step takes f as a constant (computed under no_grad) and gives f * g, so the part of the gradient along v stays in. Rows no longer than 1 (f = 1) are "
    "right, as are user, mix and bias. The norm runs over all columns (both tp ranks), the sum of squares and its backward over tp are present in the right version. Reductions over tp (the columns of mix and item are zero "
    "elsewhere, user is partial, bias is complete on each tp rank) and dp and the divisor 13 are right. Fix: compute the factor with autograd."
)
