"""Recommendation with two tasks (click and dwell time): multi-gate mixture of experts on two ranks, data parallel by hand, three micro-batches each of uneven size, one flat all-reduce at the end. The gates' scores have the shape (rows,
tasks, experts); the weights of the experts are their softmax. Binary cross entropy for the click, squared error for the time of clicked rows, one divisor: all rows.

The bug: the softmax of the gates is called without a dimension, as in old code. For a tensor of three dimensions, PyTorch then takes dimension 0, the rows, and not the last one, the experts. The rows of a micro-batch share a weight of
one per task and expert. After pytorch/pytorch #1020 (confusing behaviour of softmax for three dimensions).
"""

import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
USERS, ITEMS, WIDTH, EXPERTS, TASKS = 6, 9, 5, 3, 2
PARTS = [[(0, 3), (3, 5), (5, 9)], [(9, 11), (11, 15), (15, 16)]]


class Gates(nn.Module):
    def __init__(self):
        super().__init__()
        self.score = nn.Linear(2 * WIDTH, TASKS * EXPERTS)
        self.named_dim = True

    def forward(self, x):
        scores = self.score(x).unflatten(1, (TASKS, EXPERTS))
        if self.named_dim:
            return F.softmax(scores, dim=-1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return F.softmax(scores)


class MixtureOfTasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.user, self.item = nn.Embedding(USERS, WIDTH), nn.Embedding(ITEMS, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(EXPERTS))
        self.gates = Gates()
        self.towers = nn.ModuleList(nn.Linear(WIDTH, 1) for _ in range(TASKS))

    def forward(self, user, item):
        x = torch.cat([self.user(user), self.item(item)], 1)
        outs = torch.stack([F.silu(e(x)) for e in self.experts], 1)
        mixed = self.gates(x) @ outs
        return [tower(mixed[:, task])[:, 0] for task, tower in enumerate(self.towers)]


def task_loss(model, rows):
    click, time = model(rows["user"], rows["item"])
    clicked = rows["click"].to(click.dtype)
    return (
        F.binary_cross_entropy_with_logits(click, clicked, reduction="sum")
        + (clicked * (time - rows["time"].to(time.dtype)).square()).sum()
    )


class Clean:
    named_dim = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return MixtureOfTasks()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = PARTS[-1][-1][1]
        return {
            "user": torch.randint(USERS, (rows,), generator=g),
            "item": torch.randint(ITEMS, (rows,), generator=g),
            "click": torch.rand(rows, generator=g) < 0.6,
            "time": torch.randn(rows, generator=g) + 1,
        }

    def loss_sum(self, model, rows):
        return task_loss(model, rows), len(rows["user"])

    def distribute(self, model, ctx):
        model.gates.named_dim = self.named_dim
        return model

    def step(self, model, batch, ctx):
        count = len(batch["user"])
        for low, high in PARTS[ctx.rank]:
            rows = {k: v[low:high] for k, v in batch.items()}
            (task_loss(model, rows) / count).backward()
        grads = [p.grad for p in model.parameters()]
        flat = torch.cat([g.flatten() for g in grads])
        dist.all_reduce(flat, group=ctx.group("dp"))
        for grad, part in zip(grads, flat.split([g.numel() for g in grads])):
            grad.copy_(part.view_as(grad))


class Buggy(Clean):
    named_dim = False


EXPECT = dict(
    right=[
        r"(?i)gates?\b|softmax|mixture",
        r"(?i)forward|output|softmax|dimension|axis|across|over the rows|other rows|between rows|couple|depend",
        r"(?i)wrong|differ|other|across|instead|depend|couple|not ",
    ],
    place=[r"(?i)gates?\b"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) twice|wrong divisor|mean of means",
        r"(?i)divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)forward is right|wrong only in the backward|backward of .{0,30}wrong",
        r"(?i)only (on )?rank [01]\b|rank [01] alone",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|only (in )?(the )?(first|last) micro.?batch",
        r"(?i)(score|experts?|user|item|embedding)('s)? (own )?(forward|output).{0,20}wrong",
        r"(?i)(flat|unflatten|copied back).{0,40}(is|are|goes) (wrong|mixed|shifted|swapped)",
    ],
)
WHY = (
    "Both ranks, all micro-batches: the gates' softmax runs over the rows of the micro-batch instead of the experts, so the weights of a row depend on the other rows of its micro-batch and do not add up to one over the experts (in "
    "the micro-batch of one row, row 15, they are all one, and the gate gets no gradient from it). Inputs of the gates (embeddings, score) and the experts' outputs are right; the forward goes wrong at the output of `gates`. All "
    "gradients are wrong on both ranks equally: towers and experts by the wrong mixture, gates.score by the wrong Jacobian, embeddings through both. Divisor 16, accumulation and the flat all-reduce are right. Fix: "
    "F.softmax(scores, dim=-1)."
)
