"""Pipeline of two stages times data parallelism of two, hand-written (all forwards, then all backwards), gradients of the micro-batches added pairwise for a sum that does not depend on their order of magnitude: a binary counter of partial
sums, two sums of the same level are merged into the next level. The first pipeline has four micro-batches of two rows, the second three (2, 2, 1 rows).

The bug: at the end the accumulator hands out its highest level, which is the whole sum only if the number of micro-batches is a power of two; what waits at lower levels is dropped. As in mflux-community/mflux PR 447 (the terminal
accumulation window is discarded) and tracel-ai/burn issue 5695 (gradient accumulation drops the final partial window).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "pp": 2}}}}
ROWS, MICRO, FEATURES, WIDTH, CLASSES = [8, 5], 2, 5, 6, 4


class PairwiseSum:
    """Partial sums by level: level k holds 2 ** k micro-batches."""

    def __init__(self):
        self.levels = []

    def add(self, tensors):
        level = 0
        while level < len(self.levels) and self.levels[level] is not None:
            tensors = [a + b for a, b in zip(self.levels[level], tensors)]
            self.levels[level] = None
            level += 1
        if level == len(self.levels):
            self.levels.append(None)
        self.levels[level] = tensors

    def result(self, highest_only):
        if highest_only:
            return self.levels[-1]
        waiting = [level for level in self.levels if level is not None]
        return [sum(t) for t in zip(*waiting)]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lower = nn.Sequential(
            nn.Linear(FEATURES, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH), nn.Tanh()
        )
        self.upper = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, CLASSES)
        )

    def forward(self, x):
        return self.upper(self.lower(x))


class Clean:
    highest_only = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(sum(ROWS), FEATURES, generator=g),
            "y": torch.randint(CLASSES, (sum(ROWS),), generator=g),
        }

    def loss_sum(self, model, rows):
        return F.cross_entropy(model(rows["x"]), rows["y"], reduction="sum"), len(rows["y"])

    def step(self, model, batch, ctx):
        dp, pp = ctx.group("dp"), ctx.group("pp")
        line, stage = dist.get_rank(dp), dist.get_rank(pp)
        other = dist.get_global_rank(pp, 1 - stage)
        first = sum(ROWS[:line])
        parts = torch.arange(first, first + ROWS[line]).split(MICRO)
        module = model.upper if stage else model.lower
        own, total, kept = list(module.parameters()), PairwiseSum(), []
        for part in parts:
            if stage:
                x = batch["x"].new_empty(len(part), WIDTH)
                dist.recv(x, src=other, group=pp)
                x.requires_grad_()
                loss = F.cross_entropy(module(x), batch["y"][part], reduction="sum")
                kept.append((x, loss / sum(ROWS)))
            else:
                out = module(batch["x"][part])
                dist.send(out.detach(), dst=other, group=pp)
                kept.append((None, out))
        for x, out in kept:
            if stage:
                back, *grads = torch.autograd.grad(out, [x, *own])
                dist.send(back.contiguous(), dst=other, group=pp)
            else:
                back = torch.empty_like(out)
                dist.recv(back, src=other, group=pp)
                grads = torch.autograd.grad(out, own, back)
            total.add(list(grads))
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        for p, grad in zip(own, total.result(self.highest_only)):
            p.grad.copy_(grad)
        for p in model.parameters():
            dist.all_reduce(p.grad)


class Buggy(Clean):
    highest_only = True


EXPECT = dict(
    right=[
        r"(?i)micro.?batch|rows? 12|row 12",
        r"(?i)lost|drop|missing|never|left out|not (in|added|counted|contain|reach|read|used)|absent|only (the )?(first|some)|no (part|weight|contribution)|weight 0|coefficient 0|ignored|discard",
        r"(?i)last|third|micro.?batch(es)? (number )?2\b|#2\b|final|rows? 12|odd|remain|level|ranks? (2|3)|second (pipeline|replica|line)",
    ],
    place=[r"(?i)PairwiseSum|accumulat|level|result|micro.?batch|ranks? (2|3)|row"],
    wrong=[
        r"(?i)only the last micro.?batch|all but the last micro.?batch (is|are) (lost|dropped)|overwritten by the last",
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)only (the )?(lower|upper|first|second) stage|stage [01] (alone|only)",
        r"(?i)gradient (sent|received|transport).{0,40}(wrong|lost|other)|boundary",
    ],
)
WHY = (
    "The first pipeline (ranks 0, 1; rows 0-7) has four micro-batches: level 2 holds them all, right. The second (ranks 2, 3; rows 8-12) has three: level 1 holds rows 8-11, level 0 the last micro-batch, row 12, which result() "
    "leaves. Its gradient was worked out and sent back rightly on both stages, but is in no rank's sum: after the all-reduce row 12 has weight 0 instead of 1/13 for all parameters of both stages, all ranks agree. Other rows, "
    "divisor, transport and reduction are right. Fix: add all levels that hold something."
)
