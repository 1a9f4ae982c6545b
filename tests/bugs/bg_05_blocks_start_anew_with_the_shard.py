"""Fine-tuning with MiSS adapters of peft (r = 3 on `up` and `down` of two feed-forward blocks, head trained as well) under tensor parallelism of three ranks, cut by hand: 13 hidden units as 5, 4 and 4. `up` is cut by columns with its adapter;
`down` is cut by rows, its adapter is whole on every rank and reads the rank's own part of the hidden vector. Three micro-batches of uneven size; all ranks see the same rows. The divisor is the number of rows.

The bug: MiSS adds up the input units that are r apart (unit n belongs to row n modulo r of the adapter), and the cut layer counts its units from zero. A shard that begins at unit 5 is off by two. After how peft's MiSS pads and folds its input
(huggingface/peft issue 3701) and the row-parallel adapters of PR 3079 (LoRA and Transformers TP).
"""

import types

import torch
import torch.distributed as dist
from peft import MissConfig, get_peft_model
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"tp": 3}}}}
WIDTH, HIDDEN, CLASSES, RANK, ROWS = 6, 13, 4, 3, 11
CUTS = [(0, 5), (5, 9), (9, 13)]
PARTS = [(0, 4), (4, 5), (5, 11)]


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return x + self.down(F.silu(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.head(self.blocks(x))


def part(tensor, dim, cut, grad):
    piece = tensor.detach().narrow(dim, cut[0], cut[1] - cut[0]).clone()
    return nn.Parameter(piece, requires_grad=grad)


def by_columns(layer, cut, group):
    base = layer.get_base_layer()
    base.weight, base.bias = part(base.weight, 0, cut, False), part(base.bias, 0, cut, False)
    layer.miss_block["default"] = part(layer.miss_block["default"], 1, cut, True)

    def forward(self, x):
        x = Enter.apply(x, group)
        folded = x.unflatten(-1, (-1, RANK)).sum(-2)
        return base(x) + folded @ self.miss_block["default"]

    layer.forward = types.MethodType(forward, layer)


def by_rows(layer, cut, group, from_unit):
    base = layer.get_base_layer()
    base.weight = part(base.weight, 1, cut, False)
    ahead = from_unit % RANK

    def forward(self, x):
        whole = F.pad(x, (ahead, -(ahead + x.shape[-1]) % RANK))
        folded = whole.unflatten(-1, (-1, RANK)).sum(-2)
        y = F.linear(x, base.weight) + folded @ self.miss_block["default"]
        return Leave.apply(y, group) + base.bias

    layer.forward = types.MethodType(forward, layer)


class Clean:
    counts_globally = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        config = MissConfig(
            r=RANK, target_modules=["up", "down"], init_weights=False, modules_to_save=["head"]
        )
        model = get_peft_model(Net(), config)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "miss_block" in name:
                    p.copy_(torch.randn_like(p) * 0.4)
        return model

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, WIDTH, generator=g),
            "kind": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        loss = F.cross_entropy(model(rows["x"]), rows["kind"], reduction="sum")
        return loss, len(rows["kind"])

    def distribute(self, model, ctx):
        cut, group = CUTS[ctx.rank], ctx.group("tp")
        for block in model.base_model.model.blocks:
            by_columns(block.up, cut, group)
            by_rows(block.down, cut, group, cut[0] if self.counts_globally else 0)
        return model

    def step(self, model, batch, ctx):
        for low, high in PARTS:
            rows = {k: v[low:high] for k, v in batch.items()}
            loss, _ = self.loss_sum(model, rows)
            (loss / ROWS).backward()
        for block in model.base_model.model.blocks:
            dist.all_reduce(block.down.miss_block["default"].grad, group=ctx.group("tp"))


class Buggy(Clean):
    counts_globally = False


EXPECT = dict(
    right=[
        r"(?i)down|miss|adapter",
        r"(?i)forward|order|index|row|offset|unit|shard|place|input|output|value",
    ],
    place=[r"(?i)down|by_rows"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) twice|never summed",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|only the (first|last) micro.?batch",
        r"(?i)only (on )?rank (0|2)\b|rank (0|2) alone",
        r"(?i)labels? .{0,20}(is|are) (wrong|of)|recomput|detached",
        r"(?i)(?<!not )\bup(\.\w+)* (goes|is) first wrong in the forward|the forward is right",
    ],
)
WHY = (
    "by_rows pads the rank's part of the hidden vector at the front by from_unit % 3 so that unit n meets row n % 3 of down's MiSS block. With from_unit = 0 rank 1 (units 5-8, 5 % 3 = 2) meets the rows shifted by two; rank 0 (from 0) and rank 2 "
    "(from 9, 9 % 3 = 0) are right. So on rank 1 the adapter's part of `down` in both blocks is wrong, in all micro-batches, and after the sum over tp the output of down (blocks.0 first) is wrong on all ranks; all trained parameters (up and down "
    "miss_block of both blocks, head) have wrong gradients, in down's miss_block moreover rank 1's part goes to wrong rows. up's cut, the sums, the frozen base product, the divisor 11 are right. Fix: from_unit = cut[0]."
)
