"""A PointNet over clouds cut into shards: the largest feature over all points is a max all-reduce. After the many reports on collectives
without a derivative for MAX (PyTorch's torch.distributed.nn, Megatron's reduce region used for it) and FAULTS C07: the backward is that
of a sum, so each shard's own largest point gets the gradient.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "sp": 2}}}}
ROWS, POINTS, WIDTH, CLASSES, MICRO_BATCHES = 9, 11, 7, 4, 2


class GlobalMax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        top = x.contiguous().clone()
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        ctx.save_for_backward(x == top)
        return top

    @staticmethod
    def backward(ctx, grad):
        (mine,) = ctx.saved_tensors
        return grad * mine, None


class AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, op=dist.ReduceOp.SUM):
        x = x.contiguous().clone()
        dist.all_reduce(x, op=op, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None, None


class PointNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.norm1 = nn.Linear(3, WIDTH), nn.LayerNorm(WIDTH)
        self.two, self.norm2 = nn.Linear(WIDTH, 12), nn.LayerNorm(12)
        self.hidden, self.out = nn.Linear(12, 8), nn.Linear(8, CLASSES)

    def forward(self, points, there, over_shards=lambda x: x):
        x = F.leaky_relu(self.norm1(self.one(points)))
        x = self.norm2(self.two(x)).masked_fill(~there[..., None], -1e4)
        return self.out(F.gelu(self.hidden(over_shards(x.amax(1)))))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return PointNet()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        points = torch.randint(4, POINTS + 1, (ROWS, 1), generator=g)
        return {
            "points": torch.randn(ROWS, POINTS, 3, generator=g),
            "there": torch.arange(POINTS) < points,
            "kind": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows, **more):
        logits = model(rows["points"], rows["there"], **more)
        return F.cross_entropy(logits, rows["kind"], reduction="sum"), len(rows["kind"])

    def largest(self, x, group):
        return GlobalMax.apply(x, group)

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        for name in ("points", "there"):
            mine[name] = mine[name].tensor_split(ctx.axes["sp"], dim=1)[ctx.coords["sp"]]
        for i in range(MICRO_BATCHES):
            rows = {k: v.tensor_split(MICRO_BATCHES)[i] for k, v in mine.items()}
            loss, _ = self.loss_sum(
                model, rows, over_shards=lambda x: self.largest(x, ctx.group("sp"))
            )
            (loss / ROWS).backward()
        for (
            name,
            param,
        ) in model.named_parameters():  # the head sees the same features on all shards
            shards = () if name.split(".")[0] in ("hidden", "out") else ("sp",)
            dist.all_reduce(param.grad, group=ctx.group("dp", *shards))


class Buggy(Clean):
    def largest(self, x, group):
        return AllReduce.apply(x, group, dist.ReduceOp.MAX)


EXPECT = dict(
    right=[
        r"norm[12]|one|two|max|pool|over_shards|largest|GlobalMax|AllReduce",
        r"backward|adjoint|gradient (of|into|entering|that|flow|at|with respect)|incoming|max|own (largest|point|shard)|every shard|"
        r"too (much|many|large)|extra|all shards|\bsp\b",
    ],
    place=[
        r"norm2|two",
        r"max|pool|largest|over_shards",
        r"(all|every|each) ranks?|ranks? \W?[0-3]",
    ],
    wrong=[
        r"forward (pass )?(is|was) (wrong|different)|forward differs",
        r"never (been )?(all.?)?reduced|is not reduced|missing (all.?)?reduc",
        r"counted (twice|\d times)|reduced (twice|again)",
        r"(hidden|out)\.\S* (is|are|has|have) (a )?wrong",
        r"mean of (the )?(rank |ranks' )?means",
        r"micro-?batch(es)? (is|are|was|were) (lost|missing|dropped)",
    ],
)
WHY = (
    "The maximum over the shards hands its gradient to both shards, also to the one whose largest point is not the largest of the "
    "cloud; it belongs to the shard with the maximum alone. The forward and the "
    "head (hidden, out) are exact; one, norm1, two and norm2 get extra gradients from points that have no influence, on all ranks."
)
