"""A parallel block on two tensor-parallel ranks, two micro-batches: x + A(normA(x)) + B(normB(x)), both branches column/row-parallel with an odd number of hidden units, cut 3 + 2 for A and 2 + 3 for B. The partial results of both are
summed with one all-reduce; the backward of each branch's entry (copy to the tensor-parallel region) all-reduces its input gradient.

The bug: each rank starts with the branch of which it has more units. The forward does not mind, but autograd runs the entries' backward in the reverse order of the forward, so rank 0's all-reduce for A meets rank 1's for B: same shape,
no error. As in issues on collectives that pair up by order only (pytorch/pytorch docs and issues on mismatched collective order; Megatron's CUDA_DEVICE_MAX_CONNECTIONS note).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"tp": 2}}}}
FEATURES, WIDTH, HIDDEN, CLASSES = 4, 6, 5, 3
CUTS = {"a": [0, 3, 5], "b": [0, 2, 5]}
PARTS = [(0, 3), (3, 5)]
ROWS = 5


class Entry(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Exit(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x, tp=None, own=slice(None)):
        x = self.norm(x)
        if tp is not None:
            x = Entry.apply(x, tp)
        hidden = F.silu(F.linear(x, self.up.weight[own], self.up.bias[own]))
        return F.linear(hidden, self.down.weight[:, own])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = Branch(), Branch()
        self.tp, self.wider = None, False

    def forward(self, x):
        if self.tp is None:
            return x + self.a(x) + self.b(x)
        rank = dist.get_rank(self.tp)
        own = {n: slice(cut[rank], cut[rank + 1]) for n, cut in CUTS.items()}
        order = ["a", "b"]
        if self.wider:
            order.sort(key=lambda n: own[n].start - own[n].stop)
        partial = {n: getattr(self, n)(x, self.tp, own[n]) for n in order}
        return x + Exit.apply(partial["a"] + partial["b"], self.tp)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(FEATURES, WIDTH)
        self.block = Block()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.head(torch.tanh(self.block(self.first(x))))


class Clean:
    wider = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        model = Net()
        for branch in (model.block.a, model.block.b):
            nn.init.uniform_(branch.norm.weight, 0.3, 2)
        return model

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, FEATURES, generator=g),
            "label": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        return F.cross_entropy(model(rows["x"]), rows["label"], reduction="sum"), len(rows["label"])

    def distribute(self, model, ctx):
        model.block.tp, model.block.wider = ctx.group("tp"), self.wider
        return model

    def step(self, model, batch, ctx):
        for low, high in PARTS:
            loss, _ = self.loss_sum(model, {k: v[low:high] for k, v in batch.items()})
            (loss / ROWS).backward()
        for name, p in model.named_parameters():
            if ".up." in name or ".down." in name:
                dist.all_reduce(p.grad, group=ctx.group("tp"))


class Buggy(Clean):
    wider = True


EXPECT = dict(
    right=[
        r"(?i)branch|block|entry|norm|\ba\b|\bb\b",
        r"(?i)order|pair|mix|swap|other|wrong|differ|disagree|meets?|foreign|not (the )?(same|right)|adjoint|not the sum",
        r"(?i)backward|gradient|adjoint|hands? (back|on)",
    ],
    place=[r"(?i)block\.[ab]|branch|entry|norm|block"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)(up|down)(\.|'s )?(weight|bias)? (is|are) wrong|head.{0,12}(is|are) wrong",
        r"(?i)(reduced|summed|counted) (twice|again)|wrong divisor|mean of means|factor of (1/)?2\b",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|swapped)|another micro.?batch",
        r"(?i)only (the )?(first|last) micro.?batch|only rank [01]\b|rank [01] alone",
        r"(?i)detach|cut off|recomput",
    ],
)
WHY = (
    "Rank 0 (3 units of A, 2 of B) runs A, then B; rank 1 (2 of A, 3 of B) runs B, then A. Backward in reverse: rank 0 enters the all-reduces in the order B, A, rank 1 in the order A, B. So rank 0's input gradient of B is "
    "added to rank 1's of A and the reverse: on rank 0 the gradient of normB's output is gB0 + gA1, of normA's "
    "gA0 + gB1; on rank 1 normA's is gA1 + gB0, normB's gB1 + gA0. In both micro-batches, all rows. Wrong, and different on the two ranks: block.a.norm and block.b.norm (weight, bias), and `first`. The forward, up, down of "
    "both branches, head, divisor 5 and the sum over tp of up and down are right. Fix: the same order of the branches on all ranks."
)
