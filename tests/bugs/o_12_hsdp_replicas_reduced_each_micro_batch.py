"""Hybrid sharding by hand: each parameter is cut along dimension 0 over three shard ranks and gathered for each micro-batch; two
replicas. An image classifier with mixed labels. After reports on HSDP with gradient accumulation: the replicas' all-reduce is run in place
on the accumulated shard after each micro-batch.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"replica": 2, "shard": 3}}}}
ROWS, SIDE, CLASSES, MICRO = 13, 5, 7, 2


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, own, length, me, group):
        sizes = [len(t) for t in torch.arange(length).tensor_split(dist.get_world_size(group))]
        ctx.rest = sizes, me, group
        padded = own.new_zeros(max(sizes), *own.shape[1:])
        padded[: len(own)] = own
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([p[:n] for p, n in zip(parts, sizes, strict=True)])

    @staticmethod
    def backward(ctx, grad):
        sizes, me, group = ctx.rest
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=group)
        return grad.split(sizes)[me].clone(), None, None, None


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.gn = nn.Conv2d(1, 6, 3, padding=1), nn.GroupNorm(2, 6)
        self.conv = nn.Conv2d(6, 5, 3)
        self.fc, self.head = nn.Linear(5, 11), nn.Linear(11, CLASSES)

    def forward(self, image):
        x = F.silu(self.gn(self.stem(image)))
        x = F.silu(self.conv(x)).mean((2, 3))
        return self.head(F.silu(self.fc(x)))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        hot = torch.eye(CLASSES)
        a, b = torch.randint(CLASSES, (2, ROWS), generator=g)
        part = torch.rand(ROWS, 1, generator=g)
        return {
            "image": torch.randn(ROWS, 1, SIDE, SIDE, generator=g),
            "target": part * hot[a] + (1 - part) * hot[b],
        }

    def loss_sum(self, model, rows):
        return F.cross_entropy(model(rows["image"]), rows["target"], reduction="sum"), len(
            rows["image"]
        )

    def distribute(self, model, ctx):
        self.lengths = {n: len(p) for n, p in model.named_parameters()}
        for name, p in list(model.named_parameters()):
            owner, _, leaf = name.rpartition(".")
            own = p.detach().tensor_split(ctx.axes["shard"])[ctx.coords["shard"]].clone()
            setattr(model.get_submodule(owner), leaf, nn.Parameter(own))
        return model

    def reduce_replicas(self, model, ctx, last):
        if last:
            for p in model.parameters():
                dist.all_reduce(p.grad, group=ctx.group("replica"))

    def step(self, model, batch, ctx):
        me, group = ctx.coords["shard"], ctx.group("shard")
        parts = ctx.axes["replica"] * ctx.axes["shard"]
        part = ctx.coords["replica"] * ctx.axes["shard"] + me
        mine = {k: v.tensor_split(parts)[part] for k, v in batch.items()}
        for m in range(MICRO):
            rows = {k: v.tensor_split(MICRO)[m] for k, v in mine.items()}
            whole = {
                n: Gather.apply(p, self.lengths[n], me, group) for n, p in model.named_parameters()
            }
            logits = functional_call(model, whole, (rows["image"],))
            loss = F.cross_entropy(logits, rows["target"], reduction="sum")
            (loss / len(batch["image"])).backward()
            self.reduce_replicas(model, ctx, m == MICRO - 1)


class Buggy(Clean):
    def reduce_replicas(self, model, ctx, last):
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("replica"))


EXPECT = dict(
    right=[
        r"micro|accumul|first|earlier",
        r"twice|two times|2 times|double|again|repeat|more than once|each micro|every micro|already|times 2|\b2(\.0+)?\s*(x|times|\*)|too (large|big)",
    ],
    place=[r"micro", r"replica", r"(all|every|each) (param|rank|shard)"],
    wrong=[
        r"mean of (the )?means|own (count|denominator|divisor)",
        r"(never|not) (been )?(all.?)?reduced|missing (all.?)?reduc",
        r"(last|second) micro.?batch.{0,30}(twice|again|double|lost|missing)",
        r"(wrong|other) (slice|shard)",
        r"forward (pass )?(is|was) wrong",
    ],
)
WHY = (
    "After each micro-batch the accumulated gradient shard is all-reduced in place over the two replicas. The first micro-batch's gradient, "
    "already summed over the replicas, is summed again with the second's: it counts twice, the second once. So in all parameters of all "
    "ranks."
)
