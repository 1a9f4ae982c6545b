"""Face recognition with an additive margin: the backbone is data parallel over three ranks, the classes of the cosine head are cut over the
same ranks (features gathered, softmax over all ranks). After partial-FC heads: the labels are clamped into the own range to be usable as an
index, and the margin is set there for the foreign ones, too.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, SIDE, WIDTH, FACES, SCALE, MARGIN = 8, 6, 7, 13, 6.0, 0.35


class Gather(torch.autograd.Function):
    """All rows on every rank; what all ranks' classes send back is summed."""

    @staticmethod
    def forward(ctx, x, at, group):
        ctx.rest = at, group
        out = x.new_zeros(ROWS, x.shape[1])
        out[at] = x
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        at, group = ctx.rest
        grad = grad.clone()
        dist.all_reduce(grad, group=group)
        return grad[at], None, None


class CrossEntropy(torch.autograd.Function):
    """Sum over the rows, of logits whose classes are cut over the group; `truth` is one-hot of the own classes."""

    @staticmethod
    def forward(ctx, logits, truth, group):
        top = logits.amax(1, keepdim=True)
        dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
        e = (logits - top).exp()
        both = torch.stack([e.sum(1), ((logits - top) * truth).sum(1)])
        dist.all_reduce(both, group=group)
        ctx.save_for_backward(e / both[0][:, None] - truth)
        return (both[0].log() - both[1]).sum()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0], None, None


class Cosine(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(FACES, WIDTH))

    def forward(self, x):
        return F.linear(F.normalize(x), F.normalize(self.weight))


class Faces(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 5, 3), nn.PReLU(5), nn.Flatten(), nn.Linear(5 * (SIDE - 2) ** 2, WIDTH)
        )
        self.head = Cosine()


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Faces()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "image": torch.randn(ROWS, 1, SIDE, SIDE, generator=g),
            "who": torch.randint(FACES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        cosine = model.head(model.backbone(rows["image"]))
        logits = SCALE * (cosine - MARGIN * F.one_hot(rows["who"], FACES).to(cosine.dtype))
        return F.cross_entropy(logits, rows["who"], reduction="sum"), len(rows["who"])

    def distribute(self, model, ctx):
        shard = model.head.weight.detach().tensor_split(ctx.axes["dp"])[ctx.coords["dp"]]
        model.head.weight = nn.Parameter(shard.clone())
        return model

    def margins(self, local, held, like):
        at = local.clamp(0, like.shape[1] - 1)[:, None]
        return torch.zeros_like(like).scatter(1, at, held[:, None] * MARGIN)

    def step(self, model, batch, ctx):
        n, me, group = ctx.axes["dp"], ctx.coords["dp"], ctx.group("dp")
        at = torch.arange(ROWS).tensor_split(n)[me]
        faces = torch.arange(FACES).tensor_split(n)[me]
        x = Gather.apply(model.backbone(batch["image"][at]), at, group)
        local = batch["who"] - faces[0]
        held = ((local >= 0) & (local < len(faces))).to(x.dtype)
        cosine = model.head(x)
        truth = F.one_hot(local.clamp(0, len(faces) - 1), len(faces)) * held[:, None]
        logits = SCALE * (cosine - self.margins(local, held, cosine))
        (CrossEntropy.apply(logits, truth, group) / ROWS).backward()
        for p in model.backbone.parameters():
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    def margins(self, local, held, like):
        at = local.clamp(0, like.shape[1] - 1)[:, None]
        return torch.zeros_like(like).scatter(1, at, MARGIN)


EXPECT = dict(
    right=[r"loss|gradient that reaches|target|margin|backward", r"head|loss|logit|target|class"],
    place=[r"head|loss|logit|target|class"],
    wrong=[
        r"(never|not) (been )?(all.?)?reduced|missing (all.?)?reduc",
        r"(counted|reduced|summed|added) (twice|again|\d times)",
        r"forward .{0,30}goes wrong in (the )?(backbone|head)",
        r"own (count|denominator|divisor)",
        r"rows? .{0,20}(read|seen) (twice|never)",
        r"backward of (the )?backbone\S* (is )?wrong",
    ],
)
WHY = (
    "On the two ranks that do not hold a row's class the margin is taken off their first or last class, where the clamped label points, so two "
    "foreign logits of every row are too small by scale times margin. The cosines that `head` gives are right; the softmax and the gradient "
    "that reaches `head` from the loss are wrong in all rows on all ranks, and so all gradients. Onehot and reductions are right."
)
