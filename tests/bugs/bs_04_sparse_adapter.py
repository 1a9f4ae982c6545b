"""SHiRA (peft's sparse high-rank adapter: trained values at fixed places of the weight) on a tensor-parallel MLP: up is cut by columns (rows of the weight), down by rows (columns of the weight), two tensor
ranks times two data ranks. The values are few and kept whole on each rank; every tensor rank adds to its slice of the base weight the values that lie in it, so their gradients are summed over all ranks.
Two micro-batches.

The bug: the entries are dealt out evenly (the first half of the list to the first rank ...) and only then cut to the slice of the weight; entries that lie in a rank's slice but in the other rank's half are
used by nobody. After home-made tensor parallelism for sparse deltas (SHiRA's indices are a flat list, which was sharded like a dense parameter, as FSDP does with flat parameters).
"""

import torch
import torch.distributed as dist
from peft import ShiraConfig, get_peft_model
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "tp": 2}}}}
INPUT, HIDDEN, CLASSES, ROWS = 7, 10, 5, 9


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(INPUT, HIDDEN)
        self.down = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class ReduceFromTensorRanks(torch.autograd.Function):
    @staticmethod
    def forward(fctx, x, group):
        x = x.clone()
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
        config = ShiraConfig(
            r=1, target_modules=["up", "down"], init_weights=False, random_seed=self.seed + 5
        )
        return get_peft_model(MLP(), config)

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, INPUT, generator=g),
            "y": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        return F.cross_entropy(model(rows["x"]), rows["y"], reduction="sum"), len(rows["y"])

    @staticmethod
    def own_range(size, ctx):
        own = torch.arange(size).tensor_split(ctx.axes["tp"])[ctx.coords["tp"]]
        return int(own[0]), int(own[-1]) + 1

    def delta_slice(self, layer, dim, ctx):
        """This rank's slice of the adapter's delta, cut along dim of the weight."""
        shape = list(layer.base_layer.weight.shape)
        lo, hi = self.own_range(shape[dim], ctx)
        shape[dim] = hi - lo
        place, values = layer.shira_indices["default"].long(), layer.shira_weight["default"]
        inside = (place[dim] >= lo) & (place[dim] < hi)
        place = place[:, inside].clone()
        place[dim] -= lo
        delta = values.new_zeros(shape).index_put(tuple(place), values[inside])
        return delta * layer.scaling["default"]

    def weight_slice(self, layer, dim, ctx):
        lo, hi = self.own_range(layer.base_layer.weight.shape[dim], ctx)
        return layer.base_layer.weight.narrow(dim, lo, hi - lo) + self.delta_slice(layer, dim, ctx)

    def forward(self, mlp, x, ctx):
        lo, hi = self.own_range(HIDDEN, ctx)
        h = F.linear(x, self.weight_slice(mlp.up, 0, ctx), mlp.up.base_layer.bias[lo:hi])
        out = F.linear(F.gelu(h), self.weight_slice(mlp.down, 1, ctx))
        return ReduceFromTensorRanks.apply(out, ctx.group("tp")) + mlp.down.base_layer.bias

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        trained = [p for p in model.parameters() if p.requires_grad]
        for p in trained:
            p.grad = None
        for n in range(2):
            part = {k: v.tensor_split(2)[n] for k, v in mine.items()}
            logits = self.forward(model.base_model.model, part["x"], ctx)
            (F.cross_entropy(logits, part["y"], reduction="sum") / ROWS).backward()
        for p in trained:
            dist.all_reduce(p.grad)


class Buggy(Clean):
    def delta_slice(self, layer, dim, ctx):
        weight = layer.base_layer.weight
        place, values = layer.shira_indices["default"].long(), layer.shira_weight["default"]
        first, last = self.own_range(len(values), ctx)
        place, values = place[:, first:last], values[first:last]
        delta = values.new_zeros(weight.shape).index_put(tuple(place), values)
        lo, hi = self.own_range(weight.shape[dim], ctx)
        return delta.narrow(dim, lo, hi - lo) * layer.scaling["default"]


EXPECT = dict(
    right=[
        r"entr(y|ies)|value|element|sparse|shira|adapter|delta|indices",
        r"half|even(ly)?|dealt|split|position in the list|first.{0,5}last|drop|lost|miss|not used|unused|zero|no gradient|nobody|neither|ignored|left out",
    ],
    place=[
        r"delta_slice",
        r"shira",
        r"weight_slice",
        r"own_range",
        r"mlp\.(up|down)|\b(up|down)\b",
    ],
    wrong=[
        r"(not|never) reduced|reduced twice|missing (all.?)?reduc|wrong group",
        r"counted (twice|two|2) times|divided by|divisor|mean of means|scaling is (wrong|missing)",
        r"micro.?batch.{0,30}(lost|dropped|overwritten)|ReduceFromTensorRanks.{0,40}(wrong|missing)|wrong rows of the batch",
    ],
)
WHY = (
    "Each tensor rank takes its half of the list of SHiRA's values and then cuts the delta to its slice of the weight. The list is ordered by rows of the weight: for down, cut along columns, about half of the entries lie "
    "in the slice of one rank but in the list half of the other, and are used on no rank; for up, only entries about the middle row are. These entries' gradients are zero on all ranks, and as the forward lacks them, all other "
    "gradients of the adapter are off. A right cause says that a part of the sparse entries is lost because they are split by position instead of by the slice they lie in. Fix: choose entries by their row/column."
)
