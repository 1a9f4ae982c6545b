"""A contrastive loss over all gathered features, the same on every rank, under DDP's average.
After SimCLR/CLIP ports: the gather's backward averages too."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 4}}}}
ROWS, WIDTH, PROJECTION = 8, 9, 5


class GatherLayer(torch.autograd.Function):
    """All rows on every rank; gradients of all ranks' losses come back to the row's owner."""

    @staticmethod
    def forward(ctx, x, divide):
        ctx.divide = divide
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad)
        if ctx.divide:
            grad /= dist.get_world_size()
        return grad.chunk(dist.get_world_size())[dist.get_rank()], None


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(6, WIDTH), nn.LayerNorm(WIDTH), nn.GELU())
        self.projector = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.head = nn.Linear(WIDTH, PROJECTION, bias=False)
        self.temperature = nn.Parameter(torch.tensor(0.9))
        self.bias = nn.Parameter(torch.tensor(-0.4))

    def forward(self, x):
        return F.normalize(self.head(self.projector(self.backbone(x))), dim=-1)

    def scores(self, a, b):
        return self.temperature.exp() * a @ b.T + self.bias


class Wrapped(nn.Module):
    """DDP wants the whole loss in one forward."""

    def __init__(self, model, divide):
        super().__init__()
        self.model, self.divide = model, divide

    def forward(self, x, other):
        a, b = (GatherLayer.apply(self.model(t), self.divide) for t in (x, other))
        return self.model.scores(a, b)


def sigmoid_loss(scores):
    """SigLIP: pairs on the diagonal are positive, all others are negative."""
    sign = 2 * torch.eye(len(scores), dtype=scores.dtype) - 1
    return -F.logsigmoid(sign * scores).sum()


class Clean:
    divide = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {"x": torch.randn(ROWS, 6, generator=g), "other": torch.randn(ROWS, 6, generator=g)}

    def loss_sum(self, model, rows):
        return sigmoid_loss(model.scores(model(rows["x"]), model(rows["other"]))), len(rows["x"])

    def distribute(self, model, ctx):
        return DistributedDataParallel(Wrapped(model, self.divide))

    def step(self, model, batch, ctx):
        mine = {k: v.chunk(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        (sigmoid_loss(model(mine["x"], mine["other"])) / ROWS).backward()


class Buggy(Clean):
    divide = True


EXPECT = dict(
    right=[r"backbone|projector|head", r"1/4|0\.25|divided (by|twice)|averaged twice|too small"],
    place=[r"backbone|projector|head", r"all_?gather|all_?reduce"],
    wrong=[
        r"never reduced|not reduced|missing reduction",
        r"\bforward (is )?wrong",
        r"micro.?batch",
    ],
)
WHY = (
    "The gather's backward divides by the world size and DDP averages again: backbone, projector "
    "and head get a quarter of their gradient; temperature and bias are right."
)
