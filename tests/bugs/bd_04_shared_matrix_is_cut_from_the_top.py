"""Fine-tuning with VeRA of peft under tensor parallelism on three ranks, by hand: the adapted projection of each feed-forward block is cut by output rows (uneven cuts), the projection back by columns. VeRA has one frozen random pair A, B for
all layers; each layer takes what it needs from the pair's beginning and learns two vectors. Two micro-batches; the vectors' gradients are summed over the ranks.

The bug: each rank takes as many rows of the shared B as it has output rows, from the top, as VeRA itself does with a layer's size, not its own rows. Rank 0 is right. After peft's VeRA layer (vera_B[: self.out_features]) and requests for adapters
under tensor parallelism (huggingface/peft, sharded base layers).
"""

import types

import torch
import torch.distributed as dist
from peft import VeraConfig, get_peft_model
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"tp": 3}}}}
FEATURES, WIDTH, CLASSES, ROWS = 5, 6, 4, 11
CUTS = {12: [0, 5, 9, 12], 9: [0, 4, 7, 9]}
TURNS = [(0, 4), (4, 11)]


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Block(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, wide), nn.Linear(wide, WIDTH)

    def forward(self, x):
        return x + self.down(F.silu(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.entry = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList([Block(12), Block(9)])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def cut(block, ctx, part_of):
    """The block's forward with this rank's output rows of `up` and columns of `down`."""
    group, cuts = ctx.group("tp"), CUTS[block.up.base_layer.out_features]
    low, high = cuts[ctx.rank], cuts[ctx.rank + 1]

    def forward(self, x):
        up, name = self.up, self.up.active_adapters[0]
        base, inner = up.base_layer, Enter.apply(x, group)
        small = F.linear(inner, up.vera_A[name][:, : base.in_features])
        back = part_of(up.vera_B[name], low, high)
        y = F.linear(inner, base.weight[low:high], base.bias[low:high])
        y = y + up.vera_lambda_b[name][low:high] * F.linear(up.vera_lambda_d[name] * small, back)
        y = F.linear(F.silu(y), self.down.weight[:, low:high])
        return x + Total.apply(y, group) + self.down.bias

    block.forward = types.MethodType(forward, block)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        config = VeraConfig(r=3, target_modules=["up"], modules_to_save=["head"], vera_dropout=0.0)
        model = get_peft_model(Net(), config)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "vera_lambda" in name:
                    p.copy_(0.8 * torch.randn(p.shape))
        return model

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, FEATURES, generator=g),
            "label": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        return F.cross_entropy(model(rows["x"]), rows["label"], reduction="sum"), len(rows["x"])

    def part_of(self, matrix, low, high):
        return matrix[low:high]

    def distribute(self, model, ctx):
        for module in model.modules():
            if isinstance(module, Block):
                cut(module, ctx, self.part_of)
        return model

    def step(self, model, batch, ctx):
        for low, high in TURNS:
            loss, _ = self.loss_sum(model, {k: v[low:high] for k, v in batch.items()})
            (loss / ROWS).backward()
        for name, p in model.named_parameters():
            if "vera_lambda" in name:
                dist.all_reduce(p.grad, group=ctx.group("tp"))


class Buggy(Clean):
    def part_of(self, matrix, low, high):
        return matrix[: high - low]


EXPECT = dict(
    right=[
        r"(?i)vera|adapter|\bup\b|block|lambda",
        r"(?i)forward|slice|cut|rows of|shard|part|other (rows|weights?|matrix)|index|offset|from (the top|zero|row 0)|goes wrong",
    ],
    place=[r"(?i)vera|\bup\b|blocks?|adapter|lambda"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)|missing all.?reduce",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|from micro.?batch|state left",
        r"(?i)only (on )?rank 0\b|rank 0 (is|goes) wrong",
        r"(?i)(head|entry)('s)? (forward|backward) is wrong|labels? .{0,20}(is|are) wrong|recomput|dropout",
        r"(?i)vera_A.{0,20}wrong|base (weight|layer).{0,20}(is|cut) wrong",
    ],
)
WHY = (
    "In both blocks the adapted projection `up` on ranks 1 and 2 takes rows [0, high - low) of the frozen shared matrix vera_B, and has to take its own rows [low, high) (rank 1: 5-8 and 4-6, rank 2: 9-11 and 7-8). Rank 0 (low = 0) is right. "
    "Base weight, bias, lambda_b and vera_A are cut right. So the adapter's part of these output rows is wrong in the forward, in all rows and micro-batches, and with it (the sum of the ranks' outputs) everything after it on all ranks; the gradients of "
    "lambda_b and lambda_d of both blocks and of the head are wrong. Copies, all-reduces, the divisor 11 and the sums of the vectors' gradients are right. Fix: vera_B[low:high]."
)
