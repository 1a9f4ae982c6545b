"""Training with quantised activations (learned step size) under tensor and data parallelism by hand, tp 2 x dp 2: `up` is cut by output rows (5 and 4), `down` by columns, and the activations between them are rounded to eight levels by a fused
Function with a straight-through backward: inside the range the gradient passes, outside it is zero, and the step size has the gradient of the learned step size quantisation (LSQ). Two micro-batches per replica.

The bug: the Function tests the range on the value that is already clamped, so nothing is ever outside: the gradient of saturated activations passes, and the step size has the wrong formula for them. After microsoft/nni PR 3160 (fix quant grad
function calculation error) and pytorch/ao PR 4806 (straight-through estimator at the clamp boundary).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "tp": 2}}}}
FEATURES, WIDTH, WIDE, CLASSES, ROWS = 6, 7, 9, 4, 13
CUTS = [(0, 5), (5, 9)]
PARTS = [[(0, 4), (4, 6)], [(6, 9), (9, 13)]]
LOW, HIGH = -4, 3


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


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, size, keep_raw):
        level = torch.round(x / size)
        clamped = level.clamp(LOW, HIGH)
        ctx.save_for_backward(x, size, level if keep_raw else clamped)
        return clamped * size

    @staticmethod
    def backward(ctx, grad):
        x, size, level = ctx.saved_tensors
        inside = (level >= LOW) & (level <= HIGH)
        clamped = level.clamp(LOW, HIGH)
        slope = torch.where(inside, clamped - x / size, clamped)
        return grad * inside, (grad * slope).sum().reshape(size.shape), None


class Quantizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.size = nn.Parameter(torch.tensor([0.15]))
        self.keep_raw = True

    def forward(self, x):
        return Rounded.apply(x, self.size, self.keep_raw)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.entry = nn.Linear(FEATURES, WIDTH)
        self.up, self.quantizer, self.down = (
            nn.Linear(WIDTH, WIDE),
            Quantizer(),
            nn.Linear(WIDE, WIDTH),
        )
        self.head = nn.Linear(WIDTH, CLASSES)
        self.group = None

    def forward(self, x):
        x = F.silu(self.entry(x))
        if self.group is None:
            y = self.down(self.quantizer(self.up(x)))
        else:
            y = self.quantizer(self.up(Enter.apply(x, self.group)))
            y = Total.apply(F.linear(y, self.down.weight), self.group) + self.down.bias
        return self.head(F.silu(x + y))


class Clean:
    keep_raw = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        model = Net()
        with torch.no_grad():
            model.up.weight.mul_(2)
        return model

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": 1.5 * torch.randn(ROWS, FEATURES, generator=g),
            "label": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        return F.cross_entropy(model(rows["x"]), rows["label"], reduction="sum"), len(rows["x"])

    def distribute(self, model, ctx):
        low, high = CUTS[ctx.coords["tp"]]
        model.up.weight = nn.Parameter(model.up.weight.detach()[low:high].clone())
        model.up.bias = nn.Parameter(model.up.bias.detach()[low:high].clone())
        model.down.weight = nn.Parameter(model.down.weight.detach()[:, low:high].clone())
        model.group, model.quantizer.keep_raw = ctx.group("tp"), self.keep_raw
        return model

    def step(self, model, batch, ctx):
        for low, high in PARTS[ctx.coords["dp"]]:
            loss, _ = self.loss_sum(model, {k: v[low:high] for k, v in batch.items()})
            (loss / ROWS).backward()
        dist.all_reduce(model.quantizer.size.grad, group=ctx.group("tp"))
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    keep_raw = False


EXPECT = dict(
    right=[
        r"(?i)quantizer|Rounded|\bsize\b|round|clamp",
        r"(?i)backward|adjoint|gradient (of|that|to|for)|hands? (back|on)|input gradient|derivative|straight",
    ],
    place=[r"(?i)quantizer|Rounded|\bup\b"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)\b(head|down)(\.(weight|bias))? (is|are) wrong",
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)|too (early|late)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own",
        r"(?i)only (on )?rank [0-3]\b|rank [0-3] alone|only (the )?(first|second) replica",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|recomput|labels? .{0,20}(is|are) wrong|stale",
    ],
)
WHY = (
    "The forward is right everywhere. Rounded saves the clamped level and its backward tests LOW <= level <= HIGH on it, which is always true; the test has to be made on the level before the clamp. So on all ranks, in all micro-batches, the gradient passes "
    "through saturated activations, which must get zero, and the step size's slope is (clamped - x / size) for clamped there. Wrong are quantizer.size, up.weight, up.bias and (through up's input) entry.weight, entry.bias; down and "
    "head are right. Copies, all-reduces over tp and dp, the divisor 13 are right. Fix: save the unclamped level."
)
