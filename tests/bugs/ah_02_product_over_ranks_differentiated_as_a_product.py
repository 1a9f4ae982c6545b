"""Noisy-or diagnosis network with the hidden causes cut over three tensor-parallel ranks (4, 3 and 2 of 9 causes): every rank computes the probabilities q of its causes, the product of 1 - q over its causes, and the product over the
ranks with an all-reduce of kind PRODUCT. The loss (binary cross-entropy of 1 - leak * product) is computed alike on all ranks. Two uneven micro-batches. Gradients of encoder and causes are summed over the ranks, those of the leak are
whole.

The bug: the differentiable all_reduce of torch.distributed.nn with op=PRODUCT. Its backward calls all_reduce with the same op on the gradient, which is right for SUM only: here every rank gets the product of the three ranks' gradients
instead of gradient times product of the others. As in pytorch issue #121587 and PR #190419 (gradient behaviour of torch.distributed.nn.all_reduce), hpcaitech/CachedEmbedding PR #86 (backward for max and mean), pytorch PR #190942
(backward per op).
"""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dnn
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"tp": 3}}}}
ROWS, SIGNS, WIDTH, CAUSES, FINDINGS = 7, 5, 6, 9, 3
EDGES = (0, 4, 7, 9)
PARTS = [(0, 3), (3, 7)]


class ProductOverRanks(torch.autograd.Function):
    """Product over the group; the gradient that comes in is the same on all ranks."""

    @staticmethod
    def forward(ctx, x, group):
        total = x.clone()
        dist.all_reduce(total, op=dist.ReduceOp.PRODUCT, group=group)
        ctx.save_for_backward(x, total)
        return total

    @staticmethod
    def backward(ctx, grad):
        x, total = ctx.saved_tensors
        return grad * total / x, None


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(SIGNS, WIDTH)
        self.causes = nn.Parameter(torch.randn(CAUSES, FINDINGS, WIDTH) * 0.6)
        self.offset = nn.Parameter(torch.full((CAUSES, FINDINGS), -1.5))
        self.leak = nn.Parameter(torch.randn(FINDINGS) * 0.3 + 1.5)
        self.group, self.own_backward = None, True

    def forward(self, x):
        h = torch.tanh(self.encoder(x))
        low, high = 0, CAUSES
        if self.group is not None:
            rank = dist.get_rank(self.group)
            low, high = EDGES[rank], EDGES[rank + 1]
        q = torch.sigmoid(
            torch.einsum("bw,cfw->bcf", h, self.causes[low:high]) + self.offset[low:high]
        )
        quiet = (1 - q).prod(1)
        if self.group is not None and self.own_backward:
            quiet = ProductOverRanks.apply(quiet, self.group)
        elif self.group is not None:
            quiet = dnn.all_reduce(quiet, op=dist.ReduceOp.PRODUCT, group=self.group)
        return 1 - torch.sigmoid(self.leak) * quiet


class Clean:
    own_backward = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "signs": torch.randn(ROWS, SIGNS, generator=g),
            "found": torch.randint(2, (ROWS, FINDINGS), generator=g),
        }

    def loss_sum(self, model, rows):
        p = model(rows["signs"])
        found = rows["found"].to(p.dtype)
        return F.binary_cross_entropy(p, found, reduction="sum"), len(rows["signs"])

    def distribute(self, model, ctx):
        model.group, model.own_backward = ctx.group("tp"), self.own_backward
        return model

    def step(self, model, batch, ctx):
        for low, high in PARTS:
            p = model(batch["signs"][low:high])
            found = batch["found"][low:high].to(p.dtype)
            (F.binary_cross_entropy(p, found, reduction="sum") / ROWS).backward()
        for p in (*model.encoder.parameters(), model.causes, model.offset):
            dist.all_reduce(p.grad, group=ctx.group("tp"))


class Buggy(Clean):
    own_backward = False


EXPECT = dict(
    right=[
        r"(?i)all.?reduce|product|collective|PRODUCT|quiet",
        r"(?i)backward|adjoint|gradient (of|through|that)|hands? (back|on)|transpose",
        r"(?i)product|adjoint|wrong|op\b|not (the )?(transpose|gradient)",
    ],
    place=[r"(?i)all.?reduce|product|causes|offset|encoder"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)leak .{0,20}(is|goes) wrong",
        r"(?i)(never|not) (been )?(all.?)?reduced|parameter.{0,30}reduced (twice|again)|"
        r"counted (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|"
        r"(pure )?factor of (1/)?[0-9]",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten)",
        r"(?i)only (on )?rank [012]\b|rank [012] alone",
        r"(?i)detach|without (a )?(graph|gradient)|no gradient",
    ],
)
WHY = (
    "Forward, loss and the gradient of leak are right on all ranks. The backward of torch.distributed.nn.functional.all_reduce(op=PRODUCT) multiplies the incoming gradients of the three ranks, which are equal: every rank gets g ** "
    "3, per row and finding, instead of g times the product of the other ranks' parts. (g carries the divisor 7, so this is much too small and of another direction.) Wrong: causes and offset of all ranks' slices and encoder, all "
    "rows, both micro-batches. The sum of encoder, causes, offset over the ranks, the divisor and the slices are right. Fix: an own Function whose backward is grad * total / own (or the exponent of a SUM all-reduce of logs with "
    "the fitting backward)."
)
