"""A residual network with a fused add + RMSNorm (pre-norm, two outputs: the normalised and the new residual) in a hand-written pipeline of two stages with two replicas (pp 2 x dp 2): the stages hand over the pair (branch output, residual)
per micro-batch and get the pair of gradients back; uneven micro-batches.

The bug: the backward of the fused kernel adds the gradient of the residual output to that of the normalised output before it goes back through the norm, instead of after it: (dout + dres) through the norm, not dres + (dout through the norm).
Dao-AILab/quack PR 53 (fix gradient computation in RMS PreNorm backward pass), the same sum in other fused add-norm kernels (Liger-Kernel PR 812).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"pp": 2, "dp": 2}}}}
ROWS, INPUT, WIDTH, HIDDEN, CLASSES, BLOCKS = 11, 6, 7, 9, 5, 4
EPS = 1e-5


class AddNorm(torch.autograd.Function):
    """residual = branch + residual; out = residual / rms(residual) * weight."""

    @staticmethod
    def forward(ctx, branch, residual, weight, add_after):
        new = branch + residual
        rstd = torch.rsqrt(new.pow(2).mean(-1, keepdim=True) + EPS)
        ctx.save_for_backward(new, rstd, weight)
        ctx.add_after = add_after
        return new * rstd * weight, new

    @staticmethod
    def through_norm(grad, normed, rstd, weight):
        g = grad * weight
        return rstd * (g - normed * (g * normed).mean(-1, keepdim=True))

    @staticmethod
    def backward(ctx, dout, dres):
        new, rstd, weight = ctx.saved_tensors
        normed = new * rstd
        dweight = (dout * normed).sum(0)
        if ctx.add_after:
            dres = dres + AddNorm.through_norm(dout, normed, rstd, weight)
        else:
            dres = AddNorm.through_norm(dres + dout, normed, rstd, weight)
        return dres, dres, dweight, None


class Enter(nn.Module):
    def __init__(self):
        super().__init__()
        self.branch, self.residual = nn.Linear(INPUT, WIDTH), nn.Linear(INPUT, WIDTH)

    def forward(self, x):
        return torch.tanh(self.branch(x)), self.residual(x)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(1 + 0.3 * torch.randn(WIDTH))
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.fused, self.add_after = False, True

    def forward(self, pair):
        branch, residual = pair
        if self.fused:
            h, residual = AddNorm.apply(branch, residual, self.weight, self.add_after)
        else:
            residual = branch + residual
            h = residual * torch.rsqrt(residual.pow(2).mean(-1, keepdim=True) + EPS) * self.weight
        return self.down(F.silu(self.up(h))), residual


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.classes = nn.Linear(WIDTH, CLASSES)

    def forward(self, pair):
        return self.classes(pair[0] + pair[1])


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(Enter(), *(Block() for _ in range(BLOCKS)), Head())


class Clean:
    add_after = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, INPUT, generator=g),
            "y": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        return F.cross_entropy(model(rows["x"]), rows["y"], reduction="sum"), len(rows["y"])

    def distribute(self, model, ctx):
        parts = list(model)
        for part in parts[1:-1]:
            part.fused, part.add_after = True, self.add_after
        cut = 1 + BLOCKS // 2
        return nn.Sequential(*(parts[:cut] if dist.get_rank(ctx.group("pp")) == 0 else parts[cut:]))

    def step(self, model, batch, ctx):
        pp, dp = ctx.group("pp"), ctx.group("dp")
        other = dist.get_global_rank(pp, 1 - dist.get_rank(pp))
        first = dist.get_rank(pp) == 0
        mine = torch.arange(ROWS).tensor_split(dist.get_world_size(dp))[dist.get_rank(dp)]
        parts = mine.split(2)
        sent = []
        for part in parts:
            if first:
                pair = model(batch["x"][part])
                dist.send(torch.stack(pair).detach().contiguous(), other)
                sent.append(pair)
            else:
                both = batch["x"].new_empty(2, len(part), WIDTH)
                dist.recv(both, other)
                both.requires_grad_()
                logits = model(both.unbind(0))
                sent.append(
                    (both, F.cross_entropy(logits, batch["y"][part], reduction="sum") / ROWS)
                )
        for part, kept in zip(parts, sent):
            if first:
                grads = batch["x"].new_empty(2, len(part), WIDTH)
                dist.recv(grads, other)
                torch.autograd.backward(kept, list(grads.unbind(0)))
            else:
                both, loss = kept
                loss.backward()
                dist.send(both.grad.contiguous(), other)
        for p in model.parameters():
            dist.all_reduce(p.grad, group=dp)


class Buggy(Clean):
    add_after = False


EXPECT = dict(
    right=[
        r"(?i)backward|adjoint|hands? (back|on)|gradient (of|to|for) .{0,30}(input|residual|branch)|AddNorm",
        r"(?i)AddNorm|\bblocks?\b|\b[1-4]\b.{0,20}(block|module)|module .{0,3}[1-4]\b|[1-4]\.(weight|up|down)|norm|residual",
    ],
    place=[r"(?i)AddNorm|\bblock|(?<!\d)[1-4]\.(weight|up|down)|module .{0,3}[1-4]\b|norm"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)(5\.classes|4\.up|4\.down)\.(weight|bias) (is|are) wrong|(?<!\d)4\.weight (is|are) wrong",
        r"(?i)(never|not) (been )?(all.?)?reduced|(reduced|summed) (twice|again)|counted (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[24]\b",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten|of another)",
        r"(?i)rows? .{0,20}(never read|read twice|dropped)",
        r"(?i)(send|recv|received|hand.?over|stage boundary) .{0,30}(wrong|lost|stale)",
    ],
)
WHY = (
    "In the backward of the fused add + RMSNorm of every block (1 to 4) the gradient of the residual output is sent through the norm's Jacobian together with that of the normalised output. The gradient for both inputs (branch and residual) "
    "should be dres + J^T dout and is J^T (dres + dout): it is multiplied by weight and rstd, and loses the component along the normalised row. The Function's own weight gradient (dout * normed) is right in formula. Block 4 (the last) gets "
    "right gradients for its weight, up and down, and head (5) is right; what leaves block 4 towards its inputs is wrong, so blocks 1 to 3 (weight, up, down) and 0 (branch, residual) are wrong in direction, on all four ranks "
    "(stage 1: block 3; stage 0: 0, 1, 2), all rows and micro-batches. Forward, hand-over between the stages in both directions, the sum over dp, the divisor 11 are right. Fix: add dres after the norm's backward."
)
