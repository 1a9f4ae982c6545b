"""Adversarial training under DDP on three ranks (5, 4 and 6 rows, micro-batches of at most two rows, no_sync for all but the last): each micro-batch is attacked with one normalised gradient step on its inputs (FGM), then the loss at the
perturbed inputs is trained. The attack runs on the unwrapped module.

The bug: the attack takes the gradient of its perturbation by `attack_loss.backward()` and reads `delta.grad`; the same call puts the gradient of the loss at the clean inputs into `.grad` of all weights, where it stays. As in
BorealisAI/advertorch issue 113 (parameter gradients may accumulate in gradient-based attacks; autograd.grad instead of backward) and P2333/Bag-of-Tricks-for-AT issue 8 (gradient accumulated!).
"""

import contextlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
OWN, MICRO, FEATURES, CLASSES, EPSILON = [5, 4, 6], 2, 6, 4, 0.4


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(FEATURES, 8)
        self.norm = nn.LayerNorm(8)
        self.middle = nn.Linear(8, 7)
        self.out = nn.Linear(7, CLASSES)

    def forward(self, x):
        return self.out(F.silu(self.middle(self.norm(F.silu(self.lift(x))))))


def attack(net, x, y, backward):
    delta = torch.zeros_like(x, requires_grad=True)
    loss = F.cross_entropy(net(x + delta), y)
    if backward:
        loss.backward()
        gradient = delta.grad
    else:
        (gradient,) = torch.autograd.grad(loss, delta)
    length = gradient.norm(dim=1, keepdim=True)
    return (x + EPSILON * gradient / length).detach()


class Clean:
    backward = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = sum(OWN)
        return {
            "x": torch.randn(rows, FEATURES, generator=g),
            "y": torch.randint(CLASSES, (rows,), generator=g),
        }

    def loss_sum(self, model, rows):
        x = attack(model, rows["x"], rows["y"], False)
        return F.cross_entropy(model(x), rows["y"], reduction="sum"), len(x)

    def distribute(self, model, ctx):
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        first = sum(OWN[: ctx.rank])
        parts = torch.arange(first, first + OWN[ctx.rank]).split(MICRO)
        for turn, part in enumerate(parts):
            x, y = batch["x"][part], batch["y"][part]
            hostile = attack(model.module, x, y, self.backward)
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                loss = F.cross_entropy(model(hostile), y, reduction="sum")
                (loss * ctx.world_size / sum(OWN)).backward()


class Buggy(Clean):
    backward = True


EXPECT = dict(
    right=[
        r"(?i)attack|perturb|delta|adversar|clean input|another loss|(second|extra|further|additional|other|foreign|more than one|two) "
        r"(backward|loss|term|forward|contribution|gradient|pass)|extra|(backward|forward).{0,30}(twice|more than once|second|again|two)",
        r"(?i)accumulat|\.grad\b|stay|left|remain|added|adds|too much|on top|extra|additional|contribut|backward",
    ],
    place=[
        r"(?i)attack|delta|all (parameters|weights|tensors)|every (parameter|weight|tensor)|backward|module"
    ],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed) (twice|again)|ranks (differ|disagree)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)|only the last micro.?batch",
        r"(?i)forward (of the model )?(is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)only (on )?rank \d|rank \d alone",
        r"(?i)no_sync .{0,40}(wrong|missing|left out|too (early|late))",
    ],
)
WHY = (
    "The trained loss is right: perturbed inputs, forward and its backward agree with the reference, divisor 15 and DDP's averaging too. In every micro-batch of every rank the attack's own loss.backward() adds the gradient of the "
    "mean cross-entropy of the micro-batch at the clean inputs (delta = 0) to .grad of all parameters before the real backward; these are the local sums that DDP averages with the last backward. So all parameters on all ranks get, "
    "equally, an extra third of the sum over ranks and micro-batches (3 + 2 + 3) of these means, not scaled by 3 / 15. Fix: torch.autograd.grad(loss, delta), or the weights without requires_grad during the attack (not zero_grad, "
    "which would lose earlier micro-batches)."
)
