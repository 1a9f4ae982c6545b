"""A recommender with two tasks (click, and the time a film is watched) on a shared trunk of user and film embeddings, on three data parallel ranks (4, 3 and 3 of ten rows; two micro-batches). The trunk and each head
are DDP modules of their own. As in MGDA on the representation, each task goes back to a leaf that stands for the trunk's output, where their gradients are seen and added; then the sum goes back through the trunk. The watch time
counts 0.4.

The bug: the sum goes back through the trunk by torch.autograd.grad, so that its gradients can be measured before they are added to .grad; DDP's hooks hang on the accumulation of .grad and do not run, so the trunk
is never averaged over the ranks. After the line in DDP's documentation that it does not work with torch.autograd.grad, and reports of multi-task training (GradNorm, PCGrad) that found it out.
"""

import contextlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
USERS, FILMS, WIDTH, FEATURES, ROWS = 6, 8, 4, 7, 10
WEIGHT = {"click": 1.0, "watch": 0.4}


class Trunk(nn.Module):
    def __init__(self):
        super().__init__()
        self.users = nn.Embedding(USERS, WIDTH)
        self.films = nn.Embedding(FILMS, WIDTH)
        self.mix = nn.Sequential(
            nn.Linear(2 * WIDTH, 9), nn.Tanh(), nn.Linear(9, FEATURES), nn.Tanh()
        )

    def forward(self, user, film):
        return self.mix(torch.cat([self.users(user), self.films(film)], -1))


class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = Trunk()
        self.click = nn.Linear(FEATURES, 1)
        self.watch = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, 1))


def task_loss(task, out, rows):
    if task == "click":
        return F.binary_cross_entropy_with_logits(
            out[:, 0], rows["click"].to(out.dtype), reduction="sum"
        )
    return (out[:, 0] - rows["watch"]).square().sum()


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Recommender()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "user": torch.randint(USERS, (ROWS,), generator=g),
            "film": torch.randint(FILMS, (ROWS,), generator=g),
            "click": torch.randint(2, (ROWS,), generator=g),
            "watch": torch.rand(ROWS, generator=g),
        }

    def loss_sum(self, model, rows):
        features = model.trunk(rows["user"], rows["film"])
        return sum(
            w * task_loss(task, getattr(model, task)(features), rows) for task, w in WEIGHT.items()
        ), len(rows["user"])

    def distribute(self, model, ctx):
        for name in ["trunk", *WEIGHT]:
            setattr(model, name, DDP(getattr(model, name), process_group=ctx.group("dp")))
        return model

    def back_through(self, trunk, features, grad):
        features.backward(grad)
        self.size = grad.norm()

    def step(self, model, batch, ctx):
        for p in model.parameters():
            p.grad = None
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        for n in range(2):
            part = {k: v.tensor_split(2)[n] for k, v in mine.items()}
            with contextlib.ExitStack() as stack:
                if n == 0:
                    for name in ["trunk", *WEIGHT]:
                        stack.enter_context(getattr(model, name).no_sync())
                features = model.trunk(part["user"], part["film"])
                shared = features.detach()
                wishes = []
                for task, weight in WEIGHT.items():
                    leaf = shared.clone().requires_grad_()
                    loss = weight * task_loss(task, getattr(model, task)(leaf), part)
                    (loss * ctx.world_size / ROWS).backward()
                    wishes.append(leaf.grad)
                self.back_through(model.trunk, features, sum(wishes))


class Buggy(Clean):
    def back_through(self, trunk, features, grad):
        parameters = list(trunk.parameters())
        grads = torch.autograd.grad(features, parameters, grad)
        self.size = torch.stack([g.norm() for g in grads]).norm()
        for p, g in zip(parameters, grads):
            p.grad = g if p.grad is None else p.grad + g


EXPECT = dict(
    right=[
        r"not (\w+ ){0,4}(reduced|averaged|synchroni[sz]ed|summed|all.?reduced)|never (\w+ ){0,3}(reduced|averaged|synchroni[sz]ed|summed|all.?reduced)|missing (all.?)?reduc|(all.?)?reduc\w+ (is )?(missing|left out|skipped)|unreduced|own gradient|local gradient|without (an? )?(all.?)?reduc|only (its|the rank'?s?) own|(is|are) left out of",
        r"trunk|users|films|mix|parameters",
    ],
    place=[r"trunk", r"autograd\.grad|back_through", r"users|films|mix"],
    wrong=[
        r"(click|watch)\S* .{0,40}not (been )?(all.?)?(reduced|averaged)",
        r"(reduced|summed|counted) (twice|again)|mean of means",
        r"micro.?batch(es)? .{0,20}(dropped|overwritten|never read)|only the last micro.?batch",
        r"backward formula|computes wrong in the forward|(wrong|other) rows",
    ],
)
WHY = (
    "Buggy.back_through asks for the trunk's gradients with torch.autograd.grad and adds them to .grad itself; nothing is accumulated by autograd, so the hooks of the DDP around the trunk do not run and no bucket is sent. The trunk's parameters, the two "
    "embeddings and mix, keep on each of the three ranks the sum over the rank's own two micro-batches, times 3 / 10: unlike between the ranks and, averaged, just the right gradient. Forward, losses, the heads click and watch (they go through backward() and are "
    "averaged) and the gradients at the leaves are right. Fix: features.backward(grad), or an all-reduce with AVG of the trunk's gradients after the last micro-batch."
)
