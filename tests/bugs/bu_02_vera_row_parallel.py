"""A PEFT VeRA model (frozen shared random projections vera_A and vera_B, trained vectors lambda_b and lambda_d) under data parallelism times tensor parallelism: the up projection is cut by columns, the down projection
by rows, the trained head is replicated. Three micro-batches; every rank keeps all parameters and computes with its slice.

The bug: in the row-parallel layer the rank slices the shared vera_A like PEFT's own layer does, [:, :in_features] with the in_features of its slice; ranks with a later slice of the input multiply it by the columns of the first.
After PEFT's sliced_A in vera/layer.py, right for layers of unequal size but not for tensor parallel slices of one layer.
"""

import torch
import torch.distributed as dist
from peft import VeraConfig, get_peft_model
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "tp": 2}}}}
ROWS, WIDTH, HIDDEN, CLASSES, RANK = 13, 6, 10, 5, 3


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(4, WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = torch.tanh(self.stem(x))
        return self.head(self.norm(x + self.down(F.gelu(self.up(x)))))


class CopyToTensor(torch.autograd.Function):
    @staticmethod
    def forward(fctx, x, group):
        fctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(fctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=fctx.group)
        return grad, None


class ReduceFromTensor(torch.autograd.Function):
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
        config = VeraConfig(r=RANK, target_modules=["up", "down"], projection_prng_key=11)
        model = get_peft_model(Net(), config)
        g = torch.Generator().manual_seed(self.seed + 2)
        for name, p in model.named_parameters():
            if "lambda" in name:
                p.data = torch.randn(p.shape, generator=g)
            elif ".head." in name or ".stem." in name:
                p.requires_grad_(True)
        return model

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, 4, generator=g),
            "y": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        return F.cross_entropy(model(rows["x"]), rows["y"], reduction="sum"), len(rows["y"])

    def column_parallel(self, layer, x, lo, hi):
        base = layer.get_base_layer()
        a = layer.vera_A["default"][:, : base.in_features]
        b = layer.vera_B["default"][lo:hi]
        scaled = layer.vera_lambda_d["default"] * F.linear(x, a)
        delta = layer.vera_lambda_b["default"][lo:hi] * F.linear(scaled, b)
        return F.linear(x, base.weight[lo:hi], base.bias[lo:hi]) + delta

    def row_parallel(self, layer, x, lo, hi, group):
        base = layer.get_base_layer()
        a = layer.vera_A["default"][:, lo:hi]
        b = layer.vera_B["default"][: base.out_features]
        scaled = layer.vera_lambda_d["default"] * F.linear(x, a)
        delta = layer.vera_lambda_b["default"] * F.linear(scaled, b)
        return ReduceFromTensor.apply(F.linear(x, base.weight[:, lo:hi]) + delta, group) + base.bias

    def forward_sharded(self, model, x, ctx):
        net, tp = model.get_base_model(), ctx.group("tp")
        size = HIDDEN // ctx.axes["tp"]
        lo = ctx.coords["tp"] * size
        hi = lo + size
        x = torch.tanh(net.stem(x))
        h = self.column_parallel(net.up, CopyToTensor.apply(x, tp), lo, hi)
        return net.head(net.norm(x + self.row_parallel(net.down, F.gelu(h), lo, hi, tp)))

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        model.zero_grad()
        for n in range(3):
            x, y = (mine[k].tensor_split(3)[n] for k in ("x", "y"))
            logits = self.forward_sharded(model, x, ctx)
            (F.cross_entropy(logits, y, reduction="sum") / ROWS).backward()
        for name, p in model.named_parameters():
            if p.requires_grad:
                group = ctx.group("dp", "tp") if "lambda" in name else ctx.group("dp")
                dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    def row_parallel(self, layer, x, lo, hi, group):
        base = layer.get_base_layer()
        weight = base.weight[:, lo:hi]
        a = layer.vera_A["default"][:, : weight.shape[1]]
        b = layer.vera_B["default"][: base.out_features]
        scaled = layer.vera_lambda_d["default"] * F.linear(x, a)
        delta = layer.vera_lambda_b["default"] * F.linear(scaled, b)
        return ReduceFromTensor.apply(F.linear(x, weight) + delta, group) + base.bias


EXPECT = dict(
    right=[
        r"vera|row_parallel|down\b|projection|adapter|delta",
        r"slice|column|offset|first|same (part|range|entries|block)|\[:, *:|range|start|cut|wrong (part|rows|columns|half)|tp.{0,12}(rank|coord)|other (part|columns)",
    ],
    place=[r"vera_A", r"row_parallel", r"down\b", r"F\.linear\(x, a\)"],
    wrong=[
        r"lambda.{0,40}(not|never) reduced|missing (all.?)?reduc|reduced (twice|again)",
        r"micro.?batch.{0,30}(lost|dropped|overwritten)|divisor|mean of means|wrong group",
        r"column_parallel.{0,50}(wrong|slice)|vera_B.{0,40}(wrong|slice)",
    ],
)
WHY = (
    "The second tensor rank of each replica holds inputs 5 to 9 of the down projection, and has to multiply them by columns 5 to 9 of the shared random matrix vera_A; row_parallel takes the first 5 columns "
    "on both tensor ranks. Tensor rank 0 is right by accident, tensor rank 1 adds a wrong adapter term to the partial sum, so that after the all-reduce the layer's output is wrong on all four ranks, and all gradients are. "
    "The reductions, counts and the base weight's slices are right. A right cause names the slice of vera_A (the adapter's input projection) in row_parallel: first columns instead of the rank's own. Fix: vera_A[:, lo:hi]."
)
