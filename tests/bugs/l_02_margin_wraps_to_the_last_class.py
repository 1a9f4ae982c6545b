"""Face recognition with the class centres cut over the ranks (Partial FC) and a CosFace margin. Modelled on the reports on insightface's
`PartialFC`/`CombinedMarginLoss` (the `index_positive = torch.where(labels != -1)` line and its omission in ports): a label of another
rank's class is marked with -1, and an index of -1 is the last column.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional as F

TOPOLOGY = {"pools": {"faces": {"axes": {"mp": 3}}}}
ROWS, INPUTS, WIDTH, CLASSES, MARGIN, SCALE = 12, 8, 6, 13, 0.4, 5.0


class Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


class Sum(torch.autograd.Function):
    """A sum over ranks of which every rank computes the same loss."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class Faces(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Linear(INPUTS, 10), nn.LayerNorm(10), nn.PReLU(), nn.Linear(10, WIDTH)
        )
        self.centres = nn.Linear(WIDTH, CLASSES, bias=False)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Faces()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, INPUTS, generator=g),
            "label": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        cosine = F.normalize(model.backbone(rows["x"])) @ F.normalize(model.centres.weight).T
        logits = SCALE * (cosine - MARGIN * F.one_hot(rows["label"], CLASSES).to(cosine.dtype))
        return F.cross_entropy(logits, rows["label"], reduction="sum"), len(rows["x"])

    def distribute(self, model, ctx):
        model.centres.weight = nn.Parameter(
            distribute_tensor(model.centres.weight.data, ctx.mesh, [Shard(0)])
        )
        return model

    def margins(self, like, label):
        margin = torch.zeros_like(like)
        index = torch.where(label != -1)[0]
        margin[index, label[index]] = MARGIN
        return margin

    def step(self, model, batch, ctx):
        features = Gathered.apply(
            F.normalize(model.backbone(batch["x"].chunk(ctx.world_size)[ctx.rank]))
        )
        mine = torch.arange(CLASSES).chunk(ctx.world_size)[ctx.rank]
        owned = (batch["label"] >= mine[0]) & (batch["label"] <= mine[-1])
        label = (batch["label"] - mine[0]).masked_fill(~owned, -1)
        cosine = features @ F.normalize(model.centres.weight.to_local()).T
        logits = SCALE * (cosine - self.margins(cosine, label))
        top = logits.detach().amax(1)
        dist.all_reduce(top, dist.ReduceOp.MAX)
        total = Sum.apply((logits - top[:, None]).exp().sum(1))
        target = Sum.apply((logits.gather(1, label.clamp(min=0)[:, None])[:, 0] - top) * owned)
        ((total.log() - target).sum() / ROWS).backward()
        for param in model.backbone.parameters():
            dist.all_reduce(param.grad)


class Buggy(Clean):
    def margins(self, like, label):
        margin = torch.zeros_like(like)
        margin[torch.arange(len(label)), label] = MARGIN
        return margin


EXPECT = dict(
    right=[
        r"loss|logit|margin|softmax|normali[sz]er|output gradient|gradient (at|of|entering|into) (the )?(output|logits|centres|"
        r"features|backbone)",
        r"centres|class|shard|column|last|margin",
    ],
    place=[r"centres", r"margin|logit|loss", r"(all|every|each) ranks?|ranks? \W?[012]"],
    wrong=[
        r"(never|not) (been )?(all.?)?(reduced|summed|averaged)",
        r"(reduced|counted|summed) (twice|again|\d times)",
        r"forward (pass )?of (the )?backbone\S* (is|was) wrong|backbone.{0,25}first wrong",
        r"mean of (the )?(rank |ranks' )?means",
        r"detach|no_grad",
    ],
)
WHY = (
    "On the two ranks that do not own a row's class, the label -1 puts the margin on the last class of their shard, so two wrong logits "
    "per row are lowered by SCALE * MARGIN. The features and cosines are right; the loss is wrong, and with it the gradients of the "
    "centres (most of all the last row of each shard) and of the whole backbone, on all ranks."
)
