"""Three tasks on a shared trunk with gradient surgery (PCGrad: a task's gradient loses its component against another's when they conflict).
After issues of PyTorch-PCGrad and LibMTL on multi-GPU training, and FAULTS C17 (a global quantity made of the rank's own): the
projection is done with the rank's own gradients, the sum over ranks comes afterwards.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, INPUTS, WIDTH = 14, 5, 7
TASKS = "speed", "angle", "brake"


class Drive(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Linear(INPUTS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        )
        self.heads = nn.ModuleDict({t: nn.Linear(WIDTH, 1) for t in TASKS})

    def forward(self, x):
        x = self.trunk(x)
        return {t: head(x)[:, 0] for t, head in self.heads.items()}


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        model = Drive()
        with torch.no_grad():  # as if trained before on the other two
            model.heads["angle"].weight.copy_(model.heads["speed"].weight + 0.1)
        return model

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        x = torch.randn(ROWS, INPUTS, generator=g)
        aim = torch.sin(x.sum(1)) + 1.5
        return {
            "x": x,
            "speed": aim,
            "angle": 0.4 * x[:, 0] - aim,
            "brake": torch.randn(ROWS, generator=g),
        }

    @staticmethod
    def task_losses(model, rows):
        out = model(rows["x"])
        return [(out[t] - rows[t]).square().sum() for t in TASKS]

    @staticmethod
    def gradients(model, losses):
        """One flat gradient of the trunk per task."""
        params = list(model.trunk.parameters())
        grads = [torch.autograd.grad(loss, params, retain_graph=True) for loss in losses]
        return torch.stack([torch.cat([g.flatten() for g in each]) for each in grads])

    @staticmethod
    def surgery(grads):
        done = []
        for i, grad in enumerate(grads):
            for j, other in enumerate(grads):
                dot = grad @ other
                if i != j and dot < 0:
                    grad = grad - dot / other.square().sum() * other
            done.append(grad)
        return torch.stack(done).sum(0)

    def loss_sum(self, model, rows):
        losses, n = self.task_losses(model, rows), len(rows["x"])
        trunk = self.surgery(self.gradients(model, losses))
        heads = torch.autograd.grad(sum(losses), list(model.heads.parameters()), retain_graph=True)
        flat = torch.cat([p.flatten() for p in model.parameters()])
        return flat @ torch.cat([trunk, *(g.flatten() for g in heads)]).detach(), n

    def combine(self, grads):
        dist.all_reduce(grads)
        return self.surgery(grads)

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        losses = [loss / ROWS for loss in self.task_losses(model, mine)]
        trunk = self.combine(self.gradients(model, losses))
        sum(losses).backward()
        for param in model.heads.parameters():
            dist.all_reduce(param.grad)
        params = list(model.trunk.parameters())
        for param, grad in zip(params, trunk.split([p.numel() for p in params])):
            param.grad = grad.view_as(param).clone()


class Buggy(Clean):
    def combine(self, grads):
        grads = self.surgery(grads)
        dist.all_reduce(grads)
        return grads


EXPECT = dict(
    right=[
        r"trunk",
        r"own|local|before|shard|coupl|global|non.?(linear|additive)|not .{0,20}additive|per.rank|rank|statistic|share|depends|interact",
    ],
    place=[r"trunk"],
    wrong=[
        r"heads\.\S+ (is|are|has|have) (a )?wrong",
        r"never (been )?(all.?)?reduced|is not reduced|missing (all.?)?reduc",
        r"counted (twice|\d times)|reduced (twice|again)",
        r"forward (pass )?(is|was) wrong",
        r"mean of (the )?(rank |ranks' )?means",
        r"(rows?|micro-?batch(es)?) \S* ?(is|are|was|were) (lost|missing|dropped)",
    ],
)
WHY = (
    "The projection is not linear, so the sum of the ranks' projected gradients is not the projection of the summed ones: trunk.* is "
    "wrong, equally on all ranks. The heads, which take no part in the surgery, and the forward are right."
)
