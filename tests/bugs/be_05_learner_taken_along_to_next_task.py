"""Few-shot regression with MAML (two inner steps, second order) on three ranks; a row of the batch is a task with support and query points. Every rank takes its tasks in micro-batches (3, 1 + 2, 2 tasks), gradients are summed over the
ranks in one flat all-reduce, the divisor is the number of tasks.

The bug: the learner (the dictionary of fast weights) is made once per micro-batch, not once per task, so the second and later tasks of a micro-batch start from what the one before them has adapted to. After the questions on clone() in
learnables/learn2learn (issue 169, About 'Clone' Function): a clone per task is what keeps the tasks apart.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
POINTS, QUERIES, WIDTH, ROWS = 4, 3, 6, 8
PARTS = [[(0, 3)], [(3, 4), (4, 6)], [(6, 8)]]
INNER_RATE, INNER_STEPS = 0.15, 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(2, WIDTH)
        self.two = nn.Linear(WIDTH, WIDTH)
        self.three = nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.three(torch.tanh(self.two(torch.tanh(self.one(x))))).squeeze(-1)


def adapt(model, weights, x, y):
    for _ in range(INNER_STEPS):
        loss = F.mse_loss(functional_call(model, weights, (x,)), y)
        grads = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        weights = {k: w - INNER_RATE * g for (k, w), g in zip(weights.items(), grads)}
    return weights


class Clean:
    per_task = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        x = torch.randn(ROWS, POINTS + QUERIES, 2, generator=g)
        slope = torch.randn(ROWS, 2, generator=g)
        y = torch.sin(2 * (x * slope[:, None]).sum(-1)) + slope[:, :1]
        return {"x": x, "y": y}

    def loss_sum(self, model, rows):
        total = 0.0
        for x, y in zip(rows["x"], rows["y"]):
            fast = adapt(model, dict(model.named_parameters()), x[:POINTS], y[:POINTS])
            guess = functional_call(model, fast, (x[POINTS:],))
            total = total + F.mse_loss(guess, y[POINTS:])
        return total, len(rows["y"])

    def step(self, model, batch, ctx):
        for low, high in PARTS[ctx.rank]:
            learner = dict(model.named_parameters())
            total = 0.0
            for task in range(low, high):
                x, y = batch["x"][task], batch["y"][task]
                if self.per_task:
                    learner = dict(model.named_parameters())
                learner = adapt(model, learner, x[:POINTS], y[:POINTS])
                guess = functional_call(model, learner, (x[POINTS:],))
                total = total + F.mse_loss(guess, y[POINTS:])
            (total / ROWS).backward()
        flat = torch.cat([p.grad.flatten() for p in model.parameters()])
        dist.all_reduce(flat, group=ctx.group("dp"))
        sizes = [p.numel() for p in model.parameters()]
        for p, part in zip(model.parameters(), flat.split(sizes)):
            p.grad.copy_(part.view_as(p))


class Buggy(Clean):
    per_task = False


EXPECT = dict(
    right=[
        r"(?i)weights?|learner|state|adapt|fast|inner|couple|depend|carr|left|other rows|previous|preced|earlier|param",
        r"(?i)rows?|task|(second|later|further|after the first|not the first|previous|preced|earlier|next)",
        r"(?i)forward|value|state|depend|couple|left (over|behind)|carr|previous|preced|earlier|other|weights",
    ],
    place=[
        r"(?i)learner|adapt|per_task|fast|weights|\bone\b|\btwo\b|\bthree\b|Net\b|model|\bstep\b"
    ],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed) twice|counted twice",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[23]\b",
        r"(?i)detach|first.?order|without (the )?graph|no_grad",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|only the last micro.?batch",
        r"(?i)only (on )?rank [012]\b|rank [012] alone|rows? (0|3|4|6) (goes|is|are) wrong|all rows (go|are) wrong",
        r"(?i)labels? .{0,20}(is|are) wrong|from the (previous|earlier) step|micro.?batch before",
    ],
)
WHY = (
    "Within a micro-batch the fast weights (`learner`) are not started anew: task 0 of each micro-batch starts from the model's parameters (right: rows 0, 3, 4, 6), every later one (rows 1, 2 on rank 0; row 5 in micro-batch 1 of rank 1; row 7 on "
    "rank 2) starts from what the task before has adapted to, and its gradient also runs through that task's support set. Nothing is carried from one micro-batch to the next (learner is made before the loop over the tasks): rank 1's first "
    "micro-batch is right. All parameters are wrong. Flat all-reduce, divisor 8, second-order graph are right. Fix: learner = dict(model.named_parameters()) for each task."
)
