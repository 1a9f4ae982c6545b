"""Two pipeline stages of two tensor-parallel ranks each (pp 2, tp 2), three micro-batches. The boundary tensor is cut along the features: every tp rank sends its half to its partner in the next stage, where the halves are gathered
(scatter/gather optimisation); gradients go back in the same way. Stage 0 is replicated over tp, stage 1 is a column/row-parallel block with a residual path and a replicated head.

The bug: the gradient of stage 1's input is cut and sent before it is complete: the block's column-parallel input has no all-reduce in its backward, "the gather on the other side makes it whole", but gathering halves is no sum. After
the scatter/gather option of Megatron-LM (issue 3921, PR 4032) and ColossalAI PR 123, which need the same tensor on all tp ranks.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"pp": 2, "tp": 2}}}}
FEATURES, WIDTH, HIDDEN, CLASSES = 5, 6, 8, 4
PARTS = [(0, 2), (2, 5), (5, 6)]
ROWS = 6


class CopyIn(torch.autograd.Function):
    """Identity; the backward sums the gradients of the tensor-parallel ranks."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class SumOut(torch.autograd.Function):
    """Sum of the partial results; the backward hands the gradient on as it is."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return self.outer(torch.tanh(self.inner(x)))


class Second(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x, tp=None, complete=True):
        if tp is None:
            return self.head(self.norm(x + self.down(F.silu(self.up(x)))))
        half = HIDDEN // dist.get_world_size(tp)
        own = slice(dist.get_rank(tp) * half, (dist.get_rank(tp) + 1) * half)
        inside = CopyIn.apply(x, tp) if complete else x
        hidden = F.silu(F.linear(inside, self.up.weight[own], self.up.bias[own]))
        y = SumOut.apply(F.linear(hidden, self.down.weight[:, own]), tp) + self.down.bias
        return self.head(self.norm(x + y))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = First(), Second()

    def forward(self, x):
        return self.second(self.first(x))


def send_half(x, tp, to):
    dist.send(x.detach().chunk(dist.get_world_size(tp), -1)[dist.get_rank(tp)].contiguous(), to)


def receive_halves(shape, dtype, tp, source):
    half = torch.empty(shape[0], shape[1] // dist.get_world_size(tp), dtype=dtype)
    dist.recv(half, source)
    halves = [torch.empty_like(half) for _ in range(dist.get_world_size(tp))]
    dist.all_gather(halves, half, group=tp)
    return torch.cat(halves, -1)


class Clean:
    complete = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, FEATURES, generator=g),
            "label": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        return F.cross_entropy(model(rows["x"]), rows["label"], reduction="sum"), len(rows["label"])

    def step(self, model, batch, ctx):
        tp, pp = ctx.group("tp"), ctx.group("pp")
        stage, dtype = dist.get_rank(pp), model.first.inner.weight.dtype
        partner = dist.get_global_rank(pp, 1 - stage)
        kept = []
        for low, high in PARTS:
            if stage == 0:
                kept.append(model.first(batch["x"][low:high]))
                send_half(kept[-1], tp, partner)
            else:
                x = receive_halves((high - low, WIDTH), dtype, tp, partner).requires_grad_()
                logits = model.second(x, tp, self.complete)
                loss = F.cross_entropy(logits, batch["label"][low:high], reduction="sum")
                kept.append((x, loss / ROWS))
        for turn, (low, high) in enumerate(PARTS):
            if stage == 0:
                kept[turn].backward(receive_halves((high - low, WIDTH), dtype, tp, partner))
            else:
                x, loss = kept[turn]
                loss.backward()
                send_half(x.grad, tp, partner)
        for name, p in model.named_parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            if name in ("second.up.weight", "second.up.bias", "second.down.weight"):
                dist.all_reduce(p.grad, group=tp)
            dist.all_reduce(p.grad, group=pp)


class Buggy(Clean):
    complete = False


EXPECT = dict(
    right=[
        r"(?i)boundary|stage|pipeline|first|hand(s|ed)? (back|on|over)|input|sent|send|up\b|copy",
        r"(?i)gradient|backward|adjoint",
        r"(?i)partial|incomplete|not (been )?(summed|reduced|added)|miss|lack|own (half|part|share)|without|all.?reduce|sum|tensor.parallel|tp\b|wrong",
    ],
    place=[r"(?i)first|stage 0|boundary|second'?s? input|second\.up|up\b|stage 1"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)second\.[a-z.]*(weight|bias) (is|are) wrong|(head|norm) (is|are) wrong",
        r"(?i)(reduced|summed|counted) (twice|again)|wrong divisor|mean of means",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|swapped)|another micro.?batch",
        r"(?i)factor of (1/)?2\b|twice (too large|as large)|half (as large|of the right)",
        r"(?i)only (the )?(first|last) micro.?batch|only rank \d\b",
        r"(?i)wrong order|permut|layout|swapped",
    ],
)
WHY = (
    "On stage 1 (both tp ranks) the gradient of the received boundary tensor x is, without CopyIn, the complete residual part plus only this rank's share of the column-parallel part (up's weight[own]^T). It is cut along the "
    "features: tp rank 0 sends features 0-2 with its own share of "
    "hidden units 0-3, tp rank 1 features 3-5 with hidden units 4-7; the gather on stage 0 puts halves together and adds nothing. So the gradient of stage 0's output lacks the other tp rank's share in every feature, in all "
    "three micro-batches and rows. first.inner and first.outer are wrong in direction, equally on all ranks; "
    "all of second is right, also the forward, the divisor 6, the sums over tp (up, down.weight) and pp. Fix: sum the input gradient over tp (CopyIn) before it is cut and sent."
)
