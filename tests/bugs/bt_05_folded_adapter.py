"""MiSS adapters of peft under tensor parallelism by hand: the MLP's up projection is cut by output features, its down projection by input features, and both carry a MiSS adapter (the input is folded into pieces of r
features, which are summed and multiplied by one r x out block). The hidden width 14 is cut into 7 and 7 on the tp axis, r is 4, the data lie on two dp ranks; two micro-batches; only the adapters are trained, their
gradients summed over dp (the down block over tp too, as each tp rank sees its own part of the folded features).

The bug: the row-parallel layer folds its own features from their first one on, as the layer of the library does with its whole input. The second tp rank's features begin at 7, which is piece 1's column 3, but they are folded
as if they began at a multiple of r. After the practice of tensor parallel adapters (peft's MiSS/Bone layer pads the input at the end and reshapes).
"""

import torch
import torch.distributed as dist
from peft import MissConfig, get_peft_model
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "tp": 2}}}}
ROWS, WIDTH, HIDDEN, R, CLASSES = 7, 6, 14, 4, 5


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlps = nn.ModuleList(Mlp() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        for mlp in self.mlps:
            x = x + mlp(x)
        return self.head(x)


class CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(fctx, x, group):
        fctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(fctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=fctx.group)
        return grad, None


class SumOverRanks(torch.autograd.Function):
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
        config = MissConfig(
            r=R, target_modules=["up", "down"], miss_dropout=0.0, init_weights=False
        )
        return get_peft_model(Classifier(), config)

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, WIDTH, generator=g),
            "y": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        return F.cross_entropy(model(rows["x"]), rows["y"], reduction="sum"), len(rows["y"])

    @staticmethod
    def fold(x):
        x = F.pad(x, (0, -x.shape[-1] % R))
        return x.unflatten(-1, (-1, R)).sum(-2)

    def column_parallel(self, layer, x, own):
        block = layer.miss_block["default"]
        base = layer.base_layer
        return F.linear(x, base.weight[own], base.bias[own]) + self.fold(x) @ block[:, own]

    def row_parallel(self, layer, x, own, group):
        base = layer.base_layer
        x_whole_columns = F.pad(x, (own.start % R, 0))
        y = F.linear(x, base.weight[:, own])
        y = y + self.fold(x_whole_columns) @ layer.miss_block["default"]
        return SumOverRanks.apply(y, group) + base.bias

    def step(self, model, batch, ctx):
        tp = ctx.group("tp")
        own = torch.arange(HIDDEN).tensor_split(ctx.axes["tp"])[ctx.coords["tp"]]
        own = slice(int(own[0]), int(own[-1]) + 1)
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        inner = model.base_model.model
        for n in range(2):
            rows = {k: v.tensor_split(2)[n] for k, v in mine.items()}
            x = rows["x"]
            for mlp in inner.mlps:
                h = F.gelu(self.column_parallel(mlp.up, CopyToRanks.apply(x, tp), own))
                x = x + self.row_parallel(mlp.down, h, own, tp)
            loss = F.cross_entropy(inner.head(x), rows["y"], reduction="sum")
            (loss / ROWS).backward()
        for p in model.parameters():
            if p.requires_grad:
                dist.all_reduce(p.grad, group=ctx.group("dp"))
        for p in (q for n, q in model.named_parameters() if "miss_block" in n):
            dist.all_reduce(p.grad, group=tp)  # own columns of up, own features of down


class Buggy(Clean):
    def row_parallel(self, layer, x, own, group):
        base = layer.base_layer
        y = F.linear(x, base.weight[:, own]) + self.fold(x) @ layer.miss_block["default"]
        return SumOverRanks.apply(y, group) + base.bias


EXPECT = dict(
    right=[
        r"fold|piece|offset|align|column|feature|row_parallel|down|adapter|miss|shard|slice",
        r"offset|align|start|begin|shift|phase|from (its|the) (own )?first|multiple of|restart|pad|modulo|fold|own (features|part|slice|shard|piece)"
        r"|(forward|value|output|activation|input).{0,80}(differ|other|unlike|wrong|not what)|on tp.{0,10}1|second tp",
    ],
    place=[r"row_parallel", r"\bfold\b", r"\bdown\b", r"miss_block", r"SumOverRanks"],
    wrong=[
        r"not reduced|reduced twice|never reduced|missing (all.?)?reduc|wrong group",
        r"micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|divisor|mean of means",
        r"bias.{0,40}(twice|each rank|added)|(backward|adjoint) of (Copy|Sum)|CopyToRanks.{0,40}(wrong|missing)",
        r"detached|no gradient|(wrong|other) (rows|labels)",
    ],
)
WHY = (
    "MiSS adds x[j] to column j mod r of the folded input. On the tp rank 1 the shard begins at feature 7, so its first feature belongs into column 3, but fold() of the shard puts it into column 0 and all others are shifted alike; "
    "tp rank 0 begins at 0 and is right. The partial output of tp rank 1 (in both dp replicas, both MLPs) is wrong, and so are the sum, the loss and all gradients of the adapters. A right cause says that the row-parallel adapter "
    "folds the own features from the shard's start (offset not a multiple of r, misaligned) on tp rank 1, in row_parallel/down. Fix: pad own.start mod r zeros in front."
)
