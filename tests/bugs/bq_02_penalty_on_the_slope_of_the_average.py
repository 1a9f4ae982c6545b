"""A WGAN-GP critic's turn on three data-parallel ranks: conditional critic, 11 rows of unlike shares (4, 4, 3), two micro-batches each. Loss of a row: score of the fake - score of the real + 10 (|gradient at the mixed sample| - 1)^2, sum over
rows divided by the number of all rows; gradients are put in one flat buffer and summed over the ranks.

The bug: the inner gradient of the penalty is that of the MEAN score of the micro-batch instead of each sample's own score, so the slope is divided by the number of rows of the micro-batch before it is compared with one. After
several WGAN-GP repositories' issues (autograd.grad(outputs=critic(x).mean(), inputs=x, create_graph=True)).
"""

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, FEATURES, WIDTH, CLASSES, WEIGHT = 11, 6, 9, 3, 10.0


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.condition = nn.Embedding(CLASSES, WIDTH)
        self.inner = nn.Linear(FEATURES, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.score = nn.Linear(WIDTH, 1)

    def forward(self, x, y):
        h = torch.tanh(2 * self.inner(x) + self.condition(y))
        return self.score(h + torch.tanh(self.middle(h))).squeeze(-1)


def slope_penalty(model, mixed, y):
    mixed = mixed.detach().requires_grad_()
    scores = model(mixed, y)
    (slope,) = torch.autograd.grad(
        scores, mixed, grad_outputs=torch.ones_like(scores), create_graph=True
    )
    return (slope.norm(dim=1) - 1).square()


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Critic()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "real": torch.randn(ROWS, FEATURES, generator=g),
            "fake": 0.5 * torch.randn(ROWS, FEATURES, generator=g) + 0.3,
            "mix": torch.rand(ROWS, 1, generator=g),
            "y": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        real, fake, y = rows["real"], rows["fake"], rows["y"]
        mixed = rows["mix"] * real + (1 - rows["mix"]) * fake
        with torch.enable_grad():
            penalty = slope_penalty(model, mixed, y)
        return (model(fake, y) - model(real, y) + WEIGHT * penalty).sum(), len(y)

    def gradient_penalty(self, model, real, fake, mix, y):
        return slope_penalty(model, mix * real + (1 - mix) * fake, y)

    def critic_loss(self, model, part):
        real, fake, y = part["real"], part["fake"], part["y"]
        wasserstein = model(fake, y).sum() - model(real, y).sum()
        penalty = self.gradient_penalty(model, real, fake, part["mix"], y)
        return wasserstein + WEIGHT * penalty.sum()

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        params = list(model.parameters())
        for p in params:
            p.grad = None
        for n in range(2):
            part = {k: v.tensor_split(2)[n] for k, v in mine.items()}
            (self.critic_loss(model, part) / ROWS).backward()
        flat = torch.cat([p.grad.flatten() for p in params])
        dist.all_reduce(flat, group=ctx.group("dp"))
        for p, g in zip(params, flat.split([p.numel() for p in params])):
            p.grad.copy_(g.view_as(p))


class Buggy(Clean):
    def gradient_penalty(self, model, real, fake, mix, y):
        mixed = (mix * real + (1 - mix) * fake).detach().requires_grad_()
        scores = model(mixed, y)
        (slope,) = torch.autograd.grad(scores.mean(), mixed, create_graph=True)
        return (slope.norm(dim=1) - 1).square()


EXPECT = dict(
    right=[
        r"mean|averag|divid|1 ?/ ?(n|2|rows|batch)|scaled|too small|number of rows|half|factor|(micro.?)?batch size|couple|other rows",
        r"penalty|inner|slope|create_graph|autograd\.grad|double backward|second.?order|mixed|scores|critic_loss",
    ],
    place=[
        r"gradient_penalty|slope",
        r"scores\.mean|scores",
        r"autograd\.grad|mixed",
        r"critic_loss",
    ],
    wrong=[
        r"all.?reduce.{0,40}(missing|wrong|twice)|not reduced|reduced twice",
        r"(loss|final|token|row) (count|divisor|normali[sz]er).{0,40}(own|local)|mean of means of the ranks",
        r"create_graph.{0,20}(missing|false)|graph (is )?cut|detach",
        r"last micro.?batch|overwritten|wrong rows",
    ],
)
WHY = (
    "In gradient_penalty the slope is the gradient of scores.mean(), i.e. each row's slope divided by the rows of its micro-batch (two, or one for the last), before the distance of its norm from one is squared; the penalty and its gradient are wrong on every rank in "
    "every micro-batch of two rows (right only where a micro-batch has one row, the second one of the last rank). The wasserstein terms, the divisor ROWS and the sum over the ranks are right. A right cause names the mean / the division by the micro-batch's rows within the inner gradient of the penalty. "
    "Fix: scores.sum() or grad_outputs of ones."
)
