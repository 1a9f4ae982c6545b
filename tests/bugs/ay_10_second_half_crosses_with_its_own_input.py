"""Click prediction with a deep cross network (x_next = x0 * (W x + b) + x, x0 the embedded fields) as a pipeline of two stages with three micro-batches: stage 0 has the tables and two cross layers, stage 1 two more and the head. Each rank
ends with the gradients of all parameters (a sum over the stages). The divisor is the number of rows of the whole batch.

The bug: only x crosses the border, so stage 1 takes what it receives for x0 as well, as a cross layer does that is called with one argument. After tensorflow/recommenders issue 554 (Cross called with one input takes it for x0, stacked
layers need the first one) and shenweichen/DeepCTR issue 416 (what x_0 and x_l are in CrossNet).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"pp": 2}}}}
ROWS, FIELDS, ITEMS, WIDTH = 10, 3, 7, 3
PARTS = [(0, 3), (3, 7), (7, 10)]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(ITEMS, WIDTH) for _ in range(FIELDS)])
        self.cross = nn.ModuleList([nn.Linear(FIELDS * WIDTH, FIELDS * WIDTH) for _ in range(4)])
        self.head = nn.Linear(FIELDS * WIDTH, 1)

    def embed(self, ids):
        return torch.cat([table(ids[:, i]) for i, table in enumerate(self.tables)], 1)

    def layers(self, x0, x, numbers):
        for n in numbers:
            x = x0 * self.cross[n](x) + x
        return x

    def forward(self, ids):
        x0 = self.embed(ids)
        return self.head(self.layers(x0, x0, range(4))).squeeze(-1)


def click_loss(score, click):
    return F.binary_cross_entropy_with_logits(score, click.to(score.dtype), reduction="sum")


class Clean:
    sends_first = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(ITEMS, (ROWS, FIELDS), generator=g),
            "click": torch.randint(2, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        return click_loss(model(rows["ids"]), rows["click"]), len(rows["click"])

    def stage_0(self, model, ids):
        x0 = model.embed(ids)
        x = model.layers(x0, x0, (0, 1))
        border = torch.stack([x0, x]) if self.sends_first else x[None]
        dist.send(border.detach().contiguous(), 1)
        grad = torch.empty_like(border)
        dist.recv(grad, 1)
        border.backward(grad)

    def stage_1(self, model, click, count):
        like = model.head.weight
        shape = (2 if self.sends_first else 1, len(click), FIELDS * WIDTH)
        border = torch.empty(shape, dtype=like.dtype, device=like.device)
        dist.recv(border, 0)
        border.requires_grad_()
        x = model.layers(border[0], border[-1], (2, 3))
        (click_loss(model.head(x).squeeze(-1), click) / count).backward()
        dist.send(border.grad.contiguous(), 0)

    def step(self, model, batch, ctx):
        count = len(batch["click"])
        for low, high in PARTS:
            if ctx.rank == 0:
                self.stage_0(model, batch["ids"][low:high])
            else:
                self.stage_1(model, batch["click"][low:high], count)
        for p in model.parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad, group=ctx.group("pp"))


class Buggy(Clean):
    sends_first = False


EXPECT = dict(
    right=[
        r"(?i)forward|output|input|head|cross",
        r"(?i)cross(\.|\[| )?[23]|stage 1|rank 1|second stage|head|last stage|border|boundary",
        r"(?i)wrong|other|differ|x0|first|instead|missing|not (the )?(right|same)",
    ],
    place=[r"(?i)cross\.[23]|stage 1|rank 1|head|second stage|x0"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) twice|too (early|late)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor (of "
        r")?(1/)?[23]\b",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|missing|swapped|of another)",
        r"(?i)(rank|stage) 0.{0,20}forward .{0,15}wrong|cross\.[01]\b.{0,20}forward .{0,15}wrong",
        r"(?i)forward is right|wrong only in the backward|labels?",
    ],
)
WHY = (
    "Stage 1 (rank 1) computes cross layers 2 and 3 with x0 replaced by the x it receives (the output of cross.1), in all three micro-batches and all rows. The linear maps cross.2 gets the right input, the product behind it is the first "
    "wrong "
    "value; so the input of cross.3 and of head, the scores and the loss are wrong. x0 is not sent, and its gradient from layers 2 and 3 does not come back to the tables. Stage 0's forward (tables, cross.0, cross.1) is right. All "
    "gradients are "
    "wrong, on both ranks the same after the sum. Micro-batch order, labels, divisor 10 and reduction are right. Fix: send x0 along with x and return both gradients."
)
