"""A one-dimensional U-Net (denoising of signals) on three data parallel ranks with gradients summed by hand at the end, two micro-batches each. The two blocks of the way down are recomputed in the backward by a checkpoint Function of our
own (in the form of torch's reentrant one); each returns two results, the halved signal and the skip signal for the way up.

The bug: the backward of the checkpoint calls autograd for the first of the recomputed results only; the gradient that comes for the skip signal is dropped. Compare pytorch/pytorch PR 45934 (which of the outputs of a checkpointed
function and of their gradients go into torch.autograd.backward) and facebookresearch/fairscale PR 701 (checkpoint wrapper with several outputs).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, LENGTH, WIDTH = 10, 12, 4
PARTS = [[(0, 2), (2, 4)], [(4, 5), (5, 7)], [(7, 9), (9, 10)]]


class Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block, first_only, x):
        ctx.block, ctx.first_only = block, first_only
        ctx.save_for_backward(x)
        with torch.no_grad():
            return block(x)

    @staticmethod
    def backward(ctx, *grads):
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            results = ctx.block(x)
        if ctx.first_only:
            torch.autograd.backward(results[0], grads[0])
        else:
            torch.autograd.backward(results, grads)
        return None, None, x.grad


class Down(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.GroupNorm(1, WIDTH)
        self.wide = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.halve = nn.Conv1d(WIDTH, WIDTH, 2, stride=2)

    def forward(self, x):
        skip = x + F.silu(self.wide(self.norm(x)))
        return torch.tanh(self.halve(skip)), skip


class Up(nn.Module):
    def __init__(self):
        super().__init__()
        self.widen = nn.ConvTranspose1d(WIDTH, WIDTH, 2, stride=2)
        self.join = nn.Conv1d(2 * WIDTH, WIDTH, 3, padding=1)

    def forward(self, x, skip):
        return F.silu(self.join(torch.cat([self.widen(x), skip], 1)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.start = nn.Conv1d(1, WIDTH, 3, padding=1)
        self.downs = nn.ModuleList([Down(), Down()])
        self.middle = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.ups = nn.ModuleList([Up(), Up()])
        self.end = nn.Conv1d(WIDTH, 1, 1)
        self.recompute, self.first_only = False, False

    def forward(self, x):
        x, skips = self.start(x), []
        for down in self.downs:
            if self.recompute:
                x, skip = Recompute.apply(down, self.first_only, x)
            else:
                x, skip = down(x)
            skips.append(skip)
        x = x + torch.tanh(self.middle(x))
        for up, skip in zip(self.ups, reversed(skips)):
            x = up(x, skip)
        return self.end(x)


class Clean:
    first_only = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        signal = torch.randn(ROWS, 1, LENGTH, generator=g).cumsum(-1)
        return {"noisy": signal + 0.3 * torch.randn(ROWS, 1, LENGTH, generator=g), "signal": signal}

    def loss_sum(self, model, rows):
        error = model(rows["noisy"]) - rows["signal"]
        return error.square().sum(), error.numel()

    def distribute(self, model, ctx):
        model.recompute, model.first_only = True, self.first_only
        return model

    def step(self, model, batch, ctx):
        for low, high in PARTS[ctx.rank]:
            loss, _ = self.loss_sum(model, {k: v[low:high] for k, v in batch.items()})
            (loss / (ROWS * LENGTH)).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    first_only = True


EXPECT = dict(
    right=[
        r"(?i)downs?\b|downs?[.\[]|skip|recompute|checkpoint",
        r"(?i)backward|gradient (of|that|for|to|from|is|through)|adjoint|graph|path"
        r"|second (output|result)|detach|hands? (back|on)",
    ],
    place=[r"(?i)downs?\b|downs?[.\[]|skip|recompute|checkpoint"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward|recompute[sd]? (with"
        r"|under) (an)?other (weights|state|mask|input)",
        r"(?i)(never|not) (been )?(all.?)?reduced|(reduced|summed) (twice|again)"
        r"|counted (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[23]\b",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten)|only the (first"
        r"|last) micro",
        r"(?i)only (on )?rank \d|rank \d alone|(other|wrong) (rows|targets)",
        r"(?i)(ups?[.\[ ]?\d?|end|middle)\S* (gradient )?(is|are) wrong",
    ],
)
WHY = (
    "Forward, loss, way up, middle and end are right on all three ranks. In the backward of Recompute, for both blocks of the way down, the recomputed results are right, but only the halved signal's gradient goes into autograd; "
    "the gradient of the skip signal (the direct way from the block to ups.1 or ups.0) is dropped. So the gradients of downs.0 and downs.1: norm and wide miss the part through the skip signal, downs.1.halve is right, downs.0.halve "
    "is wrong (it lies below downs.1, whose input gradient is short), and start is wrong. All rows, micro-batches and ranks alike. The sum over the ranks, divisor 120 and accumulation are right. Fix: "
    "torch.autograd.backward(results, grads) for both."
)
