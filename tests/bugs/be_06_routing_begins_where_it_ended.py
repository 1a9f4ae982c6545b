"""A capsule network as a pipeline of two stages (primary capsules; routing capsules with dynamic routing), two pipelines side by side (data parallel), three micro-batches of uneven size each, all forwards first and then all backwards. The
routing logits live in a work buffer that is laid out once per step for the largest micro-batch.

The bug: the buffer is not set to zero for each call; the agreements of the earlier micro-batches stay in its rows and routing begins there. After adambielski/CapsNet-pytorch issue 8 (logits bij not initialized to 0) and
shenweichen/DeepMatch issue 44 on the routing logits of MIND.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "pp": 2}}}}
INPUTS, LOWER, UPPER, SMALL, LARGE, ROWS, ROUNDS = 9, 6, 3, 4, 5, 13, 3
PARTS = [[(0, 3), (3, 5), (5, 7)], [(7, 8), (8, 11), (11, 13)]]


def squash(v):
    square = v.pow(2).sum(-1, keepdim=True)
    return v * square / (1 + square) / (square + 1e-6).sqrt()


class Primary(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.out = nn.Linear(INPUTS, 10), nn.Linear(10, LOWER * SMALL)

    def forward(self, x):
        return squash(self.out(F.silu(self.wide(x))).unflatten(1, (LOWER, SMALL)))


class Routing(nn.Module):
    def __init__(self):
        super().__init__()
        self.votes = nn.Parameter(torch.randn(LOWER, UPPER, SMALL, LARGE) * 0.9)
        self.logits, self.fresh = None, True

    def forward(self, u):
        votes = torch.einsum("ris,ijsl->rijl", u, self.votes)
        if self.logits is None or len(self.logits) < len(u) or self.logits.dtype != u.dtype:
            self.logits = u.new_zeros(max(len(u), 4), LOWER, UPPER)
        logits = self.logits[: len(u)]
        if self.fresh:
            logits.zero_()
        with torch.no_grad():
            for _ in range(ROUNDS - 1):
                upper = squash((logits.softmax(2)[..., None] * votes).sum(1))
                logits.add_(4 * (votes * upper[:, None]).sum(-1))
        return squash((logits.softmax(2)[..., None] * votes).sum(1))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.primary, self.routing = Primary(), Routing()

    def forward(self, x):
        return self.routing(self.primary(x))


def margin(upper, label):
    length = (upper.pow(2).sum(-1) + 1e-6).sqrt()
    hit = F.one_hot(label, UPPER).to(length.dtype)
    loss = hit * F.relu(0.9 - length).pow(2) + 0.5 * (1 - hit) * F.relu(length - 0.1).pow(2)
    return loss.sum()


class Clean:
    fresh = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, INPUTS, generator=g) * 2,
            "label": torch.randint(UPPER, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        return margin(model(rows["x"]), rows["label"]), len(rows["label"])

    def distribute(self, model, ctx):
        if ctx.coords["pp"] == 0:
            del model.routing
        else:
            del model.primary
            model.routing.fresh = self.fresh
        return model

    def step(self, model, batch, ctx):
        pipe, stage = ctx.group("pp"), ctx.coords["pp"]
        other = dist.get_global_rank(pipe, 1 - stage)
        parts, kept = PARTS[ctx.coords["dp"]], []
        if stage == 1:
            model.routing.logits = None
        for low, high in parts:
            if stage == 0:
                lower = model.primary(batch["x"][low:high])
                dist.send(lower.detach().contiguous(), other)
                kept.append(lower)
            else:
                lower = batch["x"].new_empty(high - low, LOWER, SMALL)
                dist.recv(lower, other)
                lower.requires_grad_()
                loss = margin(model.routing(lower), batch["label"][low:high]) / ROWS
                kept.append((lower, loss))
        for item in kept:
            if stage == 0:
                grad = torch.empty_like(item)
                dist.recv(grad, other)
                item.backward(grad)
            else:
                lower, loss = item
                loss.backward()
                dist.send(lower.grad.contiguous(), other)
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    fresh = False


EXPECT = dict(
    right=[
        r"(?i)routing|logits|votes|buffer|state|stage 1",
        r"(?i)micro.?batch(es)? (1|2|[^.]{0,20}(after|but|except|later|second|further))|after the first|later micro|second micro|from micro.?batch|not the first|"
        r"left (over|behind)|previous|stale|earlier|stays?|kept|carr",
        r"(?i)forward|state|buffer|left (over|behind)|stale|carr|value|logits",
    ],
    place=[r"(?i)routing|logits|votes|fresh"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed) twice|counted twice",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[23]\b",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)|micro.?batches .{0,20}(swapped|exchanged|in another order)|pair(s|ed) with (an)?other micro",
        r"(?i)primary.{0,25}(goes|is) wrong in the forward|goes wrong (first )?at primary",
        r"(?i)first micro.?batch.{0,25}(goes|is) wrong|all micro.?batch.{0,20}wrong|only (on )?rank 1\b",
        r"(?i)labels? .{0,20}(is|are) wrong|receive buffer",
    ],
)
WHY = (
    "Stage 1 (pp coordinate 1: ranks 1 and 3): Routing.forward takes the first rows of the work buffer `logits` and, with fresh False, does not zero them, so micro-batch 1 and 2 begin routing with the logits that earlier micro-batches of the "
    "same step left in these rows; the first micro-batch of a step finds zeros and is right (rows 0-2 and 7). Wrong from there: rows 3-6 on pipeline 0; on pipeline 1 row 8 of micro-batch 1 (buffer row 0 was used by row 7; rows 9 and 10 find "
    "zeros and are right) and rows 11, 12. The forward goes wrong in `routing`, so gradients of routing.votes and, through the gradient sent back, of primary are wrong. Pipeline order, sends, divisor, all-reduce are right; the "
    "backward matches the forward that was made. Fix: logits.zero_() in each call."
)
