"""Low-rank bilinear pooling of a question and a picture (MLB, MFB: z = (U q) * (V p), then a classifier over answers). Two replicas times two tensor parallel ranks: the features of both inputs are cut over "tp" (5
and 4 of nine, 6 and 5 of eleven), U and V are row parallel, and their outputs are summed over "tp". Three micro-batches, gradients summed over "dp".

The bug: only one message is spent on the pooling: what is summed over "tp" is the product of the two partial outputs, so that the question's part on one rank never meets the picture's part on the other. After the
many row parallel layers whose non-linearity comes before the all-reduce (Megatron-LM's paper, section 3, on why the first matrix is cut by columns; the same mistake in factorisation heads).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "tp": 2}}}}
ROWS, QUESTION, PICTURE, RANK, ANSWERS, MICRO = 12, 9, 11, 6, 5, 3


class BilinearPooling(nn.Module):
    def __init__(self):
        super().__init__()
        self.u = nn.Linear(QUESTION, RANK, bias=False)
        self.v = nn.Linear(PICTURE, RANK, bias=False)
        self.answer = nn.Linear(RANK, ANSWERS)

    def forward(self, question, picture):
        return self.answer(self.u(question) * self.v(picture))


class ReduceFromTensorParallel(torch.autograd.Function):
    @staticmethod
    def forward(fctx, x, group):
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(fctx, grad):
        return grad, None


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return BilinearPooling()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "question": torch.randn(ROWS, QUESTION, generator=g),
            "picture": torch.randn(ROWS, PICTURE, generator=g),
            "answer": torch.randint(ANSWERS, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        logits = model(rows["question"], rows["picture"])
        return F.cross_entropy(logits, rows["answer"], reduction="sum"), len(logits)

    def columns(self, n, ctx):
        own = torch.arange(n).tensor_split(ctx.axes["tp"])[ctx.coords["tp"]]
        return slice(int(own[0]), int(own[-1]) + 1)

    def distribute(self, model, ctx):
        for layer in (model.u, model.v):
            own = layer.weight[:, self.columns(layer.in_features, ctx)]
            layer.weight = nn.Parameter(own.detach().clone())
        return model

    def pool(self, model, question, picture, group):
        q = F.linear(question, model.u.weight)
        v = F.linear(picture, model.v.weight)
        q, v = ReduceFromTensorParallel.apply(torch.stack((q, v)), group)
        return q * v

    def step(self, model, batch, ctx):
        mine = {k: x.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, x in batch.items()}
        for n in range(MICRO):
            part = {k: x.tensor_split(MICRO)[n] for k, x in mine.items()}
            question = part["question"][:, self.columns(QUESTION, ctx)]
            picture = part["picture"][:, self.columns(PICTURE, ctx)]
            logits = model.answer(self.pool(model, question, picture, ctx.group("tp")))
            (F.cross_entropy(logits, part["answer"], reduction="sum") / ROWS).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    def pool(self, model, question, picture, group):
        q = F.linear(question, model.u.weight)
        v = F.linear(picture, model.v.weight)
        return ReduceFromTensorParallel.apply(q * v, group)


EXPECT = dict(
    right=[
        r"product|multipl|\bmul\b|non.?linear|q \* v|element.?wise|cross.{0,10}terms?|before .{0,40}(sum|reduc)|partial",
        r"partial|before .{0,60}(sum|reduc|added)|reduc|sum(med)? of (the )?products|own (part|share|columns|slice|features)",
    ],
    place=[
        r"\bpool\b",
        r"ReduceFromTensorParallel",
        r"all.?reduce",
        r"\btp\b|tensor.?parallel",
        r"q \* v",
    ],
    wrong=[
        r"micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|only the last micro.?batch",
        r"over.{0,10}\bdp\b.{0,30}(missing|never|not reduced|twice)|(missing|no) .{0,20}reduc.{0,20}\bdp\b",
        r"wrong rows|other rows|divisor|mean of means|counted twice",
        r"backward of .{0,40}(wrong|misses|missing)",
    ],
)
WHY = (
    "U q and V p are sums over the features, of which each of the two tp ranks has a part. Buggy multiplies the two partial outputs first and sums the products over tp, so that of (a+b)(c+d) only ac+bd is there: the cross "
    "terms between the two ranks are missing, on all four ranks, in all micro-batches, and with them the gradients of U, V and of the classifier are wrong. A right cause says that the product (a non-linear operation) is taken "
    "of partial sums, before the all-reduce over tp instead of after it. Fix: reduce both outputs, then multiply."
)
