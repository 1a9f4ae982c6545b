"""Hyperbolic embeddings of a taxonomy in the Poincare ball, the table cut by rows (DTensor over
tp), data parallel beside it.

Every word is compared with its parent and with drawn negatives; the loss is a softmax over the
negative distances with a learned temperature. The distance is a hand-written Function, whose
backward computes both points' gradients with one helper.

The bug: for the second point the helper gets the points exchanged but its two factors 1 - |u|^2
and 1 - |v|^2 in the order of the first call. After hand-written Poincare gradients (gensim's
PoincareModel, the poincare-embeddings Function), where alpha and beta change places.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "tp": 2}}}}

ROWS, WORDS, DIM, OTHERS = 7, 13, 3, 4


def distance(u, v):
    alpha, beta = 1 - u.square().sum(-1), 1 - v.square().sum(-1)
    return torch.acosh(1 + 2 * (u - v).square().sum(-1) / (alpha * beta))


class BallDistance(torch.autograd.Function):
    @staticmethod
    def forward(ctx, u, v):
        ctx.save_for_backward(u, v)
        return distance(u, v)

    @staticmethod
    def slope(u, v, alpha, beta):
        """Gradient of the distance with respect to u; alpha belongs to u, beta to v."""
        gamma = 1 + 2 * (u - v).square().sum(-1, keepdim=True) / (alpha * beta)
        inner = (
            v.square().sum(-1, keepdim=True) - 2 * (u * v).sum(-1, keepdim=True) + 1
        ) / alpha.square()
        return 4 / (beta * (gamma.square() - 1).sqrt()) * (inner * u - v / alpha)

    @classmethod
    def slopes(cls, u, v, alpha, beta):
        return cls.slope(u, v, alpha, beta), cls.slope(v, u, beta, alpha)

    @classmethod
    def backward(cls, ctx, grad):
        u, v = ctx.saved_tensors
        alpha = 1 - u.square().sum(-1, keepdim=True)
        beta = 1 - v.square().sum(-1, keepdim=True)
        du, dv = cls.slopes(u, v, alpha, beta)
        return grad[..., None] * du, grad[..., None] * dv


class FactoredDistance(BallDistance):
    @classmethod
    def slopes(cls, u, v, alpha, beta):
        return tuple(cls.slope(a, b, alpha, beta) for a, b in ((u, v), (v, u)))


class Taxonomy(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(WORDS, DIM)
        with torch.no_grad():
            self.table.weight.uniform_(-0.5, 0.5)
        self.log_temperature = nn.Parameter(torch.tensor(-0.3))
        self.depth_bias = nn.Parameter(torch.randn(OTHERS + 1) * 0.2)

    def forward(self, word, others, metric=distance):
        u = self.table(word)[:, None].expand(-1, OTHERS + 1, -1)
        d = metric(u, self.table(others))
        return self.depth_bias - d / self.log_temperature.exp()


class Clean:
    metric = BallDistance

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(51 + self.seed)
        return Taxonomy()

    def batch(self):
        g = torch.Generator().manual_seed(52 + self.seed)
        drawn = torch.stack([torch.randperm(WORDS, generator=g)[: OTHERS + 2] for _ in range(ROWS)])
        return {"word": drawn[:, 0], "others": drawn[:, 1:]}

    def loss_sum(self, model, rows):
        logits = model(rows["word"], rows["others"])
        return -logits.log_softmax(-1)[:, 0].sum(), rows["word"].shape[0]

    def distribute(self, model, ctx):
        plan = {"table": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())}
        return parallelize_module(model, ctx.mesh["tp"], plan)

    def step(self, model, batch, ctx):
        group = ctx.group("dp")
        mine = {
            k: torch.tensor_split(v, ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()
        }
        logits = model(mine["word"], mine["others"], self.metric.apply)
        (-logits.log_softmax(-1)[:, 0].sum() / ROWS).backward()
        for parameter in model.parameters():
            grad = parameter.grad
            dist.all_reduce(grad.to_local() if isinstance(grad, DTensor) else grad, group=group)


class Buggy(Clean):
    metric = FactoredDistance


EXPECT = dict(
    right=[
        r"backward|slope|gradient|derivative",
        r"alpha|beta|factor|1 - \||conformal|norms?\b",
        (
            r"swap|exchang|order|same (alpha|factor|order)|wrong (alpha|beta|factor|way)|other "
            r"point|other's|second point|\bv\b|not (swapped|exchanged)"
        ),
    ],
    place=[
        r"FactoredDistance",
        r"BallDistance",
        r"slopes?\b",
        r"backward of the distance",
        r"alpha, beta",
    ],
    wrong=[
        r"all[-_ ]?reduce|over (dp|tp)|summed twice|partial",
        r"temperature",
        r"negatives? (is|are)|masked rows|row offset|shard offset",
        r"clamp|acosh near|near one",
    ],
)

WHY = (
    "The helper slope(u, v, alpha, beta) differentiates by its first point and needs alpha = "
    "1 - |first|^2, beta = 1 - |second|^2. FactoredDistance calls it for the second point "
    "with the points exchanged but alpha and beta as in the first call, so dv is computed "
    "with 1 - |u|^2 in the place of 1 - |v|^2 and the other way round. The forward value and "
    "the gradient for u (the word) are right, so temperature and depth_bias are right too; "
    "only the rows of the table looked up as `others` get a wrong gradient, the more so the "
    "more the norms differ, and both the row cut over tp and the sum over dp are right. A "
    "right cause says that the factors alpha and beta are not exchanged for the second "
    "point's gradient in the distance's backward. The fix is slope(v, u, beta, alpha)."
)
